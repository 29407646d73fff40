"""A status line on the terminal: the current work and its seconds, while nothing else is printed.

The line is redrawn every second and removed before the next output. `print_status` (cli/streams.py) sets the work.
Code that draws its own progress bar or waits for input does so inside `hide_elapsed`.
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
_work = "starting"
_start_time = 0.0
_pause_count = 0
_is_shown = False
_is_within_line = False
"""True after output without a line break, such as a partial answer."""


def show_elapsed() -> None:
    """Start drawing the line, if standard error is a terminal. For the command line only."""
    global _start_time
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0" and os.environ.get("TERM") != "dumb":
        _start_time = time.monotonic()
        os.register_at_fork(after_in_child=_reset_in_child)
        threading.Thread(target=_draw_each_second, name="elapsed time", daemon=True).start()


@contextmanager
def printing(work: str = "", *, ends_line: bool = True) -> Iterator[None]:
    """Remove the line and print inside the block. `work`: the work that starts now; "" keeps the current one."""
    global _work, _start_time, _is_within_line
    with _lock:
        _clear()
        yield
        _work = work or _work
        _start_time = time.monotonic()
        _is_within_line = not ends_line


@contextmanager
def hide_elapsed() -> Iterator[None]:
    """Hide the line inside the block."""
    pause_elapsed()
    try:
        yield
    finally:
        resume_elapsed()


def pause_elapsed() -> None:
    """Hide the line until `resume_elapsed` has been called as often as this function."""
    global _pause_count
    with _lock:
        _clear()
        _pause_count += 1


def resume_elapsed() -> None:
    """End a pause."""
    global _pause_count, _start_time
    with _lock:
        _pause_count -= 1
        _start_time = time.monotonic()


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
            seconds = time.monotonic() - _start_time
            if not _pause_count and not _is_within_line and seconds >= 1 and (width := _terminal_width()):
                suffix = f" ({seconds:,.0f} s)"
                _write(f"{_CLEAR}{_work[: max(0, width - len(suffix) - 1)]}{suffix}")
                _is_shown = True


def _terminal_width() -> int:
    """Return the width of the terminal, or 0 while standard error is redirected (`storage/panics.py`)."""
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 0


def _reset_in_child() -> None:
    """Reset the state in a forked child. It has no drawing thread, and the parent's may have held the lock."""
    global _lock, _is_shown
    _lock = threading.RLock()
    _is_shown = False


def _write(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
