"""The transformers configuration of a run's model.

From scratch (`model.config`): keys are checked, and vocabulary size and special ids come from the tokenizer.
Pretrained: `model.rope` extends the context, `model.attention` sets a window. Both change the configuration before the
model is built. The weights do not change, and transformers opens the saved folder with the training configuration.
"""

from __future__ import annotations

import difflib
import inspect
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.config import ModelConfig, RopeConfig
from artel.errors import InputError, Problem
from artel.models.loading.heads import check_direction
from artel.models.loading.model_folder import format_error
from artel.tokens import Tokenizer

_VOCABULARY_SIZE_KEYS = {"unpadded_vocab_size"}
"""Keys equal to `vocab_size`; their defaults are those of the published models."""
_FULL_ATTENTION, _SLIDING_ATTENTION = "full_attention", "sliding_attention"
_ROPE_KEY, _ATTENTION_KEY = "model.rope", "model.attention"
_GETATTR_KEY = re.compile(r"""getattr\(\s*(?:self\.)?config,\s*["'](\w+)["']""")


def check_type(model_type: str) -> None:
    """Raise InputError for a model type that transformers does not have."""
    if model_type not in CONFIG_MAPPING:
        suggestions = difflib.get_close_matches(model_type, list(CONFIG_MAPPING.keys()), 3)
        fix = f"did you mean {' or '.join(suggestions)}?" if suggestions else "see the model types of transformers"
        raise InputError.at("model.config.model_type", f"transformers has no {model_type!r}", fix)


def known_keys(values: dict[str, Any]) -> tuple[set[str], list[Problem]]:
    """Return (keys of the model type, a problem for each wrong key or value in `values`)."""
    settings = {key: value for key, value in values.items() if key != "model_type"}
    model_type = values["model_type"]
    check_type(model_type)
    try:
        default_config = CONFIG_MAPPING[model_type]()
    except Exception as error:  # configurations raise various errors
        what = f"the defaults of {model_type} in transformers are not a valid model: {format_error(error)}"
        raise InputError.at(
            "model.config.model_type", what, "use a pretrained model of this type: model.from"
        ) from None
    valid_keys = {*default_config.to_dict(), *default_config.attribute_map, *_find_keys_in_code(type(default_config))}
    problems = []
    for key in settings.keys() - valid_keys:
        suggestions = difflib.get_close_matches(key, sorted(valid_keys), 1)
        fix = f"did you mean {suggestions[0]}?" if suggestions else f"see transformers' {type(default_config).__name__}"
        problems.append(Problem(f"model.config.{key}", f"{model_type} has no such key", fix))
    for key in settings.keys() & valid_keys:
        if key.endswith("_token_id"):  # -1 for none
            continue
        value, default = settings[key], _get_default(default_config, key)
        if isinstance(value, int | float) and isinstance(default, int | float) and value < 0 <= default:
            problems.append(Problem(f"model.config.{key}", f"{value} is below zero", f"{default} is its default"))
    return valid_keys, problems


def _get_default(default_config: PreTrainedConfig, key: str) -> Any:
    try:
        return getattr(default_config, key, None)
    except AmbiguousGlobalPerLayerAttributeError:  # it differs between layers
        return None


def _find_keys_in_code(config_class: type[PreTrainedConfig]) -> set[str]:
    """Return keys that a model's code reads without a default in its configuration (Qwen3-MoE's head_dim)."""
    file = Path(inspect.getfile(config_class))
    code = file.with_name(file.name.replace("configuration_", "modeling_", 1))
    return set(_GETATTR_KEY.findall(code.read_text("utf-8"))) if code != file and code.is_file() else set()


