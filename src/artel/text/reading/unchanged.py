"""A file is the same from the first byte that is read of it to the last, or it is not used."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from artel.errors import ArtelError, WorkError


class unchanged:
    """Raise WorkError when `file` is another after what is done inside, or was changed before at another time.

    It is known by size, inode and the times of change (nanoseconds) of content and inode, which whoever sets the first
    back cannot set; `version` is the first as it was when the reading was planned. What goes wrong inside because the
    file changes is told as that.
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
        status = os.stat(file)  # noqa: PTH116 - of each file, however small: Path.stat takes twice as long
    except OSError:
        return (-1, -1, -1, -1)
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _changed(file: Path, size: int) -> WorkError:
    now = _state(file)[0]
    same = "its bytes are as many as before, and its time of change, or the file of that name, is another"
    sizes = same if now == size else f"it had {size:,} bytes and now has {now:,}"
    what = "is gone" if now < 0 else f"changed: {sizes}"
    fix = "start again when it is no longer written, or give a copy of it: nothing was made of what was read"
    return WorkError.at(str(file), f"{what}, while it was read", fix)
