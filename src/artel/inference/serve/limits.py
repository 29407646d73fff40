"""Limits on requests: how many are admitted, and how long each may take."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from artel.inference.serve.api_errors import ApiError


class AdmissionLimit:
    """Admits a bounded number of answers: `running` at a time, plus `queued` waiting."""

    def __init__(self, running: int, queued: int) -> None:
        self._capacity = running + queued
        self.admitted = 0

    @contextmanager
    def admit(self, count: int = 1) -> Iterator[None]:
        """Hold `count` slots inside the block. Raise ApiError (400 or 429) if they are not available."""
        if count > self._capacity:
            reason = f"this request needs {count} answers, but this server accepts at most {self._capacity} per request"
            raise ApiError(400, reason, "n")
        if self.admitted + count > self._capacity:
            raise ApiError(
                429, f"server busy: {self.admitted} answers are running or queued; try again", code="server_busy"
            )
        self.admitted += count
        try:
            yield
        finally:
            self.admitted -= count


class Deadline:
    """The time by which a request must be answered. Leaving the context cancels it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def __enter__(self) -> Deadline:
        return self

    def __exit__(self, *error: object) -> None:
        self._end = -math.inf

    def expired(self) -> bool:
        """True if the deadline has passed, or the context was left."""
        return time.monotonic() >= self._end

    def check(self) -> None:
        """Raise ApiError 504 if the deadline has passed."""
        if self.expired():
            raise timeout_error(self._seconds)

    @contextmanager
    def enforce_on(self, model: PreTrainedModel) -> Iterator[None]:
        """Check the deadline before every forward pass of `model` inside the block."""
        hook = model.get_input_embeddings().register_forward_pre_hook(lambda *_: self.check())
        try:
            yield
        finally:
            hook.remove()


def timeout_error(seconds: float) -> ApiError:
    """Return the error for a request that has no answer after `seconds`."""
    return ApiError(504, f"no answer after {seconds:g} s: send less text, or try again later", code="timeout")
