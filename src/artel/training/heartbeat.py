"""The sign that a process gets further, for the watchdog: whoever finishes a piece of work calls `heartbeat`."""

from __future__ import annotations

from collections.abc import Callable

_listener: Callable[[str], None] | None = None


def heartbeat(done: str) -> None:
    """This process got further; `done` names what it finished. Does nothing while no watchdog listens."""
    if _listener is not None:
        _listener(done)


def listen(listener: Callable[[str], None] | None) -> None:
    """Have `listener` hear every heartbeat of this process from now on; None for nobody."""
    global _listener  # one process, one loop
    _listener = listener
