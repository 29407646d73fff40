"""Folders of sentence-transformers models, which convert a text to one vector."""

from __future__ import annotations

import json
from pathlib import Path


def find_model_folder(name: str) -> Path:
    """Return the folder of a model. For a hub id: its snapshot in the hub's cache, if there is one."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache  # slow to import, and most models are folders
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "modules.json")
    except HFValidationError:  # not a valid hub id
        file = None
    return Path(file).parent if isinstance(file, str) else Path(name)


def module_folders(folder: Path) -> list[str]:
    """Return the names of the subfolders in which sentence-transformers saves the modules of a model."""
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        paths = [str(module["path"]) for module in modules]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return [path for path in paths if path and "/" not in path and path != ".." and (folder / path).is_dir()]


def has_pooling_layer(name: str) -> bool:
    """True if the `modules.json` of a folder or hub id has a pooling layer."""
    try:
        modules = json.loads((find_model_folder(name) / "modules.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(modules, list) and any(".Pooling" in str(module) for module in modules)
