"""Where artel keeps what can be made again, and what to tell people when a disk refuses."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from artel.errors import InputError, Problem, WorkError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG}


def cache_folder() -> Path:
    """$ARTEL_CACHE, else $XDG_CACHE_HOME/artel, else ~/.cache/artel. It need not exist yet."""
    own, common = os.environ.get("ARTEL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(common) if common else Path.home() / ".cache") / "artel"


def _as_os_error(error: Exception) -> OSError | None:
    """The error of the disk, also where a library in Rust (safetensors) hands it on as words: `… (os error 28)`."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    told = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(told[1]), os.strerror(int(told[1]))) if told else None


@contextmanager
def disk_errors(where: Path | str) -> Iterator[None]:
    """Turn an OSError of the disk met while writing in the folder `where` into an error with a remedy.

    Raises WorkError when the disk or the quota is full, InputError when the folder cannot be written: read-only,
    no permission, a file where a folder should be. Other errors pass.
    """
    try:
        yield
    except Exception as found:
        error = _as_os_error(found)
        if error is None:
            raise
        detail = os.strerror(error.errno) if error.errno else str(error)
        if error.filename is not None and os.fspath(error.filename) != os.fspath(where):
            detail += f" ({os.fsdecode(error.filename)})"
        if error.errno in _FULL:
            fix = "free space there, or choose another folder (run, data.store, ARTEL_CACHE)"
            raise WorkError([Problem(str(where), f"the disk is full: {detail}", fix)]) from error
        if error.errno in _REFUSED:
            fix = "choose a folder that can be written (run, data.store, ARTEL_CACHE), or change its permissions"
            raise InputError([Problem(str(where), f"cannot be written: {detail}", fix)]) from error
        raise
