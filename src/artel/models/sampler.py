"""The next token of one answer: penalties, masks and sampling on a row of logits, with a random state of its own.

The order is that of transformers' `generate`: penalties, then temperature, top_k, top_p and min_p.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

_MIN_TEMPERATURE = 1e-6  # below it counts as 0: logits divided by less leave the range of float32

_LEAST_LOGPROB = -9999.0  # JSON has no -inf; OpenAI writes this


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the tokens of an answer are sampled, by OpenAI's names; those of vLLM beyond them."""

    temperature: float = 1.0
    """0 takes the likeliest."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest are left out (Nguyen et al. 2024)."""
    presence_penalty: float = 0.0
    """Taken from the logits of each token of the answer so far."""
    frequency_penalty: float = 0.0
    """Taken as often as a token stands in the answer so far."""
    repetition_penalty: float = 1.0
    """Of tokens of prompt and answer: positive logits are divided by it, others multiplied (Keskar et al. 2019)."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of tokens by id."""
    seed: int | None = None
    """None: another answer each time."""
    logprobs: int | None = None
    """How many of the likeliest tokens are given beside each; None for no logarithms at all."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token that was chosen."""

    id: int
    logprob: float | None = None
    """Of the model's own distribution, before penalties and temperature."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens (id, logprob)."""


class GrammarFailed(Exception):
    """The grammar that an answer must fit allows no next token, or takes too much work."""


class BrokenLogits(Exception):
    """The logits are NaN or infinite, so no token is likelier than another."""


class Sampler:
    """Chooses the tokens of one answer."""

    def __init__(
        self,
        options: SamplingOptions,
        prompt: list[int],
        vocabulary: int,
        matcher: Any = None,
        forced: Sequence[int] = (),
    ) -> None:
        """`vocabulary`: rows of logits beyond it stand for no token. `matcher`: an LLMatcher of llguidance over it.

        `forced`: the first tokens, whatever the logits are; their logarithms are those of the model.
        """
        self._forced = deque(forced)
        self._options = options
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._prompt = torch.tensor(sorted(set(prompt)), dtype=torch.long)
        self._written: Counter[int] = Counter()
        self._generator = torch.Generator()
        if options.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(options.seed)

    def choose(self, logits: torch.Tensor) -> Token:
        """The next token by float32 logits (rows,), which are changed. Raises BrokenLogits, GrammarFailed."""
        options = self._options
        logits = logits[: self._vocabulary].cpu()
        if not math.isfinite(logits.max()):
            raise BrokenLogits("its logits are NaN or infinite, so no token is likelier than another")
        own = logits.log_softmax(-1) if options.logprobs is not None else None
        if self._forced:
            return self._with_logprobs(self._forced.popleft(), own)
        scores = self._masked(self._penalized(logits))
        chosen = int(scores.argmax()) if options.temperature < _MIN_TEMPERATURE else self._sampled(scores)
        self._written[chosen] += 1
        if self._matcher is not None:
            self._matcher.consume_token(chosen)
            self._check_grammar()
        return self._with_logprobs(chosen, own)

    def _with_logprobs(self, chosen: int, own: torch.Tensor | None) -> Token:
        if own is None:
            return Token(chosen)
        own = own.clamp(min=_LEAST_LOGPROB)
        best = own.topk(min(self._options.logprobs or 0, len(own)))
        return Token(chosen, float(own[chosen]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))

    @property
    def is_over(self) -> bool:
        """Whether the grammar allows nothing more."""
        return self._matcher is not None and self._matcher.is_stopped()

    def _penalized(self, logits: torch.Tensor) -> torch.Tensor:
        options = self._options
        if options.repetition_penalty != 1:
            seen = torch.cat([self._prompt, torch.tensor(list(self._written), dtype=torch.long)]).unique()
            seen = seen[seen < len(logits)]
            values, penalty = logits[seen], options.repetition_penalty
            logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
        if self._written and (options.presence_penalty or options.frequency_penalty):
            counts = torch.tensor(list(self._written.values()), dtype=torch.float32)
            logits[list(self._written)] -= options.presence_penalty + options.frequency_penalty * counts
        for token, bias in options.logit_bias.items():
            logits[token] += bias
        return logits

    def _masked(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits with -inf for what the grammar does not allow."""
        if self._matcher is None:
            return logits
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        words = allocate_token_bitmask(1, self._vocabulary)  # there may be fewer logits
        fill_next_token_bitmask(self._matcher, words, 0)
        self._check_grammar()
        # Its own function for tensors compiles a kernel at first: seconds, and it needs a compiler.
        allowed = np.unpackbits(words[0].view(np.uint8), count=len(logits), bitorder="little").astype(bool)
        return logits.masked_fill(torch.from_numpy(~allowed), -torch.inf)

    def _check_grammar(self) -> None:
        """Raise GrammarFailed if the matcher has failed: it then says that the answer is complete."""
        if error := self._matcher.get_error():
            raise GrammarFailed(error.splitlines()[0][:300])

    def _sampled(self, scores: torch.Tensor) -> int:
        options = self._options
        scores = scores / options.temperature
        if 0 < options.top_k < len(scores):
            scores = scores.masked_fill(scores < scores.topk(options.top_k).values[-1], -torch.inf)
        if options.top_p < 1:
            order = scores.sort(descending=True)
            is_beyond = (order.values.softmax(-1).cumsum(-1) >= options.top_p).roll(1)
            is_beyond[0] = False  # the likeliest always stays
            scores[order.indices[is_beyond]] = -torch.inf
        shares = scores.softmax(-1)
        if options.min_p > 0:
            shares = shares.masked_fill(shares < options.min_p * shares.max(), 0.0)
        return int(torch.multinomial(shares, 1, generator=self._generator))
