"""File locks (flock). The kernel holds them and releases the lock of a process that dies."""

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
from artel.host import process_exists
from artel.storage.locations import disk_errors
from artel.storage.regular_files import check_regular

_POLL_SECONDS = 0.1


@contextmanager
def lock(
    path: Path | str,
    on_wait: Callable[[], object] | None = None,
    *,
    wait: bool | float = True,
    keep: bool = True,
    shared: bool = False,
) -> Iterator[None]:
    """Hold the lock file `path` inside the block, creating it if missing. Processes started inside do not hold it.

    Args:
        on_wait: called once if another process holds the lock.
        wait: True to wait for that process; or the seconds to wait before raising WorkError. False: raise it at once.
        keep: True to keep the file when the block ends.
        shared: True for a lock that several processes can hold at the same time, if each of them shares it.
    """
    path = Path(path)
    deadline = time.monotonic() + (math.inf if wait is True else wait)
    while (descriptor := _try_lock(path, shared)) is None:
        if time.monotonic() >= deadline:
            fix = "wait until it ends, or stop it"
            raise WorkError.at(str(path), f"is in use by {lock_holders(path)}", fix)
        if on_wait is not None:
            on_wait()
            on_wait = None
        time.sleep(_POLL_SECONDS)
    try:
        with disk_errors(path.parent):
            if not shared:
                os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        if not keep:
            path.unlink(missing_ok=True)
        os.close(descriptor)  # releases the lock


def _try_lock(path: Path, shared: bool) -> int | None:
    """Return the descriptor of the locked file; None if another process holds the lock."""
    check_regular(path)
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        # The process that held it may have removed the file after it was opened here: a new file has its name.
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError as error:  # a network disk without locks (ENOLCK, EOPNOTSUPP), or one that fails
        os.close(descriptor)
        what = f"cannot be locked: {error.strerror}"
        raise WorkError.at(str(path), what, "choose a folder on a disk with locks (flock)") from None
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def lock_holders(path: Path) -> str:
    """Describe the processes that hold the lock, for messages. Dead processes of this host are left out."""
    try:
        lines = path.read_bytes()[-2000:].decode(errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    return ", ".join(line for line in dict.fromkeys(lines) if _may_be_alive(line)) or "another process"


def _may_be_alive(line: str) -> bool:
    match = re.fullmatch(r"process (\d+) on (.*)", line)
    return match is None or match[2] != socket.gethostname() or process_exists(int(match[1]))
