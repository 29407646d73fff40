"""The run's model on the meta device, whole or with fewer layers, as it is before it is spread over processes."""

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
from artel.models.loading.structure import from_scratch, pretrained_structure, without_weights
from artel.models.lora.adapters import add_adapters, freeze
from artel.models.quantization import quantize_structure, shrink_weights
from artel.objectives import Objective
from artel.tokens import Tokenizer
from artel.training.optim.bf16_adamw import hold_in_bf16


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A run's model, and how to build it with another number of layers."""

    run: RunConfig
    objective: Objective
    whole: PreTrainedModel
    """As its configuration says, without adapters."""

    @classmethod
    def of(cls, run: RunConfig, objective: Objective, tokenizer: Tokenizer) -> ModelOutline:
        """From scratch with a row for each id of `tokenizer`. Raises InputError where the model cannot be built."""
        request = objective.model_request(run.model, run.data.block, run.seed)
        is_new = run.model.from_ is None
        model = from_scratch(request, tokenizer) if is_new else pretrained_structure(request)
        check_positions(model, run.data.block)
        return cls(run, objective, model)

    @property
    def layers(self) -> int:
        return int(self.whole.config.get_text_config().num_hidden_layers)

    def build(self, precision: str, layers: int | None = None) -> PreTrainedModel:
        """The model as it is trained, with adapters and what is frozen; with the first `layers` of its layers.

        `precision` is what layers compute in: fp32, bf16, fp16 or fp8.
        """
        config = copy.deepcopy(self.whole.config)
        if layers is not None:
            _shorten(config, self.layers, layers)
        for each in (config, config.get_text_config()):
            each.dtype = torch.float32  # as it is loaded for training, whatever it is saved in
        run, objective = self.run, self.objective
        model = without_weights(config, objective.auto_class, objective.heads, run.model.runs_code)
        if run.model.quantize != "none":
            # Before: whether attention may be artel's is seen in a run, and quantized layers do not run on meta.
            use_artel_attention(model, encoders=run.parallel.context > 1)
            quantize_structure(model, run.model.quantize)
        half = base_dtype(run, precision)
        if half is not None:
            hold_in_half(model, half)
        if run.model.lora is not None:
            generates = objective.auto_class == "AutoModelForCausalLM"
            with torch.device("meta"):
                add_adapters(model, run.model.lora, base="", generates=generates, new_modules=[], seed=run.seed)
        if run.model.quantize != "none":
            shrink_weights(model, torch.device("meta"))
        freeze_unused(model)
        if run.model.freeze:
            freeze(model, run.model.freeze)
        if run.train.weights == "bf16":
            hold_in_bf16(model)
        return model

    def build_for_training(self, precision: str) -> PreTrainedModel:
        """The model with the attention that it trains with."""
        model = self.build(precision)
        use_artel_attention(model, encoders=self.run.parallel.context > 1)
        return model

    def layer_counts(self, group: int, rounds: int = 1) -> tuple[int, int] | None:
        """Two smaller numbers of layers, from which the whole is a straight line; None where it is as quick to trace.

        Layers come in kinds (dense, experts, sliding windows): after some first ones the same kinds recur. The two
        numbers have all kinds `rounds` times, and differ by whole rounds of them, and by `group`, so that each stage
        has as many.
        """
        kinds = self._kinds()
        if len(kinds) != self.layers or len(repeated_layers(self.whole)) <= _FEW:
            return None
        first, period = _recurring(kinds)
        period *= group
        fewest = first + (self.layers - first) % period + rounds * period
        return (fewest, fewest + period) if fewest + period < self.layers else None

    def _kinds(self) -> list[tuple[Any, ...]]:
        """The kind of each layer; of an encoder and a decoder with equally many, of the pairs of their layers."""
        config, layers = self.whole.config, repeated_layers(self.whole)
        if (
            config.is_encoder_decoder
            and len(layers) == 2 * self.layers == 2 * config.get_text_config(decoder=True).num_hidden_layers
        ):
            pairs = zip(layers[: self.layers], layers[self.layers :], strict=True)
            return [tuple(_kind(layer, config, number) for layer in pair) for number, pair in enumerate(pairs)]
        return [_kind(layer, config, number) for number, layer in enumerate(layers)]


_FEW = 6
_DEPTHS = ("num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
"""What configurations of an encoder and a decoder call their numbers of layers."""


def _kind(layer: torch.nn.Module, config: Any, number: int) -> tuple[Any, ...]:
    types = getattr(config.get_text_config(), "layer_types", None) or ()
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    return (type(layer), types[number] if number < len(types) else None, shapes)


def _recurring(kinds: Sequence[Any]) -> tuple[int, int]:
    """(first, period) of the shortest description: from `first` on, kinds recur every `period` layers."""
    count = len(kinds)
    fits = [
        (first + period, first, period)
        for first in range(count)
        for period in range(1, count - first + 1)
        if all(kinds[place] == kinds[place + period] for place in range(first, count - period))
    ]
    _, first, period = min(fits)
    return first, period


def _shorten(config: Any, layers: int, fewer: int) -> None:
    """Change a configuration to fewer layers; lists with an entry for each layer become shorter."""
    text = config.get_text_config()
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(text, key, value[:fewer])
    text.num_hidden_layers = fewer
    for name in _DEPTHS if config.is_encoder_decoder else ():
        if getattr(text, name, None) == layers:
            setattr(text, name, fewer)
