"""Run this Python interpreter again with the same import path."""

from __future__ import annotations

import sys
from pathlib import Path


def module_command(module: str) -> list[str]:
    """Return the command line that runs `module`. It imports from the working folder only if this process does."""
    # `python -m` puts the working folder first on the path, the command `artel` its own folder.
    from_working_folder = sys.path[:1] in ([""], [str(Path.cwd())])
    return [sys.executable, *([] if from_working_folder else ["-P"]), "-m", module]
