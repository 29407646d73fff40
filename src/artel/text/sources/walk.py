"""List the files of folders and globs, following links. Each folder is entered once, each file listed once."""

from __future__ import annotations

import errno
import glob
import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path


def walk_files(folder: Path, *, include_hidden: bool = True) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders.

    Linked folders are entered once, after folders that need no link. Links to the folders above are ignored: a glob
    would follow a link to the parent until the kernel stops it, and higher folders have many unrelated files.
    Without `include_hidden`, names that begin with a dot are skipped.
    """
    folders, links = [os.fspath(folder)], list[str]()
    entered = set(map(str, Path(os.path.realpath(folder)).parents))
    while folders or links:
        current = folders.pop() if folders else links.pop(0)
        real = os.path.realpath(current)
        if real in entered:
            continue
        entered.add(real)
        with os.scandir(current) as entries:
            for entry in entries:
                if not include_hidden and entry.name.startswith("."):
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
        return False  # a link to itself is a broken link


def glob_files(pattern: str) -> Iterator[Path]:
    """Yield the paths that a glob matches. `**` matches any number of folders, as in the glob module."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from map(Path, glob.iglob(pattern))  # noqa: PTH207
        return
    index = parts.index("**")
    include_hidden = any(part.startswith(".") for part in parts[index:])
    for base in map(Path, glob.iglob(str(Path(*parts[:index])))):  # noqa: PTH207
        if base.is_dir():
            for file in walk_files(base, include_hidden=include_hidden):
                if matches(file.relative_to(base).parts, parts[index:]):
                    yield file


def matches(names: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """True if the parts of a glob match the parts of a path."""
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


def may_match_inside(names: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """True if a glob may match something inside the folder whose path has these parts."""
    if not names or not pattern:
        return bool(pattern)
    if pattern[0] == "**":
        below = not names[0].startswith(".") and may_match_inside(names[1:], pattern)
        return below or may_match_inside(names, pattern[1:])
    if names[0].startswith(".") and not pattern[0].startswith("."):
        return False
    return fnmatchcase(names[0], pattern[0]) and may_match_inside(names[1:], pattern[1:])


def unique_files(files: Iterable[Path]) -> list[Path]:
    """Sort the files. If several paths resolve to one file, keep the real file, or else the first link."""
    ordered = sorted(files)
    links = {file for file in ordered if os.path.islink(file)}  # noqa: PTH114 - for every file: Path takes twice as long
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
