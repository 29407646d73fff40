"""Progress messages while text is prepared or hosts are awaited: one every ten seconds, also in a long call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context

from artel.elapsed import hide_elapsed
from artel.messages import logger

_INTERVAL_SECONDS = 10


class Progress:
    """Reports the progress of a stage, at most every `seconds`."""

    def __init__(self, description: str, seconds: float = _INTERVAL_SECONDS) -> None:
        self._description, self._seconds = description, seconds
        self._next = time.monotonic() + seconds

    def __call__(self, num_done: int, num_tasks: int) -> None:
        if time.monotonic() > self._next:
            logger.info("%s: %s of %s parts", self._description, f"{num_done:,}", f"{num_tasks:,}")
            self._next = time.monotonic() + self._seconds


@contextmanager
def reporting(describe: Callable[[], str], seconds: float = _INTERVAL_SECONDS) -> Iterator[None]:
    """Log `describe()` and the elapsed time every `seconds` inside the block.

    The block must not fork, because a thread writes the messages.
    """
    done = threading.Event()
    start = time.monotonic()

    def report() -> None:
        if done.wait(seconds):
            return
        with hide_elapsed():  # from now on these lines show the seconds
            while True:
                logger.info("%s (%s s)", describe(), f"{time.monotonic() - start:,.0f}")
                if done.wait(seconds):
                    return

    thread = threading.Thread(target=copy_context().run, args=(report,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
