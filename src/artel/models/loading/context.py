"""A pretrained model whose texts become longer (`model.rope`), or whose attention gets a window (`model.attention`).

Both are changes to its transformers configuration, before the model is built: the weights stay, config.json is saved
with them, and the folder opens with transformers as it was trained.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from artel.config import ModelConfig, RopeConfig
from artel.errors import InputError
from artel.models.loading.model_folder import in_words

_FULL, _WINDOW = "full_attention", "sliding_attention"
_ROPE, _ATTENTION = "model.rope", "model.attention"


def changes_context(model: ModelConfig) -> bool:
    """Whether the run file changes the configuration of its pretrained model."""
    return model.rope is not None or model.attention is not None


def change_context(config: PreTrainedConfig, model: ModelConfig) -> None:
    """Change a pretrained model's configuration in place. Raises InputError where its architecture cannot have it."""
    if changes_context(model) and "vision_config" in config.sub_configs:
        key = _ROPE if model.rope is not None else _ATTENTION
        what = f"{_type_of(config)} takes images: only the weights of its language part change, not its configuration"
        raise InputError.at(key, what, "leave it out, or take a model of text alone")
    text = config.get_text_config()
    if model.rope is not None:
        _extend(text, model.rope)
    if model.attention is not None:
        _set_window(text, model.attention.window)


def check_rotary(model: nn.Module) -> None:
    """Raise InputError where a model's own code computes its angles without regard to `rope_parameters`."""
    if not any(hasattr(module, "rope_type") for module in model.modules()):
        what = "computes its rotary positions in one way only"
        raise InputError.at(_ROPE, f"{_type_of(model.config)} {what}", "leave it out")


def _extend(config: PreTrainedConfig, rope: RopeConfig) -> None:
    parameters = getattr(config, "rope_parameters", None)
    positions = getattr(config, "max_position_embeddings", None)
    if not parameters or not positions:
        what = f"{_type_of(config)} has no rotary positions, which alone can be extended"
        raise InputError.at(_ROPE, what, "leave it out, or take a model that has them (llama, qwen3, modernbert)")
    kinds = config.nested_rope_parameter_keys(parameters)
    if kinds and (not set(kinds) <= {_FULL, _WINDOW} or not parameters.get(_FULL)):
        what = f"{_type_of(config)} has rotary positions of each kind of layer: {', '.join(kinds)}"
        raise InputError.at(_ROPE, what, f"leave it out: artel extends those of {_FULL} alone")
    before = parameters[_FULL] if kinds else parameters
    original, extended = _extended(config, before, rope)
    config.max_position_embeddings = round(original * rope.factor)
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = original
    # Layers with a window see no further than before, and keep their positions.
    config.rope_parameters = {**parameters, _FULL: extended} if kinds else extended
    try:
        config.validate_rope()
    except Exception as error:  # each configuration checks in its own way
        raise InputError.at(_ROPE, f"{_type_of(config)} refuses it: {in_words(error)}", "check its values") from None


def _extended(config: PreTrainedConfig, before: dict[str, Any], rope: RopeConfig) -> tuple[int, dict[str, Any]]:
    """The positions that the model was trained on before any extension, and its new rotary parameters."""
    kind = before.get("rope_type") or "default"
    factor = float(before.get("factor") or 1.0)
    original = before.get("original_max_position_embeddings") or round(config.max_position_embeddings / factor)
    if kind != "default" and (kind != rope.type or rope.factor <= factor):
        what = f"this {_type_of(config)} is extended already, by {kind}, {factor:g} times its {original:,} positions"
        raise InputError.at(_ROPE, what, f"write type: {kind} and a factor above {factor:g}, or leave it out")
    kept = {name: value for name, value in before.items() if name in _OF_ANY}
    values = rope.model_dump(exclude_none=True, exclude={"type", "theta"})
    if rope.type in ("yarn", "llama3"):
        values["original_max_position_embeddings"] = original
    if rope.type == "llama3":  # Llama 3.1's own
        values = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} | values
    if rope.type == "default":
        del values["factor"]
    if rope.theta is not None:
        kept["rope_theta"] = rope.theta
    return original, {**kept, "rope_type": rope.type, **values}


_OF_ANY = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Rotary parameters that are not of a way of extending."""


def _set_window(config: PreTrainedConfig, window: int) -> None:
    where = f"{_ATTENTION}.window"
    if "sliding_window" not in config.to_dict():
        what = f"{_type_of(config)} has no attention within a window: its configuration has no sliding_window"
        raise InputError.at(where, what, "leave it out, or take a model that has it (mistral, qwen3, gemma3)")
    layers = getattr(config, "layer_types", None)
    if layers and _WINDOW not in layers:
        if set(layers) != {_FULL}:
            what = f"{_type_of(config)} has layers of {', '.join(sorted(set(layers)))}, and none with a window"
            raise InputError.at(where, what, "leave it out")
        config.layer_types = [_WINDOW] * len(layers)
        if hasattr(config, "use_sliding_window"):
            config.use_sliding_window, config.max_window_layers = True, 0
    config.sliding_window = window


def _type_of(config: Any) -> str:
    return str(config.model_type)
