"""On a terminal: what a command is busy with, and for how many seconds, while it prints nothing else.

The line is written over once a second and gone before the next output. `tell` (cli/streams.py) names the work. What
draws a bar of its own, or waits for a person, does so within `paused`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CLEAR = "\r\x1b[K"
_lock = threading.RLock()
_work, _since = "starting", 0.0
_pauses, _is_shown = 0, False
_is_within_line = False
"""True after output without a line break, such as an answer that is being written."""


def show_elapsed() -> None:
    """Show the line in this process from now on, if standard error is a terminal. For the command line only."""
    global _since
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0" and os.environ.get("TERM") != "dumb":
        _since = time.monotonic()
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=_draw_each_second, name="elapsed time", daemon=True).start()


@contextmanager
def printing(work: str = "", *, ends_line: bool = True) -> Iterator[None]:
    """Remove the line and print inside the block. `work` names what starts now; "": the work stays the same."""
    global _work, _since, _is_within_line
    with _lock:
        _clear()
        yield
        _work, _since, _is_within_line = work or _work, time.monotonic(), not ends_line


@contextmanager
def paused() -> Iterator[None]:
    """Show nothing within the block."""
    pause()
    try:
        yield
    finally:
        resume()


def pause() -> None:
    """Show nothing until `resume` was called as often as this."""
    global _pauses
    with _lock:
        _clear()
        _pauses += 1


def resume() -> None:
    """End a pause."""
    global _pauses, _since
    with _lock:
        _pauses, _since = _pauses - 1, time.monotonic()


def _clear() -> None:
    global _is_shown
    if _is_shown:
        _write(_CLEAR)
        _is_shown = False


def _draw_each_second() -> None:
    global _is_shown
    while True:
        time.sleep(1)
        with _lock:
            seconds = time.monotonic() - _since
            if not _pauses and not _is_within_line and seconds >= 1 and (columns := _columns()):
                count = f" ({seconds:,.0f} s)"
                _write(f"{_CLEAR}{_work[: max(0, columns - len(count) - 1)]}{count}")
                _is_shown = True


def _columns() -> int:
    """Width of the terminal; 0 while standard error leads elsewhere (`storage/panics.py`)."""
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 0


def _forget() -> None:
    """In a forked child, which has no thread that draws: the parent's may have held the lock."""
    global _lock, _is_shown
    _lock, _is_shown = threading.RLock(), False


def _write(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
