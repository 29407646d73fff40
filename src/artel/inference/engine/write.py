"""Text from an engine: one answer as it is generated, or many, in the order of their prompts."""

from __future__ import annotations

import queue
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from artel.errors import WorkError
from artel.inference.engine.base import Engine, EngineError, FinishReason, Generation
from artel.models.generate import Sampling
from artel.models.sampler import Sampler, Token
from artel.models.text_stream import TextStream
from artel.objectives.types import GenerationPrompt
from artel.tokens import Tokenizer


def write_text(
    engine: Engine, tokenizer: Tokenizer, begin: GenerationPrompt, sampling: Sampling
) -> Generator[str, None, FinishReason]:
    """Yield the text that a model generates, in chunks. Raise EngineError. Closing the generator cancels it."""
    items: queue.SimpleQueue[Token | EngineError | None] = queue.SimpleQueue()
    sampler = Sampler(sampling.options, begin.ids, tokenizer.vocabulary)
    generation = Generation(sampler, sampling.new_tokens, begin.end.ids, items.put)
    stream = TextStream(tokenizer, begin.ids, begin.end.texts, special_tokens=begin.special_tokens)
    try:
        engine.submit(begin.ids, generation)
        while (item := items.get()) is not None:
            if isinstance(item, EngineError):
                raise item
            piece = stream.add(item.id)
            if piece.text:
                yield piece.text
            if piece.stopped:
                return "stop"
        if rest := stream.rest():
            yield rest
        return generation.finish_reason
    finally:
        engine.cancel(generation)


_SUBMITTED = 2
"""Texts submitted per text in progress, so that the next one is ready."""


@dataclass(frozen=True, slots=True)
class WrittenText:
    """A generated text."""

    text: str
    finish_reason: FinishReason
    tokens: int


def write_texts(
    engine: Engine,
    tokenizer: Tokenizer,
    beginnings: Sequence[GenerationPrompt],
    sampling: Sampling,
    window: int | None,
    concurrent: int,
    first: int = 0,
) -> Generator[WrittenText, None, None]:
    """Yield the text that a model generates for each prompt, in order, equal to that of `generate_from_ids`.

    Prompt i is sampled with the seed `sampling.seed + first + i`. `window` is the model's longest input. Raise
    WorkError if the model fails.
    """
    events: queue.SimpleQueue[tuple[int, Token | EngineError | None]] = queue.SimpleQueue()
    running: dict[int, _Text] = {}
    written: dict[int, WrittenText] = {}
    begun = 0

    def submit(number: int) -> None:
        writing = running[number]
        prompt, new_tokens = writing.next_input(window)
        writing.generation = Generation(
            writing.sampler, new_tokens, writing.beginning.end.ids, lambda item: events.put((number, item))
        )
        engine.submit(prompt, writing.generation)

    def finish(number: int, reason: FinishReason) -> None:
        writing = running.pop(number)
        engine.cancel(writing.generation)
        text = writing.text if writing.is_stopped else writing.text + writing.stream.rest()
        written[number] = WrittenText(text, reason, writing.tokens)

    try:
        for number in range(len(beginnings)):
            while number not in written:
                while begun < len(beginnings) and len(running) < _SUBMITTED * concurrent:
                    seed = sampling.seed + first + begun
                    running[begun] = _Text(tokenizer, beginnings[begun], sampling, seed)
                    submit(begun)
                    begun += 1
                which, item = events.get()
                if which not in running:  # a stop text ended it after the engine chose more tokens
                    continue
                writing = running[which]
                if isinstance(item, EngineError):
                    raise item
                if item is not None:
                    writing.add(item)
                    if writing.is_stopped:
                        finish(which, "stop")
                elif writing.generation.finish_reason == "length" and writing.left:
                    engine.cancel(writing.generation)
                    submit(which)  # the window is full
                else:
                    finish(which, writing.generation.finish_reason)
            yield written.pop(number)
    except EngineError as error:
        raise WorkError.at("the model", f"failed on a prompt: {error}") from None
    finally:
        for writing in running.values():
            engine.cancel(writing.generation)


class _Text:
    """A text in progress."""

    generation: Generation

    def __init__(self, tokenizer: Tokenizer, beginning: GenerationPrompt, sampling: Sampling, seed: int) -> None:
        self.beginning = beginning
        options = replace(sampling, seed=seed).options
        self.sampler = Sampler(options, beginning.ids, tokenizer.vocabulary)
        self.stream = TextStream(tokenizer, beginning.ids, beginning.end.texts, special_tokens=beginning.special_tokens)
        self.text = ""
        self.tokens = 0
        self.left = sampling.new_tokens
        self.is_stopped = False
        self._ids = list(beginning.ids)

    def add(self, token: Token) -> None:
        piece = self.stream.add(token.id)
        self.text += piece.text
        self.is_stopped = piece.stopped
        self._ids.append(token.id)
        self.tokens += 1
        self.left -= 1

    def next_input(self, window: int | None) -> tuple[list[int], int]:
        """Return the model's next input, and the number of tokens to generate from it.

        A full window loses its older half, as in `continue_ids`.
        """
        if window is None:
            return self._ids, self.left
        ids = self._ids if len(self._ids) <= window else self._ids[-max(1, window // 2) :]
        return ids, min(self.left, window - len(ids) + 1)