def build_config(values: dict[str, Any], tokenizer: Tokenizer, auto_class: str) -> PreTrainedConfig:
    """Create the configuration of `model.config` for a tokenizer. Raise InputError if a key or value is invalid."""
    settings = {key: value for key, value in values.items() if key != "model_type"}
    model_type = values["model_type"]
    valid_keys, problems = known_keys(values)
    vocabulary = settings.get("vocab_size", tokenizer.vocabulary)
    if not isinstance(vocabulary, int) or vocabulary < tokenizer.vocabulary:
        problems.append(
            Problem(
                "model.config.vocab_size",
                f"{vocabulary} is less than the tokenizer's {tokenizer.vocabulary}",
                "remove it: the tokenizer's size is used",
            )
        )
    for key in _VOCABULARY_SIZE_KEYS & valid_keys & settings.keys():
        if settings[key] > vocabulary:
            what = f"{settings[key]} is more than the vocabulary's {vocabulary}"
            problems.append(Problem(f"model.config.{key}", what, "remove it"))
    if problems:
        raise InputError(problems)
    ids = _special_ids(tokenizer, CONFIG_MAPPING[model_type], valid_keys)
    arguments = {**ids, **settings, "vocab_size": vocabulary}
    for key in _VOCABULARY_SIZE_KEYS & valid_keys:
        arguments.setdefault(key, vocabulary)
    try:
        config = CONFIG_MAPPING[model_type](**arguments)
    except Exception as error:  # configurations raise various errors
        what = f"{model_type} does not accept it: {format_error(error)}"
        raise InputError.at("model.config", what, "check its values") from None
    check_direction(config, auto_class, "model.config.model_type")
    return config


def decoder_start_id(model_type: str, tokenizer: Tokenizer) -> int:
    """Return the decoder's start token of an encoder-decoder from scratch, with the role that is its default.

    Usually that is padding (T5) or the end token (BART).
    """
    default_config = CONFIG_MAPPING[model_type]()
    start = getattr(default_config, "decoder_start_token_id", None)
    if start is not None and start == default_config.eos_token_id and start != default_config.pad_token_id:
        return tokenizer.end_id
    return tokenizer.pad_id


def _special_ids(
    tokenizer: Tokenizer, config_class: type[PreTrainedConfig], valid_keys: set[str]
) -> dict[str, int | None]:
    """Return the ids of special tokens. The end token replaces required ones that the tokenizer does not have."""
    ids: dict[str, int | None] = {"eos_token_id": tokenizer.end_id}
    ids |= {name: getattr(tokenizer.hf, name) for name in ("bos_token_id", "pad_token_id")}
    ids |= {name: getattr(tokenizer.hf, name) for name in ("cls_token_id", "sep_token_id") if name in valid_keys}
    fields = getattr(config_class, "__dataclass_fields__", {})
    needed = {name for name in ids if name in fields and fields[name].type is int}
    return ids | {name: tokenizer.end_id for name in needed if ids[name] is None}


def changes_context(config: ModelConfig) -> bool:
    """True if the run file changes the configuration of its pretrained model."""
    return config.rope is not None or config.attention is not None


def change_context(model_config: PreTrainedConfig, config: ModelConfig) -> None:
    """Apply `rope` and `attention` to a pretrained model's configuration. Raise InputError if it supports neither."""
    if changes_context(config) and "vision_config" in model_config.sub_configs:
        key = _ROPE_KEY if config.rope is not None else _ATTENTION_KEY
        model_type = model_config.model_type
        what = f"{model_type} takes images: only the weights of its language part change, not its configuration"
        raise InputError.at(key, what, "remove it, or use a text-only model")
    text = model_config.get_text_config()
    if config.rope is not None:
        _apply_rope(text, config.rope)
    if config.attention is not None:
        _set_window(text, config.attention.window)


def check_rotary(model: PreTrainedModel) -> None:
    """Raise InputError if a model's code ignores `rope_parameters`."""
    if not any(hasattr(module, "rope_type") for module in model.modules()):
        what = "supports only one kind of rotary positions"
        raise InputError.at(_ROPE_KEY, f"{model.config.model_type} {what}", "remove it")


