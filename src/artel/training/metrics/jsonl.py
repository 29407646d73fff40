"""Appends JSON lines to a file. Buffers lines that a full disk refuses, and writes them with a later line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson

from artel.printable import escape_line
from artel.storage import disk_errors, write_file


class JsonLinesFile:
    """A JSON lines file, open for appending."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with disk_errors(path.parent):
            self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        self._refused = False

    def add(self, line: dict[str, Any]) -> None:
        """Write a line, or buffer it. Warn the first time that the disk refuses one."""
        self._unwritten += orjson.dumps(line) + b"\n"
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not self._refused:
                message = f"{self._path} cannot be written now ({error.strerror}): its lines stay in memory"
                print(escape_line(message), file=sys.stderr)
            self._refused = True

    def close(self) -> None:
        if self._unwritten:
            print(escape_line(f"{self._path} misses its last lines: they could not be written"), file=sys.stderr)
        self._file.close()


def drop_lines_after(path: Path, step: int) -> None:
    """Drop lines of steps after `step`, which a resumed run repeats, and lines that a kill left incomplete.

    These lines are usually at the end. Then the file is truncated, so that ten million lines are not written again.
    Raise InputError if the disk refuses.
    """
    if not path.exists():
        return
    with disk_errors(path.parent), path.open("r+b") as file:
        valid_bytes, line = 0, b"\n"
        while (next_line := file.readline()) and _is_before(next_line, step):
            valid_bytes, line = valid_bytes + len(next_line), next_line
        lines_to_keep = [line for line in file if _is_before(line, step)]
        if not lines_to_keep:
            file.truncate(valid_bytes)
            if not line.endswith(b"\n"):
                file.seek(valid_bytes)
                file.write(b"\n")
            return
    write_file(path, path.read_bytes()[:valid_bytes] + b"".join(line.rstrip(b"\n") + b"\n" for line in lines_to_keep))


def _is_before(line: bytes, step: int) -> bool:
    """True if the line is of a step up to `step`."""
    try:
        return bool(orjson.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False
