"""Reads text from an engine: one answer as it is generated, or many answers in the order of their prompts."""

from __future__ import annotations

import queue
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from artel.errors import WorkError
from artel.generation import GenerationPrompt
from artel.generation.base import Engine, EngineError, FinishReason, Generation
from artel.generation.generate import Sampling
from artel.generation.sampler import Sampler, Token
from artel.generation.text_stream import TextStream
from artel.tokens import Tokenizer


def write_text(
    engine: Engine, tokenizer: Tokenizer, prompt: GenerationPrompt, sampling: Sampling
) -> Generator[str, None, FinishReason]:
    """Yield the text that a model generates, in chunks. Raise EngineError. Closing the generator cancels the answer."""
    items: queue.SimpleQueue[Token | EngineError | None] = queue.SimpleQueue()
    sampler = Sampler(sampling.options, prompt.ids, tokenizer.vocabulary)
    generation = Generation(sampler, sampling.new_tokens, prompt.end.ids, items.put)
    stream = TextStream(tokenizer, prompt.ids, prompt.end.texts, special_tokens=prompt.special_tokens)
    try:
        engine.submit(prompt.ids, generation)
        while (item := items.get()) is not None:
            if isinstance(item, EngineError):
                raise item
            chunk = stream.add(item.id)
            if chunk.text:
                yield chunk.text
            if chunk.stopped:
                return "stop"
        if remaining_text := stream.flush():
            yield remaining_text
        return generation.finish_reason
    finally:
        engine.cancel(generation)


_SUBMITTED_PER_TEXT = 2
"""Texts to submit per concurrent text, so that the next one is ready."""


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A generated text."""

    text: str
    finish_reason: FinishReason
    tokens: int


def write_texts(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[GenerationPrompt],
    sampling: Sampling,
    window: int | None,
    concurrent: int,
    first_index: int = 0,
) -> Generator[GeneratedText, None, None]:
    """Yield the text that a model generates for each prompt, in order. Equals the text of `generate_from_ids`.

    Prompt i is sampled with the seed `sampling.seed + first_index + i`. `window` is the model's longest input. Raise
    WorkError if the model fails.
    """
    events: queue.SimpleQueue[tuple[int, Token | EngineError | None]] = queue.SimpleQueue()
    running: dict[int, _Job] = {}
    finished_texts: dict[int, GeneratedText] = {}
    submitted = 0

    def submit(index: int) -> None:
        job = running[index]
        prompt, new_tokens = job.next_input(window)
        job.generation = Generation(job.sampler, new_tokens, job.prompt.end.ids, lambda item: events.put((index, item)))
        engine.submit(prompt, job.generation)

    def finish(index: int, reason: FinishReason) -> None:
        job = running.pop(index)
        engine.cancel(job.generation)
        text = job.text if job.is_stopped else job.text + job.stream.flush()
        finished_texts[index] = GeneratedText(text, reason, job.tokens)

    try:
        for position in range(len(prompts)):
            while position not in finished_texts:
                while submitted < len(prompts) and len(running) < _SUBMITTED_PER_TEXT * concurrent:
                    seed = sampling.seed + first_index + submitted
                    running[submitted] = _Job(tokenizer, prompts[submitted], sampling, seed)
                    submit(submitted)
                    submitted += 1
                index, item = events.get()
                if index not in running:  # a stop text ended it, but the engine had chosen more tokens
                    continue
                job = running[index]
                if isinstance(item, EngineError):
                    raise item
                if item is not None:
                    job.add(item)
                    if job.is_stopped:
                        finish(index, "stop")
                elif job.generation.finish_reason == "length" and job.tokens_left:
                    engine.cancel(job.generation)
                    submit(index)  # the window is full
                else:
                    finish(index, job.generation.finish_reason)
            yield finished_texts.pop(position)
    except EngineError as error:
        raise WorkError.at("the model", f"failed on a prompt: {error}") from None
    finally:
        for job in running.values():
            engine.cancel(job.generation)


class _Job:
    """The text of one prompt, in progress."""

    generation: Generation

    def __init__(self, tokenizer: Tokenizer, prompt: GenerationPrompt, sampling: Sampling, seed: int) -> None:
        self.prompt = prompt
        options = replace(sampling, seed=seed).options
        self.sampler = Sampler(options, prompt.ids, tokenizer.vocabulary)
        self.stream = TextStream(tokenizer, prompt.ids, prompt.end.texts, special_tokens=prompt.special_tokens)
        self.text = ""
        self.tokens = 0
        self.tokens_left = sampling.new_tokens
        self.is_stopped = False
        self._ids = list(prompt.ids)

    def add(self, token: Token) -> None:
        chunk = self.stream.add(token.id)
        self.text += chunk.text
        self.is_stopped = chunk.stopped
        self._ids.append(token.id)
        self.tokens += 1
        self.tokens_left -= 1

    def next_input(self, window: int | None) -> tuple[list[int], int]:
        """Return the model's next input, and the number of tokens to generate from it.

        A full window loses its older half, as in `continue_ids`.
        """
        if window is None:
            return self._ids, self.tokens_left
        ids = self._ids if len(self._ids) <= window else self._ids[-max(1, window // 2) :]
        return ids, min(self.tokens_left, window - len(ids) + 1)
