"""Signals progress to the watchdog: code that finishes a step of its work calls `heartbeat`."""

from __future__ import annotations

from collections.abc import Callable

_listener: Callable[[str], None] | None = None


def heartbeat(finished: str) -> None:
    """Report that this process has finished something. Does nothing if no watchdog listens."""
    if _listener is not None:
        _listener(finished)


def listen(listener: Callable[[str], None] | None) -> None:
    """Set the listener for the heartbeats of this process. None removes it."""
    global _listener  # one process, one loop
    _listener = listener
