"""Waiting for what other processes and threads do: for a condition, never for a fixed time."""

import os
import select
import time
from collections.abc import Callable, Iterable
from pathlib import Path

LIMIT = 400.0
"""Seconds after which a wait fails: starting Python with torch takes 20 s on a busy machine, a test may take 600 s."""


def wait_until(
    condition: Callable[[], object], missing: Callable[[], object] = lambda: "", *, every: float = 0.005
) -> None:
    """Check `condition` again and again until it is true. After LIMIT seconds, fail with what `missing` returns."""
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"not true after {LIMIT:.0f} s: {missing()}"
        time.sleep(every)


def last(seconds: float) -> None:
    """Last so long: for what a test is about (a stopped process, a cut cable, a slow step), not to wait for something.

    What is proved must hold however much longer it takes.
    """
    time.sleep(seconds)


def wait_until_gone(processes: Iterable[int]) -> None:
    """Wait until none of these process ids exists."""
    left = [Path(f"/proc/{number}") for number in processes]
    wait_until(lambda: not any(path.exists() for path in left), lambda: left)


class Screen:
    """What comes out of a pseudo-terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.text = ""

    def read_until(self, done: Callable[[str], object], silence: float = LIMIT) -> None:
        """Read until `done` is true of the text. Fails if nothing more comes for `silence` seconds."""
        while not done(self.text):
            if not select.select([self._descriptor], [], [], silence)[0]:
                raise AssertionError(f"nothing more came for {silence:.0f} s after {self.text[-2000:]!r}")
            try:
                self.text += os.read(self._descriptor, 65536).decode(errors="replace")
            except OSError:  # the other side is closed
                raise AssertionError(f"the terminal was closed after {self.text[-2000:]!r}") from None
