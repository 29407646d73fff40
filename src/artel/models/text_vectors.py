"""Which folders hold models that give a text one vector, as sentence-transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path


def folder_of(name: str) -> Path:
    """The folder of a model: itself, or, of a hub id, the snapshot in the hub's cache if there is one."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache  # takes a while to import, and most models are folders
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "modules.json")
    except HFValidationError:  # no name that a model of the hub can have
        found = None
    return Path(found).parent if isinstance(found, str) else Path(name)


def module_folders(folder: Path) -> list[str]:
    """The folders within a model's folder in which sentence-transformers keeps what a text passes."""
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        paths = [str(module["path"]) for module in modules]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return [path for path in paths if path and "/" not in path and path != ".." and (folder / path).is_dir()]


def pools_texts(name: str) -> bool:
    """True for a folder or a hub id whose `modules.json` has a pooling layer."""
    try:
        modules = json.loads((folder_of(name) / "modules.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(modules, list) and any(".Pooling" in str(module) for module in modules)
