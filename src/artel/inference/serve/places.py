"""Places for answers: so many are computed at once, so many wait, and who comes then is told to come again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from artel.inference.serve.errors import ApiError


class Places:
    """Counts the answers that are computed or wait."""

    def __init__(self, requests: int, queue: int) -> None:
        """`requests` are computed at once, `queue` wait at most."""
        self._most = requests + queue
        self.taken = 0

    @contextmanager
    def take(self, count: int = 1) -> Iterator[None]:
        """Within the block `count` places are taken. Raises ApiError where there are not as many."""
        if count > self._most:
            raise ApiError(400, f"{count} answers are asked for, and the server takes {self._most} at most", "n")
        if self.taken + count > self._most:
            raise ApiError(429, f"{self.taken} answers are being written or wait; try again", code="server_busy")
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count