def _apply_rope(config: PreTrainedConfig, rope: RopeConfig) -> None:
    parameters = getattr(config, "rope_parameters", None)
    positions = getattr(config, "max_position_embeddings", None)
    if not parameters or not positions:
        what = f"{config.model_type} has no rotary positions, and only these can be extended"
        raise InputError.at(_ROPE_KEY, what, "remove it, or use a model that has them (llama, qwen3, modernbert)")
    layer_types = config.nested_rope_parameter_keys(parameters)
    if layer_types and (
        not set(layer_types) <= {_FULL_ATTENTION, _SLIDING_ATTENTION} or not parameters.get(_FULL_ATTENTION)
    ):
        what = f"{config.model_type} has rotary positions of each kind of layer: {', '.join(layer_types)}"
        raise InputError.at(_ROPE_KEY, what, f"remove it: artel extends only those of {_FULL_ATTENTION}")
    old_rope = parameters[_FULL_ATTENTION] if layer_types else parameters
    original, extended = _extend_rope(config, old_rope, rope)
    config.max_position_embeddings = round(original * rope.factor)
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = original
    # Layers with a window see no further than before, so their positions do not change.
    config.rope_parameters = {**parameters, _FULL_ATTENTION: extended} if layer_types else extended
    try:
        config.validate_rope()
    except Exception as error:  # configurations raise various errors
        raise InputError.at(
            _ROPE_KEY, f"{config.model_type} does not accept it: {format_error(error)}", "check its values"
        ) from None


def _extend_rope(config: PreTrainedConfig, old_rope: dict[str, Any], rope: RopeConfig) -> tuple[int, dict[str, Any]]:
    """Return (number of positions before any extension, new rotary parameters)."""
    old_type = old_rope.get("rope_type") or "default"
    factor = float(old_rope.get("factor") or 1.0)
    original = old_rope.get("original_max_position_embeddings") or round(config.max_position_embeddings / factor)
    if old_type != "default" and (old_type != rope.type or rope.factor <= factor):
        what = f"this {config.model_type} is already extended, by {old_type} to {factor:g} times {original:,} positions"
        raise InputError.at(_ROPE_KEY, what, f"write type: {old_type} and a factor above {factor:g}, or remove it")
    unchanged = {name: value for name, value in old_rope.items() if name in _KEPT_ROPE_KEYS}
    values: dict[str, Any] = {} if rope.type == "default" else {"factor": rope.factor}
    if rope.type in ("yarn", "llama3"):
        values["original_max_position_embeddings"] = original
    if rope.type == "llama3":
        unchanged = _LLAMA3_1 | unchanged
    if rope.theta is not None:
        unchanged["rope_theta"] = rope.theta
    return original, {**unchanged, "rope_type": rope.type, **values}


# Rotary parameters that an extension does not change. The second line exists only in a model that is already extended.
_KEPT_ROPE_KEYS = (
    *("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"),
    *("beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"),
)
# Llama 3.1 stretches angles with fewer turns than the first over the trained positions, and none with more than the
# second. YaRN's turns (32 and 1) are transformers' defaults.
_LLAMA3_1 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _set_window(config: PreTrainedConfig, window: int) -> None:
    where = f"{_ATTENTION_KEY}.window"
    if "sliding_window" not in config.to_dict():
        what = f"{config.model_type} has no sliding-window attention: its configuration has no sliding_window"
        raise InputError.at(where, what, "remove it, or use a model that has it (mistral, qwen3, gemma3)")
    layers = getattr(config, "layer_types", None)
    if layers and _SLIDING_ATTENTION not in layers:
        if set(layers) != {_FULL_ATTENTION}:
            what = f"{config.model_type} has layers of {', '.join(sorted(set(layers)))}, but none with a window"
            raise InputError.at(where, what, "remove it")
        config.layer_types = [_SLIDING_ATTENTION] * len(layers)
        if hasattr(config, "use_sliding_window"):
            config.use_sliding_window, config.max_window_layers = True, 0
    config.sliding_window = window
