"""Regular files. Reading anything else under a file's name may block forever, or never end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from artel.errors import InputError, Problem

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def special_kind(mode: int) -> str:
    """Describe the kind of a file from its stat mode; empty for regular files and folders."""
    return _KINDS.get(stat.S_IFMT(mode), "")


def check_regular(*files: Path) -> None:
    """Raise InputError for those that exist and are neither regular files nor folders; links are followed.

    The null device passes: it ends at once, and people use it as an empty file.
    """
    problems = []
    for file in files:
        try:
            kind = "" if file.samefile(os.devnull) else special_kind(file.stat().st_mode)
        except OSError:  # missing or forbidden: reading it reports that
            continue
        if kind:
            problems.append(Problem(str(file), f"is {kind}, not a regular file", "put a file in its place"))
    if problems:
        raise InputError(problems)


def check_regular_in(folder: Path) -> None:
    """Raise InputError for entries of a folder that are neither regular files nor folders."""
    try:
        files = sorted(folder.iterdir())
    except OSError:
        return
    check_regular(*files)
