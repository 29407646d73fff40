"""Progress while text is prepared or hosts are awaited: a line every ten seconds, also during one long call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from artel.elapsed import paused

Tell = Callable[[str], None]

_SECONDS = 10


class Progress:
    """Reports the progress of a stage, at most every `seconds`."""

    def __init__(self, tell: Tell, what: str, seconds: float = _SECONDS) -> None:
        self._tell, self._what, self._seconds = tell, what, seconds
        self._next = time.monotonic() + seconds

    def __call__(self, done: int, count: int) -> None:
        if time.monotonic() > self._next:
            self._tell(f"{self._what}: {done:,} of {count:,} parts")
            self._next = time.monotonic() + self._seconds


@contextmanager
def reporting(tell: Tell, what: Callable[[], str], seconds: float = _SECONDS) -> Iterator[None]:
    """Report `what` and the elapsed time every `seconds` inside the block.

    The block must not fork, because a thread reports.
    """
    done = threading.Event()
    start = time.monotonic()

    def report() -> None:
        if done.wait(seconds):
            return
        with paused():  # from now on these lines show the seconds
            while True:
                tell(f"{what()} ({time.monotonic() - start:,.0f} s)")
                if done.wait(seconds):
                    return

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
