"""An engine writes answers token by token: what each of them is, and what one answer is for it.

The engine runs the model in a thread of its own, and delivers what it writes token by token.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch

from artel.models.sampler import Sampler, Token

FinishReason = Literal["stop", "length"]

BATCH_TOKENS = 512
"""Tokens of a forward pass at most: a long prompt is read in parts, so that other answers go on meanwhile."""


class EngineError(Exception):
    """The model failed on a request."""


def reason(error: Exception) -> str:
    """Why something failed, in one line."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


Deliver = Callable[[Token | EngineError | None], object]


class Generation:
    """One answer that is being written."""

    def __init__(self, sampler: Sampler, new_tokens: int, stop: frozenset[int], deliver: Deliver) -> None:
        """`stop`: ids that end the answer, which are not among its tokens.

        `deliver` gets each token as it is chosen, and then None, or what the model failed with; it is called in the
        engine's thread.
        """
        self.name = uuid.uuid4().hex
        self.finish_reason: FinishReason = "length"
        self.sampler = sampler
        self.new_tokens = new_tokens
        self.stop = stop
        self.is_over = False
        self._count = 0
        self._deliver = deliver

    def choose(self, logits: torch.Tensor) -> int:
        """The next token by float32 logits (rows,); called in the engine's thread, which hands it on."""
        token = self.sampler.choose(logits)
        self._count += 1
        if token.id in self.stop:
            self.finish_reason = "stop"
            self.end()
            return token.id
        self._deliver(token)
        if self.sampler.is_over:
            self.finish_reason = "stop"
            self.end()
        elif self._count == self.new_tokens:
            self.end()
        return token.id

    def end(self) -> None:
        if not self.is_over:
            self.is_over = True
            self._deliver(None)

    def fail(self, why: str) -> None:
        if not self.is_over:
            self.is_over = True
            self._deliver(EngineError(why))


class Engine(ABC):
    """A model that answers requests."""

    note: str
    """How it runs them, for people."""
    requests: int
    """How many are computed at once at most; who waits is counted beside them."""

    @abstractmethod
    def submit(self, prompt: list[int], generation: Generation) -> None:
        """Begin an answer. Raises EngineError."""

    @abstractmethod
    def cancel(self, generation: Generation) -> None:
        """Free the place of an answer, whether it is over or not."""

    @abstractmethod
    def close(self) -> None:
        """Answer what has begun, and end."""
