"""A file is the same from the first byte that is read of it to the last, or it is not used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from artel.errors import ArtelError, Problem, WorkError


@contextmanager
def unchanged(file: Path, version: str = "") -> Iterator[None]:
    """Raise WorkError when `file` is another after what is done inside, or was changed before at another time.

    It is known by size, inode and the times of change (nanoseconds) of content and inode, which whoever sets the first
    back cannot set; `version` is the first as it was when the reading was planned. What goes wrong inside because the
    file changes is told as that.
    """
    before = _state(file)
    try:
        if version and version != str(before[1]):
            raise _changed(file, before[0])
        yield
    except ArtelError as error:
        if _state(file) != before:
            raise _changed(file, before[0]) from error
        raise
    if _state(file) != before:
        raise _changed(file, before[0])


def _state(file: Path) -> tuple[int, int, int, int]:
    try:
        status = file.stat()
    except OSError:
        return (-1, -1, -1, -1)
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def _changed(file: Path, size: int) -> WorkError:
    now = _state(file)[0]
    what = "is gone" if now < 0 else f"changed: it had {size:,} bytes and now has {now:,}"
    fix = "start again when it is no longer written, or give a copy of it: nothing was made of what was read"
    return WorkError([Problem(str(file), f"{what}, while it was read", fix)])
