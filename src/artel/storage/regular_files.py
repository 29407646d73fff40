"""Checks for regular files, and their checksums. Reading a pipe or device in place of a file may never end."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import xxhash

from artel.errors import InputError, Problem

_CHUNK_BYTES = 1 << 20
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def describe_file_type(mode: int) -> str:
    """Describe the kind of a file from its stat mode; empty for regular files and folders."""
    return _KINDS.get(stat.S_IFMT(mode), "")


def check_regular(*files: Path) -> None:
    """Raise InputError for files that exist and are neither regular (the null device passes) nor folders."""
    problems = []
    for file in files:
        try:
            kind = "" if file.samefile(os.devnull) else describe_file_type(file.stat().st_mode)
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


def checksum(path: Path | str, on_chunk: Callable[[memoryview], object] = lambda chunk: None) -> str:
    """Return the xxh3-128 of a file in 32 hex digits. It is as fast as the disk; it detects damage, not malice.

    `on_chunk` is called with each chunk read, of at most 2**20 bytes.
    """
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with Path(path).open("rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            digest.update(buffer[:num_bytes])
            on_chunk(buffer[:num_bytes])
    return str(digest.hexdigest())
