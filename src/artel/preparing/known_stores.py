"""Stores made before: whether one is undamaged, and which one a run is trained on.

RUN/store.json           the store of a run: with it the run resumes when its texts are gone
STORES/KEY.damaged/      a damaged store, until it is made again
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import orjson

from artel.config import RunConfig
from artel.errors import Problem
from artel.storage import disk_errors, write_file
from artel.tokens import DamagedStore, TokenStore


def damage(folder: Path) -> Problem | None:
    """Read a whole store; return what is wrong with it, or None.

    Raises InputError if there is no permission to read it.
    """
    try:
        TokenStore(folder).verify()
    except DamagedStore as error:
        return error.problems[0]
    return None


def set_aside(folder: Path) -> Path:
    """Rename a damaged store, so that nothing opens it; return its new name."""
    aside = folder.with_name(f"{folder.name}.damaged")
    with disk_errors(folder.parent):
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        os.utime(aside)  # it is removed after a week
    return aside


def remember_store(run: RunConfig, settings: str, folder: Path) -> None:
    """Write the store into RUN/store.json; `settings` is a digest of the settings that shape a store."""
    content = orjson.dumps({"store": str(folder.resolve()), "settings": settings})
    file = _note(run)
    if not file.is_file() or file.read_bytes() != content:
        write_file(file, content)


def remembered_store(run: RunConfig, settings: str) -> Path | None:
    """The store in RUN/store.json, if it still exists and was made with the same settings."""
    try:
        note = orjson.loads(_note(run).read_bytes())
        folder = Path(note["store"])
        is_same = note["settings"] == settings
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if is_same and (folder / "manifest.json").is_file() else None


def _note(run: RunConfig) -> Path:
    return Path(run.run) / "store.json"
