"""Models on the meta device, from a transformers configuration, a folder or a hub id."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.config import ModelConfig
from artel.errors import InputError
from artel.models.loading.heads import Head, check_direction, check_head, custom_classes, model_class
from artel.models.loading.language_part import find_language_part, is_multimodal, set_multimodal
from artel.models.loading.model_config import build_config, change_context
from artel.models.loading.model_folder import check_folder, loading_error, read_config
from artel.models.loading.on_meta import build_on_meta
from artel.models.loading.request import ModelRequest
from artel.tokens import Tokenizer

# The default models: GPT-2, T5 1.1 (small) and RoBERTa in their original sizes, without dropout.
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


def model_config_values(config: ModelConfig, auto_class: str) -> dict[str, Any]:
    """Return the keys of `model.config`, or those of the default model if the run file has none."""
    default = {"AutoModelForCausalLM": _GPT2, "AutoModelForSeq2SeqLM": _T5}.get(auto_class, _ROBERTA)
    return dict(config.config or default)


def build_from_scratch(request: ModelRequest, tokenizer: Tokenizer) -> PreTrainedModel:
    """Build the model of `model.config` on the meta device, with the tokenizer's vocabulary.

    The number of positions defaults to `request.block`. Raise InputError if a key is invalid.
    """
    values = model_config_values(request.config, request.auto_class)
    config = set_head_config(build_config(values, tokenizer, request.auto_class), request.head_config)
    configured_keys = {config.attribute_map.get(key, key) for key in values}
    positions = config.attribute_map.get("max_position_embeddings", "max_position_embeddings")
    try:
        if (
            positions not in configured_keys and (getattr(config, "max_position_embeddings", None) or -1) > 0
        ):  # XLNet says -1
            draft = build_without_weights(config, request.auto_class, request.heads)
            config.max_position_embeddings = request.block + _position_offset(draft)
        return build_without_weights(config, request.auto_class, request.heads)
    except InputError:
        raise
    except Exception as error:  # architectures raise various errors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        what = f"{config.model_type} cannot be built: {reason}"
        raise InputError.at("model.config", what, "check its sizes") from None


def build_pretrained_structure(request: ModelRequest) -> PreTrainedModel:
    """Build the pretrained model on the meta device, without reading weights. Raise InputError if that fails."""
    name, runs_code = str(request.config.from_), request.config.runs_code
    config, _ = load_pretrained_config(request)
    try:
        if is_multimodal(config, request.auto_class):
            language_part, multimodal = find_language_part(config, name)
            set_multimodal(language_part, multimodal)
            return language_part
        return build_without_weights(config, request.auto_class, request.heads, runs_code)
    except InputError:
        raise
    except Exception as error:  # architectures raise various errors
        raise loading_error(name, error) from None


def build_outline(config: ModelConfig, auto_class: str) -> PreTrainedModel | None:
    """Build the model of a run on the meta device, before there is a tokenizer.

    None if that fails; `build_model` will report the reason. Raise InputError if a pretrained model is not found.
    """
    if config.from_ is not None:
        hf_config, _ = read_config(config.from_, runs_code=config.runs_code)
        change_context(hf_config, config)
        if is_multimodal(hf_config, auto_class):
            return find_language_part(hf_config, config.from_)[0]
    else:
        values = model_config_values(config, auto_class)
        try:
            hf_config = CONFIG_MAPPING[values.pop("model_type")](**values)
        except Exception:  # configurations raise various errors
            return None
    try:
        return build_without_weights(hf_config, auto_class, {}, config.runs_code)
    except Exception:
        return None


def build_without_weights(
    config: PreTrainedConfig, auto_class: str, heads: Mapping[str, Head], runs_code: bool = False
) -> PreTrainedModel:
    """Build the model of a configuration on the meta device. `config` is copied, not changed.

    If the class is the language part of a multimodal model, it gets the text part of the configuration, as with
    transformers' `from_config`.
    """
    cls = model_class(config, auto_class, heads, runs_code=runs_code)
    text = config.sub_configs.get("text_config")
    if text is not None and cls.config_class == text:
        config = config.get_text_config()
    return build_on_meta(cls, config)


def load_pretrained_config(request: ModelRequest) -> tuple[PreTrainedConfig, list[str]]:
    """Return (configuration adapted to its head, notes for users). Raise InputError for an unusable folder or head."""
    name, runs_code = str(request.config.from_), request.config.runs_code
    folder = Path(name)
    if folder.is_dir():
        check_folder(folder)
    elif folder.exists() or name.startswith((".", "/", "~")):
        fix = "use a folder with config.json, or a hub id"
        raise InputError.at("model.from", f"{name} is not a folder", fix)
    config, notes = read_config(name, runs_code=runs_code)
    if not is_multimodal(config, request.auto_class):
        check_head(config.model_type, request.auto_class, "model.from", custom_classes(config, runs_code=runs_code))
        check_direction(config, request.auto_class, "model.from")
    if request.base_config is not None:
        config = type(config).from_json_file(request.base_config)
    change_context(config, request.config)
    return set_head_config(config, request.head_config), notes


def set_head_config(config: PreTrainedConfig, values: Mapping[str, Any]) -> PreTrainedConfig:
    """Set the values that a head needs (ModelRequest.head_config) in the configuration, and return it."""
    for name, value in values.items():
        setattr(config, name, value)
    return config


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the longest input in tokens; None for a model without a limit."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return None if limit is None or limit < 0 else int(limit) - _position_offset(model)


def _position_offset(model: nn.Module) -> int:
    """Return the first position id: 0, or pad_id + 1 in models like RoBERTa, whose embedding has a padding index."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0
