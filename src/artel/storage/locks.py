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
def lock(path: Path | str, waiting: Callable[[], object] | None = None, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock file `path` (made when missing, and left in place) for the length of the block.

    If another holds it: `waiting` is called once and we wait; with `wait=False` raises WorkError that names them.
    """
    path = Path(path)
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        told = False
        while not _try(number):
            if not wait:
                fix = "wait until it ends, or stop it"
                raise WorkError([Problem(str(path), f"is in use by {_holder(number)}", fix)])
            if waiting is not None and not told:
                told = True
                waiting()
            time.sleep(_POLL_SECONDS)
        with disk_errors(path.parent):
            os.ftruncate(number, 0)
            os.pwrite(number, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        # Closing releases the lock. The file stays: removing it would let two others lock two files of one name.
        os.close(number)


def _try(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(number: int) -> str:
    return os.pread(number, 200, 0).decode(errors="replace") or "another process"
