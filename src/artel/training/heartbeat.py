"""Signals progress to the watchdog, and to probes outside: code that finishes a step of its work calls `heartbeat`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

HEARTBEAT_VARIABLE = "ARTEL_HEARTBEAT"
"""Variable with the path of the file that `heartbeat_file` returns."""

_listener: Callable[[str], None] | None = None


def heartbeat(finished: str) -> None:
    """Report that this process has finished something. Does nothing if no watchdog listens."""
    if _listener is not None:
        _listener(finished)


def listen(listener: Callable[[str], None] | None) -> None:
    """Set the listener for the heartbeats of this process. None removes it."""
    global _listener  # one process, one loop
    _listener = listener


def heartbeat_file() -> Path | None:
    """Return the file whose time of change tells a probe of the last progress. Only one process of a host has it.

    It exists while the loop runs: without it a probe must take the process for healthy.
    """
    path = os.environ.get(HEARTBEAT_VARIABLE)
    return Path(path) if path and os.environ.get("LOCAL_RANK", "0") == "0" else None


def heartbeat_test(path: str, minutes: int) -> str:
    """Return a shell command for a probe: it fails if the file at `path` has not changed for `minutes`."""
    return f"test ! -e {path} || find {path} -mmin -{minutes} | grep -q ."
