"""The files of folders and globs, through links too: each folder is entered once, and each file is listed once."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path


def files_in(folder: Path, *, hidden: bool = True) -> Iterator[Path]:
    """All that stands in a folder and the folders in it, but for folders.

    A folder that links lead to is entered once, after those that need no link: a link to its own parent, which a glob
    follows until the kernel forbids it, adds nothing, nor does one to a folder above, which has far more than is meant.
    Without `hidden` names that begin with a dot are left out.
    """
    folders, links = [os.fspath(folder)], list[str]()
    entered = set(map(str, Path(os.path.realpath(folder)).parents))
    while folders or links:
        at = folders.pop() if folders else links.pop(0)
        real = os.path.realpath(at)
        if real in entered:
            continue
        entered.add(real)
        with os.scandir(at) as entries:
            for entry in entries:
                if not hidden and entry.name.startswith("."):
                    continue
                if _is_folder(entry):
                    (links if entry.is_symlink() else folders).append(entry.path)
                else:
                    yield Path(entry.path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False  # a link to itself is as one that leads nowhere


def files_matching(pattern: str) -> Iterator[Path]:
    """What a glob matches; `**` stands for any folders, as in Python's glob."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from map(Path, glob.iglob(pattern))  # noqa: PTH207
        return
    before, rest = parts[: parts.index("**")], parts[parts.index("**") :]
    hidden = any(part.startswith(".") for part in rest)
    for base in map(Path, glob.iglob(str(Path(*before)))):  # noqa: PTH207
        if base.is_dir():
            for file in files_in(base, hidden=hidden):
                if matches(file.relative_to(base).parts, rest):
                    yield file


def matches(names: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether the parts of a path are matched by those of a glob."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        if len(pattern) == 1:
            return not any(name.startswith(".") for name in names)
        if matches(names, pattern[1:]):
            return True
        return bool(names) and not names[0].startswith(".") and matches(names[1:], pattern)
    if not names or (names[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(names[0], pattern[0]) and matches(names[1:], pattern[1:])


def each_once(files: Iterable[Path]) -> list[Path]:
    """The files sorted; where several are one by their links, that which is no link, or the first of the links."""
    ordered = sorted(files)
    links = {file for file in ordered if os.path.islink(file)}  # noqa: PTH114 - of each file: Path takes twice as long
    folders: dict[str, str] = {}
    real: dict[str, Path] = {}
    for file in ordered:
        if file not in links:
            folder, name = os.path.split(file)
            if folder not in folders:
                folders[folder] = os.path.realpath(folder)
            real.setdefault(os.path.join(folders[folder], name), file)  # noqa: PTH118
    for file in sorted(links):
        real.setdefault(os.path.realpath(file), file)
    return sorted(real.values()) if links else list(real.values())


def may_hold(names: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether a glob may match something in the folder whose path has these parts."""
    if not names or not pattern:
        return bool(pattern)
    if pattern[0] == "**":
        below = not names[0].startswith(".") and may_hold(names[1:], pattern)
        return below or may_hold(names, pattern[1:])
    if names[0].startswith(".") and not pattern[0].startswith("."):
        return False
    return fnmatchcase(names[0], pattern[0]) and may_hold(names[1:], pattern[1:])
