"""`artel clean`: list or remove artel's files on this machine outside of run folders."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from artel.cli.common import AsJson, print_json, print_status
from artel.cli.streams import print_result
from artel.errors import ArtelError, InputError, Problem, WorkError
from artel.printable import format_bytes

_KEY = "[0-9a-f]{32}"
_CATEGORIES = {
    "stores": (
        rf"{_KEY}(\.(parts|damaged|teachers|settled\.json|copy|lock))?",
        "prepared text; rebuilt if needed",
    ),
    "downloads": (rf"{_KEY}|unfinished", "pages and files from http(s); downloaded again if needed"),
    "remote": (rf"{_KEY}|unfinished", "files from s3:// and hf://; downloaded again if needed"),
    "listings": (rf"{_KEY}\.json", "listings of s3:// and hf://, for starts without a network"),
    "micro_batches": (rf"{_KEY}\.json", "micro-batch sizes that fit in memory; measured again if needed"),
    "built": (r"\w+-[0-9a-f]{16}\.so", "operators compiled for this CPU; rebuilt if needed"),
    "rows": (rf"{_KEY}\.jsonl", "rows passed from Python; the program must pass them again"),
    "hardware.json": ("", "speed of this machine; artel hardware measures it again"),
    "faults": (r".*-process-\d+\.txt", "crash reports of artel"),
    "chat_history": ("", "input history of artel chat"),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    """CATEGORY, or stores/KEY."""
    paths: tuple[Path, ...]
    byte_size: int
    modified_at: float
    """Time of the last change, in seconds since 1970."""

    @property
    def key(self) -> str:
        return self.name.partition("/")[2]


def clean(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Names of listed entries to remove, or all."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List artel's files on this machine with their sizes, or remove the named ones. Runs are never touched.

    Examples: artel clean
              artel clean downloads faults
    """
    from artel.storage import cache_folder

    print_status(f"looking at {cache_folder()}")
    entries = list(_list_entries())
    removed, problems = _remove_entries(_select_entries(entries, names)) if names else ([], [])
    if as_json:
        listed = removed if names else entries
        rows = [
            {"name": entry.name, "bytes": entry.byte_size, "paths": list(map(str, entry.paths))} for entry in listed
        ]
        print_json({"folder": str(cache_folder()), "removed" if names else "kept": rows})
    elif names:
        print_result(f"{_total_size(removed)} removed: {', '.join(entry.name for entry in removed) or 'nothing'}")
    else:
        _print_entries(entries)
    if problems:
        raise WorkError(problems)


def _print_entries(entries: list[_Entry]) -> None:
    for entry in entries:
        description = _CATEGORIES[entry.name.partition("/")[0]][1]
        if entry.key:
            description += f" · {time.strftime('%Y-%m-%d', time.localtime(entry.modified_at))}"
        print_result(f"{_total_size([entry]):>10}  {entry.name:<40} {description}")
    hint = "; remove entries with artel clean NAME" if entries else ""
    print_result(f"{_total_size(entries):>10}  in total{hint}")


def _list_entries() -> Iterator[_Entry]:
    """Yield the entries in the order of _CATEGORIES. Each token store is an entry."""
    from artel.storage import cache_folder, state_folder

    for category, (pattern, _) in _CATEGORIES.items():
        folder = (state_folder() if category == "chat_history" else cache_folder()) or cache_folder()
        category_path = folder / category
        if not pattern:
            groups = {category: [category_path] if category_path.is_file() else []}
        else:
            groups = {}
            for path in sorted(category_path.iterdir()) if category_path.is_dir() else []:
                if re.fullmatch(pattern, path.name) and not path.is_symlink():
                    name = f"{category}/{path.name.partition('.')[0]}" if category == "stores" else category
                    groups.setdefault(name, []).append(path)
        for name, paths in groups.items():
            files = [status for path in paths for status in _file_statuses(path)]
            if byte_size := sum(file.st_size for file in files):
                yield _Entry(name, tuple(paths), byte_size, max(file.st_mtime for file in files))


def _file_statuses(path: Path) -> Iterator[os.stat_result]:
    """Yield the status of `path` and of all files in it, except files that another process removes meanwhile."""
    for file in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            yield file.lstat()


def _select_entries(entries: list[_Entry], names: list[str]) -> list[_Entry]:
    """Return the entries with the given names (categories or token stores). Raise InputError for names not listed."""
    listed = dict.fromkeys(name for entry in entries for name in (entry.name.partition("/")[0], entry.name))
    categories = ", ".join(name for name in listed if "/" not in name)
    fix = f"use all, or some of: {categories}" if categories else "artel has no files on this machine"
    unknown = [name for name in names if name not in (*listed, *_CATEGORIES, "all")]
    if unknown:
        raise InputError([Problem(name, "is not an entry of artel's files on this machine", fix) for name in unknown])
    return [entry for entry in entries if {"all", entry.name, entry.name.partition("/")[0]} & set(names)]


def _remove_entries(entries: list[_Entry]) -> tuple[list[_Entry], list[Problem]]:
    """Remove entries. Return the removed entries, and the problems of the others (e.g. a store in preparation)."""
    from artel.storage import discard, disk_errors, lock

    removed: list[_Entry] = []
    problems: list[Problem] = []
    for entry in entries:
        folder = entry.paths[0].parent
        unused = lock(folder / f"{entry.key}.lock", wait=False, keep=False) if entry.key else nullcontext()
        try:
            with unused, disk_errors(folder):
                for path in entry.paths:
                    discard(path, ignore_errors=False) if path.is_dir() else path.unlink(missing_ok=True)
        except ArtelError as error:
            problems += error.problems
        else:
            removed.append(entry)
    return removed, problems


def _total_size(entries: list[_Entry]) -> str:
    return format_bytes(sum(entry.byte_size for entry in entries))
