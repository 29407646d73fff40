"""JSON lines added to a file; what a full disk refuses is kept, and written with a later line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson

from artel.printable import in_a_line
from artel.storage import disk_errors, write_file


class Lines:
    def __init__(self, path: Path) -> None:
        self._path = path
        with disk_errors(path.parent):
            self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        self._refused = False

    def add(self, line: dict[str, Any]) -> None:
        """Write a line, or keep it; that the disk refuses is said once."""
        self._unwritten += orjson.dumps(line) + b"\n"
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not self._refused:
                what = f"{self._path} cannot be written now ({error.strerror}): its lines are kept"
                print(in_a_line(what), file=sys.stderr)
            self._refused = True

    def close(self) -> None:
        if self._unwritten:
            print(in_a_line(f"{self._path} lacks its last lines: they could not be written"), file=sys.stderr)
        self._file.close()


def drop_lines_after(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, which a resumed run does again, and what a kill left torn.

    They stand at the end, where the file is cut: one of ten million lines is not written anew. Raises InputError.
    """
    if not path.exists():
        return
    with disk_errors(path.parent), path.open("r+b") as file:
        size, line = 0, b"\n"
        while (following := file.readline()) and _is_kept(following, step):
            size, line = size + len(following), following
        later = [line for line in file if _is_kept(line, step)]
        if not later:
            file.truncate(size)
            if not line.endswith(b"\n"):
                file.seek(size)
                file.write(b"\n")
            return
    write_file(path, path.read_bytes()[:size] + b"".join(line.rstrip(b"\n") + b"\n" for line in later))


def _is_kept(line: bytes, step: int) -> bool:
    """True for the line of a step up to `step`."""
    try:
        return bool(orjson.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False
