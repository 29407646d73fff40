"""A file must stay the same from the first byte read to the last, or it is not used."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from artel.errors import ArtelError, WorkError


class unchanged:
    """Context manager that raises WorkError if `file` changes inside the block, or changed since `version`.

    A change shows in the size, the inode, and the times of change of content and inode in nanoseconds; a program can
    set the first time back, not the second. `version` is the time of change of the content when the reading was
    planned. An error inside the block that the change caused is reported as the change.
    """

    __slots__ = ("_before", "_file", "_version")

    def __init__(self, file: Path, version: str = "") -> None:
        self._file, self._version = file, version

    def __enter__(self) -> None:
        self._before = _state(self._file)
        if self._version and self._version != str(self._before[1]):
            raise _changed(self._file, self._before[0])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, ArtelError | OSError):
            return
        now = _state(self._file)
        if now != self._before or (isinstance(error, FileNotFoundError) and now[0] < 0):
            raise _changed(self._file, self._before[0]) from error


def _state(file: Path) -> tuple[int, int, int, int]:
    try:
        status = os.stat(file)  # noqa: PTH116 - called for every file, and Path.stat takes twice as long
    except OSError:
        return (-1, -1, -1, -1)
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _changed(file: Path, size: int) -> WorkError:
    now = _state(file)[0]
    if now < 0:
        what = "is gone"
    elif now == size:
        what = "changed: it has as many bytes as before, and another time of change or another file has its name"
    else:
        what = f"changed: it had {size:,} bytes and now has {now:,}"
    fix = "start again when it is no longer written, or give a copy of it: nothing was made of what was read"
    return WorkError.at(str(file), f"{what}, while it was read", fix)
