"""SIGBUS: the signal that ends a process if a memory-mapped file becomes shorter, or its disk fails."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from artel.storage.panics import stderr_descriptor

_MESSAGE = (
    b"artel: a file that was being read (a token store, a model's weights) became shorter, or its disk failed\n"
    b"    put the file back as it was; the same command then resumes from the last checkpoint\n"
)


def _handle(number: int) -> None:
    """Runs in the thread that was reading, which holds Python's global lock or no lock at all."""
    os.write(stderr_descriptor(), _MESSAGE)
    os._exit(1)


_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)(_handle)  # a global: C calls it


def report_bus_errors() -> None:
    """Install a handler: on SIGBUS the process prints a message and exits with status 1."""
    ctypes.CDLL(None).signal(signal.SIGBUS, _HANDLER)  # a Python handler would run after the read, which never ends


@contextmanager
def kept_bus_error_handler() -> Iterator[None]:
    """Within the block SIGBUS is reported; afterwards it is handled as before."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    before = set_handler(signal.SIGBUS, ctypes.cast(_HANDLER, ctypes.c_void_p))
    try:
        yield
    finally:
        set_handler(signal.SIGBUS, before)
