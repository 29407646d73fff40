"""Panics of libraries in Rust: they come as exceptions, and Rust prints them as well, before anyone can catch them."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_lock = threading.Lock()
_depth = 0
_screen, _kept = -1, -1
"""Standard error while the block runs, and what takes its place."""
_PANIC = re.compile(rb"\n?thread '[^\n]*' (\(\d+\) )?panicked at .*", re.DOTALL)


@contextmanager
def unprinted_panics() -> Iterator[None]:
    """Standard error of the block is held back until its end, and then written without the panics.

    For short blocks, and for processes that say nothing of their own: what is held back is lost when one is killed.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def screen() -> int:
    """The file that standard error is, also within such a block."""
    return 2 if _screen < 0 else _screen


def _enter() -> None:
    global _depth, _screen, _kept
    with _lock:
        _depth += 1
        if _depth > 1 or not hasattr(os, "memfd_create"):
            return
        with suppress(OSError):  # no more files may be opened: panics are then printed
            _kept = os.memfd_create("standard error")
            try:
                _screen = os.dup(2)
            except OSError:  # standard error is closed
                os.close(_kept)
                return
            os.dup2(_kept, 2)


def _leave() -> None:
    global _depth, _screen, _kept
    with _lock:
        _depth -= 1
        if _depth or _screen < 0:
            return
        os.dup2(_screen, 2)
        os.close(_screen)
        with open(_kept, "rb") as file:
            file.seek(0)
            written = _PANIC.sub(b"", file.read())
        _screen = _kept = -1
    if written:
        with open(2, "wb", closefd=False) as error:
            error.write(written)
