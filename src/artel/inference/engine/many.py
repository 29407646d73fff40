"""Many texts by one engine: so many are written at once, and they come in the order of their prompts."""

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

_AHEAD = 2
"""Texts that are handed to the engine for each that it writes: the next one stands ready."""


@dataclass(frozen=True, slots=True)
class WrittenText:
    """What a model wrote."""

    text: str
    finish_reason: FinishReason
    tokens: int


def write_texts(
    engine: Engine,
    tokenizer: Tokenizer,
    beginnings: Sequence[GenerationPrompt],
    sampling: Sampling,
    window: int | None,
    at_once: int,
    first: int = 0,
) -> Generator[WrittenText, None, None]:
    """What a model writes at each beginning, in order, as `generate_from_ids` does.

    Beginning i is sampled with the seed `sampling.seed + first + i`. `window` is the model's longest input. Raises
    WorkError where the model fails.
    """
    events: queue.SimpleQueue[tuple[int, Token | EngineError | None]] = queue.SimpleQueue()
    running: dict[int, _Writing] = {}
    written: dict[int, WrittenText] = {}
    begun = 0

    def submit(number: int) -> None:
        writing = running[number]
        prompt, new_tokens = writing.next_part(window)
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
                while begun < len(beginnings) and len(running) < _AHEAD * at_once:
                    seed = sampling.seed + first + begun
                    running[begun] = _Writing(tokenizer, beginnings[begun], sampling, seed)
                    submit(begun)
                    begun += 1
                which, item = events.get()
                if which not in running:  # it was ended by a stop text, and the engine had chosen more
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


class _Writing:
    """A text that is being written."""

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

    def next_part(self, window: int | None) -> tuple[list[int], int]:
        """What the model is to read, and how many tokens it can then write.

        A window that is full loses its older half, as in `continue_ids`.
        """
        if window is None:
            return self._ids, self.left
        ids = self._ids if len(self._ids) <= window else self._ids[-max(1, window // 2) :]
        return ids, min(self.left, window - len(ids) + 1)
