"""A process of a run as its launcher sees it: who started it, that it ends with its launcher, and how it says why."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from artel.errors import Problem, WorkError

LOST_OTHERS = 75  # EX_TEMPFAIL of sysexits.h; only between a worker and its launcher, which ends with 1
_PR_SET_PDEATHSIG = 1  # of Linux's prctl(2)


class LostOthers(WorkError):
    """Another process of the run ended, or the way to it did; this one has nothing wrong."""

    exit_code = LOST_OTHERS


def is_worker() -> bool:
    """Whether a launcher (torchrun, ours or another) has started this process."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def end_with_launcher(launcher: int) -> None:
    """Stop, saved, when the launcher is killed outright: a run without one holds GPUs, and its folder, unwatched.

    `launcher` is its process id (1 where it is all that runs in a container).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:  # it was killed before we asked
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def lost_others_told() -> Iterator[None]:
    """What the libraries raise when a peer has gone, as LostOthers; every other error stays what it is."""
    from torch.distributed import DistError

    try:
        yield
    except RuntimeError as error:
        told = str(error)
        if not isinstance(error, DistError) and not any(sign in told for sign in _SIGNS):
            raise
        where = f"process {os.environ.get('RANK', '0')} on {socket.gethostname()}"
        what = f"lost the others: {re.sub(_PLACE, '', told).splitlines()[0].partition('. ')[0]}"
        raise LostOthers([Problem(where, what, "look for the process that ended first, and what it said")]) from error


_PLACE = r"^\[[^]]*\] *"  # of gloo's source, with which its errors begin
# Words of gloo, whose errors have no class of their own, for an end of the connection.
_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Broken pipe")
