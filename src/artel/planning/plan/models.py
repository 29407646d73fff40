"""The run's model on the meta device, with all or fewer layers, before it is sharded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.models.attention_switch import use_artel_attention
from artel.models.compile import repeated_layers
from artel.models.half_base import hold_in_half
from artel.models.loading.build import base_dtype
from artel.models.loading.check import check_positions
from artel.models.loading.heads import freeze_unused
from artel.models.loading.structure import build_from_scratch, build_pretrained_structure, build_without_weights
from artel.models.lora.adapters import add_adapters, freeze
from artel.models.quantization import quantize_structure, shrink_weights
from artel.objectives import Objective
from artel.tokens import Tokenizer
from artel.training.optim.bf16_adamw import hold_in_bf16


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A run's model, which can be built with another number of layers."""

    config: RunConfig
    objective: Objective
    full_model: PreTrainedModel
    """The model of its configuration, without adapters."""

    @classmethod
    def from_config(cls, config: RunConfig, objective: Objective, tokenizer: Tokenizer) -> ModelOutline:
        """Build the outline. A new model gets the vocabulary size of `tokenizer`.

        Raise InputError if `data.block` exceeds its positions.
        """
        request = objective.model_request(config.model, config.data.block, config.seed)
        is_new = config.model.from_ is None
        model = build_from_scratch(request, tokenizer) if is_new else build_pretrained_structure(request)
        check_positions(model, config.data.block)
        return cls(config, objective, model)

    @property
    def layers(self) -> int:
        return int(self.full_model.config.get_text_config().num_hidden_layers)

    def build(self, precision: str, layers: int | None = None) -> PreTrainedModel:
        """Build the training model, with adapters and frozen weights, and only its first `layers` layers.

        `precision` of the layers: fp32, bf16, fp16 or fp8.
        """
        model_config = copy.deepcopy(self.full_model.config)
        if layers is not None:
            _shorten_config(model_config, self.layers, layers)
        for loaded_config in (model_config, model_config.get_text_config()):
            loaded_config.dtype = torch.float32  # training loads it in float32, whatever the saved dtype
        config, objective = self.config, self.objective
        model = build_without_weights(model_config, objective.auto_class, objective.heads, config.model.runs_code)
        if config.model.quantize != "none":
            # First: artel's attention is chosen by a forward pass, and quantized layers do not run on meta.
            use_artel_attention(model, encoders=config.parallel.context > 1)
            quantize_structure(model, config.model.quantize)
        dtype = base_dtype(config, precision)
        if dtype is not None:
            hold_in_half(model, dtype)
        if config.model.lora is not None:
            generates = objective.auto_class == "AutoModelForCausalLM"
            with torch.device("meta"):
                add_adapters(model, config.model.lora, base="", generates=generates, new_modules=[], seed=config.seed)
        if config.model.quantize != "none":
            shrink_weights(model, torch.device("meta"))
        freeze_unused(model)
        if config.model.freeze:
            freeze(model, config.model.freeze)
        if config.train.weights == "bf16":
            hold_in_bf16(model)
        return model

    def build_for_training(self, precision: str) -> PreTrainedModel:
        """Build the model with the training attention."""
        model = self.build(precision)
        use_artel_attention(model, encoders=self.config.parallel.context > 1)
        return model

    def layer_counts(self, group: int, rounds: int = 1) -> tuple[int, int] | None:
        """Return two smaller numbers of layers to extrapolate from. None if the full model is as quick to trace.

        Layers come in kinds (dense, experts, sliding windows). After the first layers the kinds repeat. Both numbers
        have all kinds `rounds` times, and differ by whole periods and by `group`, so that pipeline stages are equal.
        """
        kinds = self._layer_kinds()
        if len(kinds) != self.layers or len(repeated_layers(self.full_model)) <= _MAX_FULL_LAYERS:
            return None
        first, period = _find_period(kinds)
        period *= group
        fewest = first + (self.layers - first) % period + rounds * period
        return (fewest, fewest + period) if fewest + period < self.layers else None

    def _layer_kinds(self) -> list[tuple[Any, ...]]:
        """Return the kind of each layer, or of each pair of layers of an encoder and a decoder of equal depth."""
        model_config = self.full_model.config
        layers = repeated_layers(self.full_model)
        if (
            model_config.is_encoder_decoder
            and len(layers) == 2 * self.layers == 2 * model_config.get_text_config(decoder=True).num_hidden_layers
        ):
            pairs = zip(layers[: self.layers], layers[self.layers :], strict=True)
            return [
                tuple(_layer_kind(layer, model_config, index) for layer in pair) for index, pair in enumerate(pairs)
            ]
        return [_layer_kind(layer, model_config, index) for index, layer in enumerate(layers)]


_MAX_FULL_LAYERS = 6
_DEPTHS = ("num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
"""Names for numbers of layers in configurations of encoder-decoder models."""


def _layer_kind(layer: torch.nn.Module, model_config: Any, index: int) -> tuple[Any, ...]:
    types = getattr(model_config.get_text_config(), "layer_types", None) or ()
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    return (type(layer), types[index] if index < len(types) else None, shapes)


def _find_period(kinds: Sequence[Any]) -> tuple[int, int]:
    """Return (first, period) of the shortest description: from `first` on, kinds repeat every `period` layers."""
    num_layers = len(kinds)
    candidates = [
        (first + period, first, period)
        for first in range(num_layers)
        for period in range(1, num_layers - first + 1)
        if all(kinds[index] == kinds[index + period] for index in range(first, num_layers - period))
    ]
    _, first, period = min(candidates)
    return first, period


def _shorten_config(model_config: Any, layers: int, new_layers: int) -> None:
    """Reduce a configuration from `layers` to `new_layers` layers, and shorten lists that have an entry per layer."""
    text_config = model_config.get_text_config()
    for key, value in list(vars(text_config).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(text_config, key, value[:new_layers])
    text_config.num_hidden_layers = new_layers
    for name in _DEPTHS if model_config.is_encoder_decoder else ():
        if getattr(text_config, name, None) == layers:
            setattr(text_config, name, new_layers)
