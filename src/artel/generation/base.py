"""The interface of engines, which generate answers in their own thread, and the capacity of a machine for answers."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from artel.errors import InputError
from artel.generation.sampler import Sampler, Token
from artel.host import memory

FinishReason = Literal["stop", "length"]

BATCH_TOKENS = 512
"""Maximum tokens per forward pass. A long prompt is read in chunks, and other answers continue meanwhile."""


class EngineError(Exception):
    """The model failed on a request."""


def first_line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


class Generation:
    """One answer in progress."""

    def __init__(
        self,
        sampler: Sampler,
        new_tokens: int,
        stop: frozenset[int],
        deliver: Callable[[Token | EngineError | None], object],
    ) -> None:
        """`stop`: ids that end the answer, without being part of it.

        The engine's thread calls `deliver` with each chosen token, and at the end with None or an error.
        """
        self.name = uuid.uuid4().hex
        self.finish_reason: FinishReason = "length"
        self.sampler = sampler
        self.new_tokens = new_tokens
        self.stop = stop
        self.is_over = False
        self.end_token: Token | None = None
        """The token of `stop` that ended the answer."""
        self._count = 0
        self._deliver = deliver

    def choose(self, logits: torch.Tensor) -> int:
        """Choose and deliver the next token, from float32 logits (vocabulary,). Called in the engine's thread."""
        token = self.sampler.choose(logits)
        self._count += 1
        if token.id in self.stop:
            self.finish_reason, self.end_token = "stop", token
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

    def fail(self, message: str) -> None:
        if not self.is_over:
            self.is_over = True
            self._deliver(EngineError(message))


class Engine(ABC):
    """Generates answers with a model."""

    note: str
    """A description for people."""
    requests: int
    """Maximum number of answers computed concurrently."""

    @abstractmethod
    def submit(self, prompt: list[int], generation: Generation) -> None:
        """Start an answer. Raise EngineError if it is too long, or the engine is stopping."""

    def submit_all(self, requests: Sequence[tuple[list[int], Generation]]) -> None:
        """Start several answers. A SlotEngine batches them in the order of `requests`, whatever else it computes."""
        for prompt, generation in requests:
            self.submit(prompt, generation)

    @abstractmethod
    def cancel(self, generation: Generation) -> None:
        """Free the resources of an answer, finished or not."""

    @abstractmethod
    def close(self) -> None:
        """Finish running answers, and stop."""


# Capacity


_MEMORY_FRACTION = 0.25
"""Fraction of free memory for the keys and values of all requests."""
DEFAULT_REQUESTS = 16
"""Default number of concurrent requests."""
_MAX_REQUESTS = 64
_STEP_SECONDS = 0.5
"""Target time of a step, in which each answer gets a token."""
_CORE_FLOPS = 50e9
"""FLOP/s of a core in float32, measured with SmolLM2-135M on one core of an EPYC (benchmarks/results.md)."""


def concurrent_requests(model: PreTrainedModel) -> int:
    """Return the number of answers, 16 to 64, that get a token each in about half a second on this CPU.

    A queued answer waits for its first token, but if steps are slow, more concurrent answers would delay all of them.
    """
    flops = 2 * sum(parameter.numel() for parameter in model.parameters())
    rows = _STEP_SECONDS * _CORE_FLOPS * torch.get_num_threads() / flops
    return next((count for count in (_MAX_REQUESTS, _MAX_REQUESTS // 2) if rows >= count), DEFAULT_REQUESTS)


def key_value_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of the keys and values of a token in all layers."""
    config: Any = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * model.dtype.itemsize)


def fitting_cache_tokens(free: int, token_bytes: int) -> int:
    """Return the number of tokens whose keys and values fit in the cache, with `free` bytes of memory."""
    return int(free * _MEMORY_FRACTION / token_bytes)


def tokens_in_memory(device: torch.device, token_bytes: int, context: int) -> int:
    """Return the number of tokens whose keys and values fit in memory. Raise InputError if `context` tokens do not."""
    free = memory().free if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    fitting_tokens = fitting_cache_tokens(free, token_bytes)
    if fitting_tokens < context:
        message = f"{context:,} tokens of context need {context * token_bytes / 2**30:.1f} GiB for keys and values"
        raise InputError.at("--context", message, f"use at most {max(1, fitting_tokens)}")
    return fitting_tokens
