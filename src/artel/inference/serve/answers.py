"""One answer: its text as it is written, with what ends it and the logarithms of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from artel.inference.engine.base import EngineError, FinishReason, Generation
from artel.inference.serve.errors import ApiError
from artel.inference.serve.metrics import Metrics
from artel.inference.serve.schema import SamplingBody
from artel.inference.serve.served import ServedModel
from artel.models.sampler import Sampler, SamplingOptions, Token
from artel.models.text_stream import TextStream
from artel.tokens.tokenizer.chat_template import TurnEnd

_DIGITS = 10
"""Fewer digits than this has an id of a token: int() refuses very long numbers."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is to be continued, and how."""

    ids: list[int]
    options: SamplingOptions
    new_tokens: int
    end: TurnEnd
    """What ends the answer: of the template, and the texts of `stop`."""
    stop_until: str = ""
    """From this text on no text ends the answer: it is calls."""
    special_tokens: bool = False
    forced: list[int] = field(default_factory=list)
    """Tokens with which the answer begins: the rest of a prompt whose logarithms are asked for."""
    must_fit: bool = False
    """The whole answer must fit a schema: cut off by a text of `stop`, it is incomplete."""
    make_matcher: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last one."""

    text: str
    tokens: list[Token] = field(default_factory=list)
    """Those since the last delta, whose characters may come later."""
    finish_reason: FinishReason | None = None
    """Of the last delta."""


@dataclass(slots=True)
class Usage:
    """Tokens of a request, all its answers together."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def to_json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def options_of(body: SamplingBody, served: ServedModel, *, logprobs: int | None) -> SamplingOptions:
    """The sampling that a request asks for. Raises ApiError."""
    biases = {}
    for name, bias in (body.logit_bias or {}).items():
        if not (name.isdecimal() and len(name) < _DIGITS and int(name) < served.written_ids):
            what = f"{name[:50]!r} is no id of a token that the model writes; write 0 to {served.written_ids - 1}"
            raise ApiError(400, what, "logit_bias")
        biases[int(name)] = bias
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
    }
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return SamplingOptions(**settings, logit_bias=biases, seed=body.seed, logprobs=logprobs)


def stop_texts(body: SamplingBody) -> tuple[str, ...]:
    return () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def room_for_answer(served: ServedModel, ids: list[int], requested: int | None, param: str) -> int:
    """Tokens that an answer may have. Raises ApiError where the prompt leaves no room for it."""
    room = served.context - len(ids)
    if room < 1 or (requested or 1) > room:
        asked = f", and {requested:,} of an answer" if requested else ""
        message = f"the prompt has {len(ids):,} tokens{asked}; prompt and answer have {served.context:,} at most"
        raise ApiError(400, message, param, "context_length_exceeded")
    return requested or room


async def write(
    served: ServedModel, prompt: Prompt, seed_offset: int, usage: Usage, metrics: Metrics, seconds: float
) -> AsyncGenerator[Delta, None]:
    """An answer as it is written; it is cut off after so many `seconds`. Raises ApiError where the model fails."""
    assert served.engine is not None
    tokenizer = served.opened.tokenizer
    options = prompt.options
    if options.seed is not None and seed_offset:
        options = replace(options, seed=options.seed + seed_offset)
    matcher = None if prompt.make_matcher is None else prompt.make_matcher()
    sampler = Sampler(options, prompt.ids, tokenizer.vocabulary, matcher, prompt.forced)
    tokens = _Delivered()
    generation = Generation(sampler, prompt.new_tokens + len(prompt.forced), prompt.end.ids, tokens.put)
    stream = TextStream(
        tokenizer,
        prompt.ids,
        prompt.end.texts,
        stop_until=prompt.stop_until,
        special_tokens=prompt.special_tokens,
    )
    waiting: list[Token] = []
    finish: FinishReason | None = None
    try:
        served.engine.submit(prompt.ids, generation)
        with metrics.answer() as timer:
            async with asyncio.timeout(seconds):
                async for token in tokens:
                    timer.token()
                    usage.completion_tokens += 1
                    waiting.append(token)
                    piece = stream.add(token.id)
                    if piece.stopped:
                        finish = "length" if prompt.must_fit else "stop"
                        yield Delta(piece.text, waiting, finish)
                        return
                    if piece.text:
                        yield Delta(piece.text, waiting)
                        waiting = []
        yield Delta(stream.rest(), waiting, generation.finish_reason)
    except TimeoutError:
        yield Delta(stream.rest(), waiting, "length")
    except EngineError as error:
        if matcher is not None and matcher.is_error():
            what = f"the schema cannot be kept after {usage.completion_tokens} tokens: {error}; write a simpler one"
            raise ApiError(400, what, "response_format") from None
        raise ApiError(500, f"the model failed: {error}") from None
    finally:
        served.engine.cancel(generation)


class _Delivered:
    """What the engine delivers in its thread, for the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Token | EngineError | None] = asyncio.Queue()

    def put(self, item: Token | EngineError | None) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def __aiter__(self) -> AsyncIterator[Token]:
        """Raises EngineError."""
        while (item := await self._queue.get()) is not None:
            if isinstance(item, EngineError):
                raise item
            yield item
