"""A file that is memory-mapped and becomes shorter ends its readers by SIGBUS; so does a disk that fails."""

from __future__ import annotations

import ctypes
import os
import signal

from artel.storage.panics import screen

_WORDS = (
    b"artel: a file that was being read (a token store, a model's weights) became shorter, or its disk failed\n"
    b"    put the file back as it was; the same command then resumes from the last checkpoint\n"
)


def _end(number: int) -> None:
    """The thread that reads is the one that gets the signal: it holds Python's lock or no lock at all."""
    os.write(screen(), _WORDS)
    os._exit(1)


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(_end)  # kept: C calls it


def say_bus_errors() -> None:
    """From now on this process ends in words, with status 1, and not by the signal."""
    ctypes.CDLL(None).signal(signal.SIGBUS, _HANDLER)  # Python's own handlers run later, and the read would never end
