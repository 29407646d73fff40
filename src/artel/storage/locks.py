"""One at a time: a lock on a file, held by the kernel, so that a process that dies lets go of it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from artel.errors import Problem, WorkError
from artel.storage.places import disk_errors

_POLL_SECONDS = 0.1


@contextmanager
def lock(
    path: Path | str, waiting: Callable[[], object] | None = None, *, wait: bool = True, keep: bool = True
) -> Iterator[None]:
    """Hold the lock file `path` (made when missing) for the length of the block; then it is left in place if `keep`.

    If another holds it: `waiting` is called once and we wait; with `wait=False` raises WorkError that names them.
    """
    path = Path(path)
    told = False
    while (number := _taken(path)) is None:
        if not wait:
            fix = "wait until it ends, or stop it"
            raise WorkError([Problem(str(path), f"is in use by {_holder(path)}", fix)])
        if waiting is not None and not told:
            told = True
            waiting()
        time.sleep(_POLL_SECONDS)
    try:
        with disk_errors(path.parent):
            os.ftruncate(number, 0)
            os.pwrite(number, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        if not keep:
            path.unlink(missing_ok=True)
        os.close(number)  # this releases the lock


def _taken(path: Path) -> int | None:
    """The locked file's number; None when another holds it."""
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who held it may have removed it since we opened it: then another has locked, or will, a new file of its name.
        if os.path.samestat(os.fstat(number), path.stat()):
            return number
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(number)
        raise
    os.close(number)
    return None


def _holder(path: Path) -> str:
    try:
        return path.read_bytes()[:200].decode(errors="replace") or "another process"
    except FileNotFoundError:
        return "another process"
