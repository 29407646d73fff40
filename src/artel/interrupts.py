"""Ctrl-C at moments when it must wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def in_main_thread() -> bool:
    """Whether this is the thread in which signals are handled; no other may set a handler."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def interrupted_after() -> Iterator[None]:
    """Ctrl-C that comes during the block takes effect at its end.

    The signal is handled, not masked: a process of several threads gets it by any that does not mask it.
    """
    if not in_main_thread():  # only there an interrupt is raised
        yield
        return
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if interrupts:
            signal.raise_signal(signal.SIGINT)
