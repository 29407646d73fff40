"""How long a request is worked on: until its time is over, or nobody waits for it any more."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from artel.inference.serve.errors import ApiError


class Patience:
    """How long somebody waits for an answer: so many seconds from now, and at most until the context ends."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    def __enter__(self) -> Patience:
        return self

    def __exit__(self, *error: object) -> None:
        self._until = -math.inf

    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    def check(self) -> None:
        """Raise ApiError where it is over."""
        if self.is_over():
            raise out_of_time(self._seconds)

    @contextmanager
    def stopping(self, model: PreTrainedModel) -> Iterator[None]:
        """Within the block no forward pass of the model begins when it is over: it raises ApiError."""

        hook = model.get_input_embeddings().register_forward_pre_hook(lambda *_: self.check())
        try:
            yield
        finally:
            hook.remove()


def out_of_time(seconds: float) -> ApiError:
    """The error for a request that has no answer after so long."""
    return ApiError(504, f"there is no answer after {seconds:g} s: send less text, or try again later", code="timeout")
