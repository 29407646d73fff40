"""A worker process of a run and its launcher: command, detection, ending together, exit status for lost peers."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from artel.errors import Problem, WorkError
from artel.plugins import exception_message

LOST_PEERS = 75  # EX_TEMPFAIL of sysexits.h; only the launcher sees it, and ends with 1
_PR_SET_PDEATHSIG = 1  # of Linux's prctl(2)


class LostPeers(WorkError):
    """Another process of the run, or the connection to it, has ended. This one has not failed."""

    exit_code = LOST_PEERS


def module_command(module: str) -> list[str]:
    """Return the command that runs `module`. It imports from the working folder only if this process does."""
    # `python -m` puts the working folder first on the path, the command `artel` its own folder.
    from_working_folder = sys.path[:1] in ([""], [str(Path.cwd())])
    return [sys.executable, *([] if from_working_folder else ["-P"]), "-m", module]


def is_worker() -> bool:
    """True if a launcher (torchrun, artel or another) has started this process."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def end_with_launcher(launcher: int) -> None:
    """Make this process save and stop when its launcher is killed, so that it does not hold GPUs and the run's folder.

    `launcher` is the launcher's process id (1 if it is the only process of a container).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it was killed before prctl
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def raise_lost_peers() -> Iterator[None]:
    """Raise LostPeers if a library reports a closed connection inside the block. Other errors pass through."""
    from torch.distributed import DistError

    try:
        yield
    except RuntimeError as error:
        message = exception_message(error)
        if not isinstance(error, DistError) and not any(sign in message for sign in _CLOSED_CONNECTION):
            raise
        location = f"process {os.environ.get('RANK', '0')} on {socket.gethostname()}"
        what = f"lost its peers: {re.sub(_SOURCE_PREFIX, '', message).splitlines()[0].partition('. ')[0]}"
        raise LostPeers([Problem(location, what, "look for the process that ended first, and its message")]) from error


_SOURCE_PREFIX = r"^\[[^]]*\] *"  # gloo's errors begin with a location in its source code
# Words in gloo's errors for a closed connection; gloo has no error class.
_CLOSED_CONNECTION = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
