"""A model's structure: the model on the meta device, from a transformers configuration, a folder or a hub id."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.config import ModelConfig
from artel.errors import InputError
from artel.models.loading.context import change_context
from artel.models.loading.heads import check_direction, check_head, model_class, own_classes
from artel.models.loading.model_config import configuration
from artel.models.loading.model_folder import cannot_load, check_folder, read_config
from artel.models.loading.multimodal.language_part import find_language_part, set_whole, takes_images
from artel.models.loading.on_meta import build_on_meta
from artel.models.loading.request import ModelRequest
from artel.tokens import Tokenizer

# The models of a run file that names none: GPT-2, T5 1.1 (small) and RoBERTa in their authors' sizes, without dropout.
_GPT2 = {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_T5 = {
    "model_type": "t5",
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
}
_ROBERTA = {
    "model_type": "roberta",
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def config_values(config: ModelConfig, auto_class: str) -> dict[str, Any]:
    """The keys of `model.config`, or the default model's where the run file names no model."""
    default = {"AutoModelForCausalLM": _GPT2, "AutoModelForSeq2SeqLM": _T5}.get(auto_class, _ROBERTA)
    return dict(config.config or default)


def from_scratch(request: ModelRequest, tokenizer: Tokenizer) -> PreTrainedModel:
    """The model of `model.config` on the meta device, with the tokenizer's vocabulary.

    Where the configuration does not set the number of positions, it becomes `request.block`. Raises InputError.
    """
    values = config_values(request.config, request.auto_class)
    config = with_head(configuration(values, tokenizer, request.auto_class), request.head_config)
    named = {config.attribute_map.get(key, key) for key in values}
    positions = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    try:
        if positions not in named and (getattr(config, "max_position_embeddings", None) or -1) > 0:  # XLNet says -1
            draft = without_weights(config, request.auto_class, request.heads)
            config.max_position_embeddings = request.block + _position_offset(draft)
        return without_weights(config, request.auto_class, request.heads)
    except InputError:
        raise
    except Exception as error:  # each architecture refuses sizes in its own way
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"{config.model_type} cannot be built: {first}"
        raise InputError.at("model.config", what, "check its sizes") from None


def pretrained_structure(request: ModelRequest) -> PreTrainedModel:
    """The pretrained model on the meta device. No weights are read. Raises InputError."""
    name, runs_code = str(request.config.from_), request.config.runs_code
    config, _ = pretrained_config(request)
    try:
        if takes_images(config, request.auto_class):
            part, whole = find_language_part(config, name)
            set_whole(part, whole)
            return part
        return without_weights(config, request.auto_class, request.heads, runs_code)
    except InputError:
        raise
    except Exception as error:  # each architecture refuses sizes in its own way
        raise cannot_load(name, error) from None


def outline(config: ModelConfig, auto_class: str) -> PreTrainedModel | None:
    """The model of a run on the meta device, before there is a tokenizer.

    None where it cannot be built: `build_model` gives the reason. Raises InputError where it cannot be found.
    """
    if config.from_ is not None:
        hf_config, _ = read_config(config.from_, runs_code=config.runs_code)
        change_context(hf_config, config)
        if takes_images(hf_config, auto_class):
            return find_language_part(hf_config, config.from_)[0]
    else:
        values = config_values(config, auto_class)
        try:
            hf_config = CONFIG_MAPPING[values.pop("model_type")](**values)
        except Exception:  # each configuration refuses values in its own way
            return None
    try:
        return without_weights(hf_config, auto_class, {}, config.runs_code)
    except Exception:  # as above
        return None


def without_weights(
    config: PreTrainedConfig, auto_class: str, heads: Mapping[str, int], runs_code: bool = False
) -> PreTrainedModel:
    """The model of a configuration on the meta device. `config` is copied, not changed.

    A class that is the language part of a model of several kinds of inputs takes that part of the configuration, as
    transformers' `from_config` gives it.
    """
    kind = model_class(config, auto_class, heads, runs_code=runs_code)
    text = config.sub_configs.get("text_config")
    if text is not None and kind.config_class == text:
        config = config.get_text_config()
    return build_on_meta(kind, config)


def pretrained_config(request: ModelRequest) -> tuple[PreTrainedConfig, list[str]]:
    """The configuration of the model to be loaded, as its head needs it, and notes for the user. Raises InputError."""
    name, runs_code = str(request.config.from_), request.config.runs_code
    folder = Path(name)
    if folder.is_dir():
        check_folder(folder)
    elif folder.exists() or name.startswith((".", "/", "~")):
        fix = "give a folder with config.json, or a hub id"
        raise InputError.at("model.from", f"{name} is not a folder", fix)
    config, notes = read_config(name, runs_code=runs_code)
    if not takes_images(config, request.auto_class):
        check_head(config.model_type, request.auto_class, "model.from", own_classes(config, runs_code=runs_code))
        check_direction(config, request.auto_class, "model.from")
    if request.base_config is not None:
        config = type(config).from_json_file(request.base_config)
    change_context(config, request.config)
    return with_head(config, request.head_config), notes


def with_head(config: PreTrainedConfig, values: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration, changed, with the values that a head needs (ModelRequest.head_config)."""
    for name, value in values.items():
        setattr(config, name, value)
    return config


def position_limit(model: PreTrainedModel) -> int | None:
    """The longest input in tokens; None for a model without a limit."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return None if limit is None or limit < 0 else int(limit) - _position_offset(model)


def _position_offset(model: nn.Module) -> int:
    """RoBERTa and its kin count positions from pad_id + 1; their position embedding shows it by a padding index."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0
