"""Signs of life while text is prepared: a line now and then, also from work that is one long call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str], None]

_SECONDS_BETWEEN_NEWS = 10


class News:
    """How far a stage is, told now and then."""

    def __init__(self, tell: Tell, what: str, seconds: float = _SECONDS_BETWEEN_NEWS) -> None:
        self._tell, self._what, self._seconds = tell, what, seconds
        self._next = time.monotonic() + seconds

    def __call__(self, done: int, count: int) -> None:
        if time.monotonic() > self._next:
            self._tell(f"{self._what}: {done:,} of {count:,} parts")
            self._next = time.monotonic() + self._seconds


@contextmanager
def still(tell: Tell, what: Callable[[], str], seconds: float = _SECONDS_BETWEEN_NEWS) -> Iterator[None]:
    """Tell `what` every `seconds` until the work inside is done, which must not fork: the teller is a thread."""
    done = threading.Event()
    start = time.monotonic()

    def tell_on() -> None:
        while not done.wait(seconds):
            tell(f"{what()} ({time.monotonic() - start:,.0f} s)")

    teller = threading.Thread(target=tell_on, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
