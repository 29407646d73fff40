"""Hide panics of Rust libraries. They become exceptions, but Rust prints them before anyone can catch them."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_lock = threading.Lock()
_depth = 0
_stderr, _buffer = -1, -1
"""Descriptors: standard error while the block runs, and the file that replaces it."""
_PANIC = re.compile(rb"\n?thread '[^\n]*' (\(\d+\) )?panicked at .*", re.DOTALL)


@contextmanager
def hide_panics() -> Iterator[None]:
    """Hide panics until the end of the block: standard error is buffered, so a killed process loses what it printed."""
    _redirect_stderr()
    try:
        yield
    finally:
        _restore_stderr()


def stderr_descriptor() -> int:
    """Return the descriptor of standard error, also inside `hide_panics`."""
    return 2 if _stderr < 0 else _stderr


def _redirect_stderr() -> None:
    global _depth, _stderr, _buffer
    with _lock:
        _depth += 1
        if _depth > 1 or not hasattr(os, "memfd_create"):
            return
        with suppress(OSError):  # too many open files: panics are then printed
            _buffer = os.memfd_create("standard error")
            try:
                _stderr = os.dup(2)
            except OSError:  # standard error is closed
                os.close(_buffer)
                return
            os.dup2(_buffer, 2)


def _restore_stderr() -> None:
    global _depth, _stderr, _buffer
    with _lock:
        _depth -= 1
        if _depth or _stderr < 0:
            return
        os.dup2(_stderr, 2)
        os.close(_stderr)
        with open(_buffer, "rb") as file:
            file.seek(0)
            output = _PANIC.sub(b"", file.read())
        _stderr = _buffer = -1
    if output:
        with open(2, "wb", closefd=False) as stderr:
            stderr.write(output)
