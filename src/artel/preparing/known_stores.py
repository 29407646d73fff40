"""Stores that were made before: whether one is still as it was written, and which one a run began with.

RUN/store.json           where the store of a run lies: with it the run goes on when its texts are gone
STORES/KEY.damaged/      a store that was found damaged, until it is made anew
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
    """What is wrong with a store, all of which is read; None where it is as it was written.

    Raises InputError where there is no right to read it.
    """
    try:
        TokenStore(folder).verify()
    except DamagedStore as error:
        return error.problems[0]
    return None


def set_aside(folder: Path) -> Path:
    """Give a damaged store another name, under which nobody looks for it; that name."""
    aside = folder.with_name(f"{folder.name}.damaged")
    with disk_errors(folder.parent):
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        os.utime(aside)  # what is forgotten for a week is cleared away
    return aside


def remember_store(run: RunConfig, settings: str, folder: Path) -> None:
    """Write into the run's folder which store it is trained on; `settings` stands for what shapes a store but texts."""
    content = orjson.dumps({"store": str(folder.resolve()), "settings": settings})
    file = _note(run)
    if not file.is_file() or file.read_bytes() != content:
        write_file(file, content)


def remembered_store(run: RunConfig, settings: str) -> Path | None:
    """The store that the run began with, if it is still there and was made by the same settings."""
    try:
        told = orjson.loads(_note(run).read_bytes())
        folder = Path(told["store"])
        is_same = told["settings"] == settings
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if is_same and (folder / "manifest.json").is_file() else None


def _note(run: RunConfig) -> Path:
    return Path(run.run) / "store.json"
