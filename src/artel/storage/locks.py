"""One at a time: a lock on a file, held by the kernel, so that a process that dies lets go of it."""

from __future__ import annotations

import fcntl
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from artel.errors import WorkError
from artel.storage.locations import disk_errors
from artel.storage.regular_files import check_regular

_POLL_SECONDS = 0.1


@contextmanager
def lock(
    path: Path | str,
    waiting: Callable[[], object] | None = None,
    *,
    wait: bool | float = True,
    keep: bool = True,
    shared: bool = False,
) -> Iterator[None]:
    """Hold the lock file `path` (made when missing) for the length of the block; then it is left in place if `keep`.

    If another holds it: `waiting` is called once and we wait, for so many seconds where `wait` is a number; after
    these, or with `wait=False` at once, raises WorkError that names them. Those that hold it `shared` hold it together.

    Processes that are started within the block do not hold it.
    """
    path = Path(path)
    told = False
    end = time.monotonic() + (math.inf if wait is True else wait)
    while (number := _taken(path, shared)) is None:
        if time.monotonic() >= end:
            fix = "wait until it ends, or stop it"
            raise WorkError.at(str(path), f"is in use by {holders(path)}", fix)
        if waiting is not None and not told:
            told = True
            waiting()
        time.sleep(_POLL_SECONDS)
    try:
        with disk_errors(path.parent):
            if not shared:
                os.ftruncate(number, 0)
            os.write(number, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        if not keep:
            path.unlink(missing_ok=True)
        os.close(number)  # this releases the lock


def _taken(path: Path, shared: bool) -> int | None:
    """The locked file's number; None when another holds it."""
    check_regular(path)
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.flock(number, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        # Who held it may have removed it since we opened it: then another has locked, or will, a new file of its name.
        if os.path.samestat(os.fstat(number), path.stat()):
            return number
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:  # of a disk far away that knows no locks (ENOLCK, EOPNOTSUPP), or fails
        os.close(number)
        what = f"cannot be locked: {error.strerror}"
        raise WorkError.at(str(path), what, "choose a folder on a disk that knows locks (flock)") from None
    except BaseException:
        os.close(number)
        raise
    os.close(number)
    return None


def holders(path: Path) -> str:
    """Who holds the lock, in words: those who wrote themselves down and, as far as can be told here, still live."""
    try:
        lines = path.read_bytes()[-2000:].decode(errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    return ", ".join(line for line in dict.fromkeys(lines) if _may_live(line)) or "another process"


def _may_live(line: str) -> bool:
    found = re.fullmatch(r"process (\d+) on (.*)", line)
    if found is None or found[2] != socket.gethostname():
        return True
    try:
        os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
