"""Check the name of a model before heavy imports and before contacting the hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from artel.config.recipes import recipe_names
from artel.config.schema.base import name_error
from artel.config.suggest import find_similar_name
from artel.errors import InputError

HUB_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "adapter_config.json")
"""Every model, tokenizer and adapter on the hub has at least one of these files."""


def is_in_hub_cache(name: str, files: tuple[str, ...] = HUB_FILES[:1]) -> bool | None:
    """True if the hub's cache has one of `files` of a model. None if no model on the hub can have this name."""
    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in files)
    except HFValidationError:
        return None


def check_model_name(name: str) -> None:
    """Raise InputError if `name` is a recipe, a run written without runs/, or cannot be found offline.

    Existing folders and models in the hub's cache are accepted. The hub decides about other names, unless
    HF_HUB_OFFLINE is set.
    """
    fault = name_error(name)
    if fault is not None:
        raise InputError.at(f"{name[:100]}…", fault, "use a run folder, a model folder or a hub id")
    if Path(name).exists() or is_in_hub_cache(name):
        return
    near = find_similar_name(name)
    if near is not None and name in (near, Path(near).name):
        if near in recipe_names():
            fix = f"train it first: artel train {near}; or use it untrained: artel generate --untrained"
            raise InputError.at(name, "is a recipe, but no model of it has been trained here", fix)
        fix = f"did you mean {near}? For a model on the hub, first run hf download {name}"
        raise InputError.at(name, "there is no such folder", fix)
    is_run_name = Path(name).parts[:1] == ("runs",)
    is_cached = is_in_hub_cache(name, HUB_FILES)
    if (is_run_name and not is_cached) or (constants.HF_HUB_OFFLINE and is_cached is False):
        what = "is neither a run, a model folder nor a model in the hub's cache"
        fix = f"check the spelling; a model on the hub needs network (hf download {name}) without HF_HUB_OFFLINE"
        raise InputError.at(name, what, fix if near is None else f"did you mean {near}?")
