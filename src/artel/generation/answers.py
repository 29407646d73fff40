"""Sample several answers to each prompt, with the log-probability of every token, for learning from rewards.

Each answer has its own generator, so its tokens depend on its seed, the weights and its prompt, not on other
concurrent answers.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from artel.errors import WorkError
from artel.generation import GenerationPrompt
from artel.generation.base import EngineError, Generation
from artel.generation.generate import Sampling
from artel.generation.make import SequentialEngine, make_engine
from artel.generation.sampler import FastSampler, Token
from artel.generation.text_stream import TextStream
from artel.models.loading.structure import position_limit
from artel.tokens import Tokenizer

CONCURRENT_ANSWERS = 64
"""Number of concurrent answers. Fixed: with another number, matrix products would round differently, and a round
that is written again after a kill would differ in the last bits."""


@dataclass(slots=True)
class SampledAnswer:
    """An answer sampled from a model."""

    ids: list[int] = field(default_factory=list)
    """Token ids, including the end token if the model wrote one."""
    log_probs: list[float] = field(default_factory=list)
    """Log-probability of each id in nats, at the sampling temperature, before top_k, top_p and min_p."""
    text: str = ""
    """Without the end token or stop text."""
    cut_off: bool = False
    """True if it reached the maximum length."""


def sample_answers(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[GenerationPrompt],
    seeds: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    limits: Sequence[int] | None = None,
    together: bool = True,
    on_progress: Callable[[float], None] = lambda _: None,
) -> list[list[SampledAnswer]]:
    """Return one answer to prompt i for each of `seeds[i]`, sampled with that seed.

    `limits`: maximum length of the answers to each prompt; default: `sampling.new_tokens`.
    `together`: False computes one answer after another, for a model whose weights are gathered from other ranks.
    `on_progress` is called with the fraction of finished answers.

    Raise WorkError if the model fails, InputError if the answers do not fit into memory.
    """
    limits = [sampling.new_tokens] * len(prompts) if limits is None else limits
    generations = [
        _AnswerGeneration(tokenizer, prompt, replace(sampling, seed=seed, new_tokens=limit))
        for prompt, prompt_seeds, limit in zip(prompts, seeds, limits, strict=True)
        for seed in prompt_seeds
    ]
    if not generations:
        return [[] for _ in prompts]
    events: queue.SimpleQueue[EngineError | None] = queue.SimpleQueue()
    for generation in generations:
        generation.events = events
    context = max(len(prompt.ids) + limit for prompt, limit in zip(prompts, limits, strict=True))
    was_training = model.training
    try:
        if together:
            engine = make_engine(model, tokenizer, CONCURRENT_ANSWERS, min(context, position_limit(model) or context))
        else:
            engine = SequentialEngine(model.eval(), tokenizer, "")
        with closing(engine):
            try:
                engine.submit_all([(generation.prompt.ids, generation) for generation in generations])
                for finished in range(len(generations)):
                    error = events.get()
                    if error is not None:
                        raise error
                    on_progress((finished + 1) / len(generations))
            finally:
                for generation in generations:
                    engine.cancel(generation)
    except EngineError as error:
        raise WorkError.at("the model", f"failed on a prompt: {error}") from None
    finally:
        model.train(was_training)
    answers = iter(generation.answer for generation in generations)
    return [[next(answers) for _ in prompt_seeds] for prompt_seeds in seeds]


class AnswerBuilder:
    """Builds an answer token by token: its text, and its end."""

    def __init__(self, tokenizer: Tokenizer, prompt: GenerationPrompt, new_tokens: int) -> None:
        self.answer = SampledAnswer()
        self._end_ids, self._new_tokens = prompt.end.ids, new_tokens
        self._stream = TextStream(tokenizer, prompt.ids, prompt.end.texts, special_tokens=prompt.special_tokens)

    def add(self, token_id: int, log_prob: float) -> bool:
        """Add a token. Return True if it ends the answer."""
        answer = self.answer
        answer.ids.append(token_id)
        answer.log_probs.append(log_prob)
        has_ended = token_id in self._end_ids
        if not has_ended:
            chunk = self._stream.add(token_id)
            answer.text += chunk.text
            if chunk.stopped:  # by a stop text, which the stream omits
                return True
            if len(answer.ids) < self._new_tokens:
                return False
        self.finish(cut_off=not has_ended)
        return True

    def finish(self, *, cut_off: bool) -> None:
        """End the answer. `cut_off`: False if the model has ended it."""
        self.answer.cut_off = cut_off
        self.answer.text += self._stream.flush()


class _AnswerGeneration(Generation):
    """An answer in progress, with its ids and their log-probabilities."""

    events: queue.SimpleQueue[EngineError | None]

    def __init__(self, tokenizer: Tokenizer, prompt: GenerationPrompt, sampling: Sampling) -> None:
        sampler = FastSampler(sampling.options, prompt.ids, tokenizer.vocabulary)
        super().__init__(sampler, sampling.new_tokens, prompt.end.ids, self._on_event)
        self.prompt = prompt
        self._temperature = sampling.temperature or 1.0
        self._builder = AnswerBuilder(tokenizer, prompt, sampling.new_tokens)

    @property
    def answer(self) -> SampledAnswer:
        return self._builder.answer

    def choose(self, logits: torch.Tensor) -> int:
        log_probs = (logits / self._temperature).log_softmax(-1)  # before the sampler changes the logits
        token_id = self.sampler.choose(logits).id
        if self._builder.add(token_id, float(log_probs[token_id])):
            self.end()
        return token_id

    def _on_event(self, event: Token | EngineError | None) -> None:
        assert not isinstance(event, Token)
        self.events.put(event)
