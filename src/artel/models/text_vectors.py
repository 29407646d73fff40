"""Which folders hold models that give a text one vector, as sentence-transformers saves them."""

from __future__ import annotations

import json
from pathlib import Path


def pools_texts(name: str) -> bool:
    """True for a folder whose `modules.json` has a pooling layer."""
    try:
        modules = json.loads((Path(name) / "modules.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(modules, list) and any(".Pooling" in str(module) for module in modules)
