"""Where artel keeps what can be made again, and what to tell people when a disk refuses."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from artel.errors import ArtelError, InputError, WorkError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
            errno.ELOOP}  # fmt: skip
_FILES = {errno.EMFILE, errno.ENFILE}
_BROKEN = {errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO}
DISK_ERRORS = frozenset(_FULL | _REFUSED | _FILES | _BROKEN | {errno.EFBIG, errno.ENOENT})


def own_path(path: str, where: str) -> Path:
    """A path as its user writes it, at the key or option `where`; `~` is a home folder. Raises InputError."""
    if "\0" in path:
        raise InputError.at(where, f"{path} has a NUL, which no path has", "leave it out")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        what, fix = f"{path}: there is no such home", "write the path in full, or ./~ where a name begins so"
        raise InputError.at(where, what, fix) from None


def cache_folder() -> Path:
    """$ARTEL_CACHE, else $XDG_CACHE_HOME/artel, else ~/.cache/artel. It need not exist yet.

    Raises InputError where there is no home folder.
    """
    own, common = os.environ.get("ARTEL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return own_path(own, "ARTEL_CACHE")
    try:
        return (Path(common) if common else Path.home() / ".cache") / "artel"
    except RuntimeError:
        fix = "set ARTEL_CACHE to a folder that can be written"
        raise InputError.at("HOME", "there is no home folder", fix) from None


def folder_fault(folder: Path) -> str:
    """Why a folder cannot be made, or cannot be written into, as far as rights say; empty where they allow it."""
    there = _nearest(folder)
    if not there.is_dir():
        return f"cannot be a folder: {there} is none"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"cannot be written: {there} is not yours to write into"


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(place))


def check_cache() -> None:
    """Raise InputError or WorkError where nothing can be written into the cache folder: before any work is done."""
    folder = cache_folder()
    # It is made when it is needed. Rights alone do not tell: a disk may be full, or read-only for all.
    with disk_errors(folder), tempfile.TemporaryFile(dir=_nearest(folder), prefix=".check-") as file:
        file.write(b"artel")


def _as_os_error(error: Exception) -> OSError | None:
    """The error of the disk, also where a library in Rust (safetensors) hands it on as words: `… (os error 28)`."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    told = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(told[1]), os.strerror(int(told[1]))) if told else None


@contextmanager
def disk_errors(where: Path | str) -> Iterator[None]:
    """Turn an OSError of the disk met while writing in the folder `where` into an error with a remedy.

    Raises InputError when the folder cannot be written (read-only, no permission, a file where a folder should be),
    WorkError when it no longer can: the disk or the quota is full, a limit is reached, the disk fails or the folder is
    gone. Other errors pass.
    """
    try:
        yield
    except Exception as found:
        error = _as_os_error(found)
        if error is None:
            raise
        if error.errno not in DISK_ERRORS or (error.errno == errno.ENOENT and not _is_below(error.filename, where)):
            raise
        raise disk_error(error, where) from error


def disk_error(error: OSError, where: Path | str, what: str = "cannot be written") -> ArtelError:
    """What a disk refused at `where`, one of DISK_ERRORS, as words with a remedy; `what` it would not have done."""
    detail = os.strerror(error.errno or 0)
    if isinstance(error.filename, str | bytes) and os.fsdecode(error.filename) != os.fspath(where):
        detail += f" ({os.fsdecode(error.filename)})"
    other = "choose another folder (run, data.store, ARTEL_CACHE)"
    if error.errno in _FULL:
        return WorkError.at(str(where), f"the disk is full: {detail}", f"free space there, or {other}")
    if error.errno in _REFUSED:
        fix = "choose a folder that can be written (run, data.store, ARTEL_CACHE), or change its permissions"
        return InputError.at(str(where), f"{what}: {detail}", fix)
    if error.errno == errno.EFBIG:
        fix = f"lift the limit on the size of a file (ulimit -f), or {other}"
        return WorkError.at(str(where), f"a file there may not become so large: {detail}", fix)
    if error.errno in _FILES:
        return WorkError.at(str(where), f"cannot be opened: {detail}", "lift the limit on open files (ulimit -n)")
    if error.errno == errno.ENOENT:
        fix = "it was removed or moved meanwhile: put it back, and the same command goes on"
        return WorkError.at(str(where), f"is not there: {detail}", fix)
    return WorkError.at(str(where), f"the disk fails: {detail}", f"see the system's log, or {other}")


def _is_below(name: object, where: Path | str) -> bool:
    """Whether a name is of the folder `where`: what is missing elsewhere is not told as something not written."""
    return isinstance(name, str | bytes) and Path(os.fsdecode(name)).is_relative_to(where)
