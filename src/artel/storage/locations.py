"""Paths that users write, the cache folder, and disk errors as messages with a fix."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from artel.errors import ArtelError, InputError, WorkError

_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT}
_DENIED_ERRORS = {errno.EROFS, errno.EACCES, errno.EPERM}
_BAD_PATH_ERRORS = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
_REFUSED_ERRORS = _DENIED_ERRORS | _BAD_PATH_ERRORS
_OPEN_FILE_ERRORS = {errno.EMFILE, errno.ENFILE}
_BROKEN_ERRORS = {errno.EIO, errno.ESTALE, errno.ENXIO, errno.ENODEV, errno.EREMOTEIO}
DISK_ERRORS = frozenset(
    _FULL_ERRORS | _REFUSED_ERRORS | _OPEN_FILE_ERRORS | _BROKEN_ERRORS | {errno.EFBIG, errno.ENOENT}
)


def user_path(path: str, key: str) -> Path:
    """Return the path that a user wrote at `key`; `~` is the home folder. Raise InputError for an impossible path."""
    if "\0" in path:
        raise InputError.at(key, f"{path} has a NUL, which no path has", "remove it")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        what, fix = f"{path}: no such home folder", "write the full path, or ./~ if a name begins with ~"
        raise InputError.at(key, what, fix) from None


def state_folder() -> Path | None:
    """Return $XDG_STATE_HOME/artel, else ~/.local/state/artel; None without a home folder. It need not exist yet."""
    try:
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "artel"
    except RuntimeError:
        return None


def cache_folder() -> Path:
    """Return $ARTEL_CACHE, $XDG_CACHE_HOME/artel or ~/.cache/artel. Raise InputError if there is no home folder."""
    artel_cache, xdg_cache = os.environ.get("ARTEL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if artel_cache:
        return user_path(artel_cache, "ARTEL_CACHE")
    try:
        return (Path(xdg_cache) if xdg_cache else Path.home() / ".cache") / "artel"
    except RuntimeError:
        fix = "set ARTEL_CACHE to a folder that can be written"
        raise InputError.at("HOME", "there is no home folder", fix) from None


def rows_folder() -> Path:
    """Return the folder of files with rows of the Python API. Only `artel clean` removes them."""
    return cache_folder() / "rows"


def folder_problem(folder: Path) -> str:
    """Return the reason why a folder cannot be created or written; empty if its permissions allow it."""
    existing = _nearest_existing(folder)
    if not existing.is_dir():
        return f"cannot be a folder: {existing} is not a folder"
    return "" if os.access(existing, os.W_OK | os.X_OK) else f"cannot be written: you have no permission in {existing}"


def _nearest_existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))


def check_cache() -> None:
    """Raise InputError or WorkError if the cache folder cannot be written, before any work is done."""
    folder = cache_folder()
    # The folder itself is created when it is needed. A disk may be full or read-only whatever the permissions.
    with disk_errors(folder), tempfile.TemporaryFile(dir=_nearest_existing(folder), prefix=".check-") as file:
        file.write(b"artel")


def _to_os_error(error: Exception) -> OSError | None:
    """Return the disk's error, also if a Rust library (safetensors) reports it as text: `… (os error 28)`."""
    if isinstance(error, OSError) and error.errno is not None:
        return error
    match = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(match[1]), os.strerror(int(match[1]))) if match else None


@contextmanager
def disk_errors(folder: Path | str) -> Iterator[None]:
    """Turn an OSError from writing in `folder` into an error with a fix. Other errors pass.

    Raise InputError if the folder cannot be written, WorkError if it no longer can be: the disk is full, or fails.
    """
    try:
        yield
    except Exception as raised:
        error = _to_os_error(raised)
        if error is None:
            raise
        is_elsewhere = error.errno == errno.ENOENT and not _is_below(error.filename, folder)
        if error.errno not in DISK_ERRORS or is_elsewhere:
            raise
        raise disk_error(error, folder) from error


def disk_error(error: OSError, path: Path | str, problem: str = "cannot be written") -> ArtelError:
    """Convert one of DISK_ERRORS at `path` to an error with a fix; `problem` names the failed operation."""
    detail = os.strerror(error.errno or 0)
    if isinstance(error.filename, str | bytes) and os.fsdecode(error.filename) != os.fspath(path):
        detail += f" ({os.fsdecode(error.filename)})"
    other_folder = "choose another folder (run, data.store, ARTEL_CACHE)"
    if error.errno in _FULL_ERRORS:
        return WorkError.at(str(path), f"the disk is full: {detail}", f"free space there, or {other_folder}")
    if error.errno in _REFUSED_ERRORS:
        fix = "choose a folder that can be written (run, data.store, ARTEL_CACHE), or change its permissions"
        return InputError.at(str(path), f"{problem}: {detail}", fix)
    if error.errno == errno.EFBIG:
        fix = f"lift the limit on the size of a file (ulimit -f), or {other_folder}"
        return WorkError.at(str(path), f"a file there may not become that large: {detail}", fix)
    if error.errno in _OPEN_FILE_ERRORS:
        return WorkError.at(str(path), f"cannot be opened: {detail}", "lift the limit on open files (ulimit -n)")
    if error.errno == errno.ENOENT:
        fix = "it was removed or moved: restore it, and the same command resumes"
        return WorkError.at(str(path), f"is not there: {detail}", fix)
    return WorkError.at(str(path), f"the disk fails: {detail}", f"see the system's log, or {other_folder}")


def _is_below(name: object, folder: Path | str) -> bool:
    """True if the missing file is inside the folder; a file missing elsewhere is not an error of writing."""
    return isinstance(name, str | bytes) and Path(os.fsdecode(name)).is_relative_to(folder)
