"""One text by the engine, as it is written."""

from __future__ import annotations

import queue
from collections.abc import Generator

from artel.inference.engine.base import Engine, EngineError, FinishReason, Generation
from artel.models.generate import Sampling
from artel.models.sampler import Sampler, Token
from artel.models.text_stream import TextStream
from artel.objectives.types import GenerationPrompt
from artel.tokens import Tokenizer


def write_text(
    engine: Engine, tokenizer: Tokenizer, begin: GenerationPrompt, sampling: Sampling
) -> Generator[str, None, FinishReason]:
    """What a model writes at a beginning, in pieces. Raises EngineError. Closed, it stops the engine's work on it."""
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
