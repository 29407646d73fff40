"""Sampling the next token of one answer, with a separate random generator.

The order is that of transformers' `generate`: penalties, a grammar's mask, then temperature, top_k, top_p and min_p.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_MIN_TEMPERATURE = 1e-6  # lower ones count as 0: divided logits would overflow float32
_MIN_LOGPROB = -9999.0  # as OpenAI does, since JSON has no -inf


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling parameters, with the names of OpenAI and vLLM."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 allows all tokens."""
    min_p: float = 0.0
    """Excludes tokens less likely than this fraction of the most likely one (Nguyen et al. 2024)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of every token in the answer so far."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time a token occurs in the answer so far."""
    repetition_penalty: float = 1.0
    """Divides positive logits and multiplies others, for tokens in prompt and answer (Keskar et al. 2019)."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of tokens by id."""
    seed: int | None = None
    """None gives a different answer each time."""
    logprobs: int | None = None
    """The number of most likely tokens to return with each token; None for no log-probabilities."""


@dataclass(frozen=True, slots=True)
class Token:
    """A sampled token."""

    id: int
    logprob: float | None = None
    """Log-probability in the model's distribution, before penalties and temperature."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens (id, logprob)."""


class GrammarError(Exception):
    """The grammar allows no next token, or takes too long."""


class LogitsError(Exception):
    """The logits are NaN or infinite, so no token is likelier than another."""


class Sampler:
    """Samples the tokens of one answer."""

    def __init__(
        self,
        options: SamplingOptions,
        prompt: list[int],
        vocabulary: int,
        matcher: Any = None,
        forced: Sequence[int] = (),
    ) -> None:
        """`vocabulary`: the number of ids; further logits are ignored. `matcher`: an LLMatcher of llguidance.

        `forced`: the first tokens, regardless of the logits. Their log-probabilities come from the model.
        """
        self._forced = deque(forced)
        self._options = options
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._prompt = torch.tensor(sorted(set(prompt)), dtype=torch.long)
        self._counts: Counter[int] = Counter()
        self._generator = torch.Generator()
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)

    def choose(self, logits: torch.Tensor) -> Token:
        """Sample the next token from float32 logits (rows,), modified in place. Raise LogitsError or GrammarError."""
        options = self._options
        logits = logits[: self._vocabulary].cpu()
        if not math.isfinite(logits.max()):
            raise LogitsError("its logits are NaN or infinite, so no token can be chosen")
        logprobs = logits.log_softmax(-1) if options.logprobs is not None else None
        if self._forced:
            return self._with_logprobs(self._forced.popleft(), logprobs)
        scores = self._apply_mask(self._apply_penalties(logits))
        token_id = int(scores.argmax()) if options.temperature < _MIN_TEMPERATURE else self._sample(scores)
        self._counts[token_id] += 1
        if self._matcher is not None:
            self._matcher.consume_token(token_id)
            self._check_grammar()
        return self._with_logprobs(token_id, logprobs)

    def _with_logprobs(self, token_id: int, logprobs: torch.Tensor | None) -> Token:
        if logprobs is None:
            return Token(token_id)
        logprobs = logprobs.clamp(min=_MIN_LOGPROB)
        best = logprobs.topk(min(self._options.logprobs or 0, len(logprobs)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Token(token_id, float(logprobs[token_id]), top)

    @property
    def is_over(self) -> bool:
        """True if the grammar allows no further token."""
        return self._matcher is not None and self._matcher.is_stopped()

    def _apply_penalties(self, logits: torch.Tensor) -> torch.Tensor:
        options = self._options
        if options.repetition_penalty != 1:
            seen_ids = torch.cat([self._prompt, torch.tensor(list(self._counts), dtype=torch.long)]).unique()
            seen_ids = seen_ids[seen_ids < len(logits)]
            values, penalty = logits[seen_ids], options.repetition_penalty
            logits[seen_ids] = torch.where(values > 0, values / penalty, values * penalty)
        if self._counts and (options.presence_penalty or options.frequency_penalty):
            counts = torch.tensor(list(self._counts.values()), dtype=torch.float32)
            logits[list(self._counts)] -= options.presence_penalty + options.frequency_penalty * counts
        for token, bias in options.logit_bias.items():
            logits[token] += bias
        return logits

    def _apply_mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits with -inf for tokens that the grammar does not allow."""
        if self._matcher is None:
            return logits
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        bitmask = allocate_token_bitmask(1, self._vocabulary)  # there may be fewer logits
        fill_next_token_bitmask(self._matcher, bitmask, 0)
        self._check_grammar()
        # llguidance's function for tensors compiles a kernel first, which takes seconds and needs a compiler.
        allowed = np.unpackbits(bitmask[0].view(np.uint8), count=len(logits), bitorder="little").astype(bool)
        return logits.masked_fill(torch.from_numpy(~allowed), -torch.inf)

    def _check_grammar(self) -> None:
        """Raise GrammarError if the matcher has failed. A failed matcher reports that the answer is complete."""
        if error := self._matcher.get_error():
            raise GrammarError(error.splitlines()[0][:300])

    def _sample(self, scores: torch.Tensor) -> int:
        options = self._options
        scores = scores / options.temperature
        if 0 < options.top_k < len(scores):
            scores = scores.masked_fill(scores < scores.topk(options.top_k).values[-1], -torch.inf)
        if options.top_p < 1:
            order = scores.sort(descending=True)
            is_beyond = (order.values.softmax(-1).cumsum(-1) >= options.top_p).roll(1)
            is_beyond[0] = False  # always keep the most likely token
            scores[order.indices[is_beyond]] = -torch.inf
        probabilities = scores.softmax(-1)
        if options.min_p > 0:
            probabilities = probabilities.masked_fill(probabilities < options.min_p * probabilities.max(), 0.0)
        return self._draw(probabilities)

    def _draw(self, probabilities: torch.Tensor) -> int:
        """Draw an id as transformers does, so that a seed gives the same text there."""
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


class FastSampler(Sampler):
    """Draws an id with one random number. torch.multinomial draws one per id: with 50,000, twenty times as long."""

    def _draw(self, probabilities: torch.Tensor) -> int:
        cumulative = probabilities.double().cumsum(-1)
        drawn = torch.rand((), dtype=torch.float64, generator=self._generator) * cumulative[-1]
        return int(torch.searchsorted(cumulative, drawn, right=True).clamp(max=len(cumulative) - 1))
