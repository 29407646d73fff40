"""A tiny configuration of any architecture of transformers, for a run file: its default, every known size made small.

Sizes are known by their names, the same for all architectures; tiny_configs.yaml has them, and exceptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HEAD_SIZE, LAYERS, VOCABULARY = 16, 2, 320
MOST_LAYERS = 8
"""Of an architecture that has layers of several kinds: as many as it takes to have one of each, at most so many."""
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
_READ = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_LAYER_NAMES = frozenset(_READ["layers"].split())
SIZES: dict[str, int] = {name: size for size, names in _READ["sizes"].items() for name in names.split()}
SIZES |= dict.fromkeys(_LAYER_NAMES, LAYERS)
EXCEPTIONS: dict[str, dict[str, Any]] = _READ["exceptions"]


def tiny_config(model_type: str) -> dict[str, Any]:
    """Keys of `model.config` of a tiny model."""
    default = CONFIG_MAPPING[model_type]
    try:
        values = _shrunk(default())
    except Exception:  # its defaults are no model
        values = {}
    return {"model_type": model_type, **_merged(values, EXCEPTIONS.get(model_type, {}))}


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    values: dict[str, Any] = {}
    own = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    for name, value in own.items():
        if isinstance(value, PreTrainedConfig):
            values[name] = _shrunk(value)
            if isinstance(getattr(value, "vocab_size", None), int):
                values[name]["vocab_size"] = VOCABULARY
                values[name] |= {key: 2 for key in SPECIAL if isinstance(getattr(value, key, None), int)}
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            values[name] = min(value, SIZES[name])
        elif name in ("head_dim", "num_key_value_heads") and value is None:
            values[name] = SIZES[name]
    if own.get("num_key_value_heads") is not None and own["num_key_value_heads"] == own.get("num_attention_heads"):
        values["num_key_value_heads"] = values["num_attention_heads"]
    if "qk_rope_head_dim" in own:  # the width of rotary positions
        values["head_dim"] = values["qk_rope_head_dim"]
    rope = own.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:  # positions in time, height and width share the frequencies
        half = int(HEAD_SIZE * rope.get("partial_rotary_factor", 1.0)) // 2
        values["rope_parameters"] = rope | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    layers = _layers(own)
    for name in _LAYER_NAMES & values.keys():
        values[name] = min(own[name], layers)
    return values


def _layers(own: Mapping[str, Any]) -> int:
    """How many layers it takes to have one of each kind."""
    needed = LAYERS
    for name, value in own.items():
        if isinstance(value, list) and (name.endswith(("layer_types", "block_type")) or name == "layer_types"):
            needed = max(needed, *(value.index(kind) + 1 for kind in set(value)))
    return min(needed, MOST_LAYERS)


def _merged(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in changes.items():
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, dict) and isinstance(merged.get(name), dict):
            merged[name] = _merged(merged[name], value)
        else:
            merged[name] = value
    return merged
