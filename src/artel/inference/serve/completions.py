"""/v1/completions, and the base class of all endpoints that generate text token by token."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from artel.errors import InputError
from artel.generation.base import EngineError, FinishReason, Generation
from artel.generation.generate import check_embedded
from artel.generation.sampler import Sampler, SamplingOptions, Token
from artel.generation.text_stream import TextStream
from artel.inference.serve.api_errors import ApiError
from artel.inference.serve.grammars import grammar_error
from artel.inference.serve.metrics import Metrics
from artel.inference.serve.schema import CompletionRequest, SamplingBody
from artel.inference.serve.served import ServedModel
from artel.tokens.tokenizer.chat_template import TurnEnd

_MAX_DIGITS = 9
"""Maximum digits of a token id: int() refuses very long numbers."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to continue, and the settings of the answer."""

    ids: list[int]
    options: SamplingOptions
    new_tokens: int
    end: TurnEnd
    """End of the answer: the template's end of turn, and the texts of `stop`."""
    stop_until: str = ""
    """Stop texts have no effect after this text, since calls follow it."""
    special_tokens: bool = False
    forced: list[int] = field(default_factory=list)
    """First tokens of the answer: the tokens of a prompt whose logprobs are requested (`echo`)."""
    must_fit: bool = False
    """True if the whole answer must fit a schema. A stop text then leaves it incomplete."""
    make_matcher: Callable[[], Any] | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of an answer."""

    text: str
    tokens: list[Token] = field(default_factory=list)
    """Tokens whose characters may follow in a later delta."""
    finish_reason: FinishReason | None = None
    """None until the last delta."""
    end_token: Token | None = None
    """The token that ended the answer, which is not part of its text."""


@dataclass(slots=True)
class Usage:
    """Token counts of a request, over all of its answers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def to_json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def sampling_options(body: SamplingBody, served: ServedModel, *, logprobs: int | None) -> SamplingOptions:
    """Return the sampling options of a request. Raise ApiError for an unknown token id."""
    biases = {}
    for name, bias in (body.logit_bias or {}).items():
        if not (name.isdecimal() and len(name) <= _MAX_DIGITS and int(name) < served.num_output_ids):
            message = f"{name[:50]!r} is not the id of a token of the model; use 0 to {served.num_output_ids - 1}"
            raise ApiError(400, message, "logit_bias")
        biases[int(name)] = bias
    options = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
    }
    requested: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    return SamplingOptions(**requested, logit_bias=biases, seed=body.seed, logprobs=logprobs)


def stop_texts(body: SamplingBody) -> tuple[str, ...]:
    return () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)


def answer_limit(served: ServedModel, ids: list[int], requested: int | None, param: str) -> int:
    """Return the token limit of an answer. Raise ApiError if it does not fit after the prompt."""
    available = served.context - len(ids)
    if available < 1 or (requested or 1) > available:
        answer = f" and the answer {requested:,}" if requested else ""
        message = f"the prompt has {len(ids):,} tokens{answer}, but the context holds {served.context:,} in all"
        raise ApiError(400, message, param, "context_length_exceeded")
    return requested or available


async def generate_deltas(
    served: ServedModel, prompt: Prompt, seed_offset: int, usage: Usage, metrics: Metrics, seconds: float
) -> AsyncGenerator[Delta, None]:
    """Yield an answer as it is generated. Cut it off after `seconds`. Raise ApiError if the model fails."""
    engine = served.engine
    assert engine is not None
    tokenizer = served.opened.tokenizer
    options = prompt.options
    if options.seed is not None and seed_offset:
        options = replace(options, seed=options.seed + seed_offset)
    matcher = None if prompt.make_matcher is None else prompt.make_matcher()
    sampler = Sampler(options, prompt.ids, tokenizer.vocabulary, matcher, prompt.forced)
    tokens = _TokenQueue()
    generation = Generation(sampler, prompt.new_tokens + len(prompt.forced), prompt.end.ids, tokens.put)
    stream = TextStream(
        tokenizer, prompt.ids, prompt.end.texts, stop_until=prompt.stop_until, special_tokens=prompt.special_tokens
    )
    pending: list[Token] = []
    finish: FinishReason | None = None
    try:
        engine.submit(prompt.ids, generation)
        with metrics.track_answer() as timer:
            async with asyncio.timeout(seconds):
                async for token in tokens:
                    timer.count_token()
                    usage.completion_tokens += 1
                    pending.append(token)
                    chunk = stream.add(token.id)
                    if chunk.stopped:
                        finish = "length" if prompt.must_fit else "stop"
                        yield Delta(chunk.text, pending, finish)
                        return
                    if chunk.text:
                        yield Delta(chunk.text, pending)
                        pending = []
        yield Delta(stream.flush(), pending, generation.finish_reason, generation.end_token)
    except TimeoutError:
        yield Delta(stream.flush(), pending, "length")
    except EngineError as error:
        if matcher is not None and matcher.is_error():
            message = f"the schema cannot be satisfied after {usage.completion_tokens} tokens: {grammar_error(error)}"
            raise ApiError(400, f"{message}; use a simpler one", "response_format") from None
        raise ApiError(500, f"the model failed: {error}") from None
    finally:
        engine.cancel(generation)


class _TokenQueue:
    """Passes tokens from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Token | EngineError | None] = asyncio.Queue()

    def put(self, item: Token | EngineError | None) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    async def __aiter__(self) -> AsyncIterator[Token]:
        """Yield tokens as they arrive. Raise EngineError if the model failed."""
        while (item := await self._queue.get()) is not None:
            if isinstance(item, EngineError):
                raise item
            yield item


class RequestAnswers(ABC):
    """The answers to one request."""

    prefix: str
    """Prefix of the response's `id`."""
    kind: str
    """`object` of the response."""
    chunk_kind: str
    """`object` of a chunk in a stream."""

    def __init__(self, served: ServedModel, body: SamplingBody, metrics: Metrics, seconds: float) -> None:
        self._served, self._metrics, self._seconds = served, metrics, seconds
        self._body = body
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._prompts: list[Prompt] = []
        self.usage = Usage()

    async def prepare(self) -> None:
        """Make the prompts. Raise ApiError if the request is invalid."""
        await self._make_prompts()
        self._metrics.count_prompt(self.usage.prompt_tokens)

    @abstractmethod
    async def _make_prompts(self) -> None:
        """Add a prompt for each group of `n` answers. Raise ApiError if the request is invalid."""

    @abstractmethod
    async def choice(self, index: int) -> dict[str, Any]:
        """Return a full answer. Raise ApiError if the model fails."""

    @abstractmethod
    def chunks(self, index: int) -> AsyncGenerator[dict[str, Any], None]:
        """Yield an answer in chunks. Raise ApiError if the model fails."""

    @property
    def answer_count(self) -> int:
        return self._body.answer_count

    async def full_response(self) -> dict[str, Any]:
        """Return the response. Raise ApiError for the first answer that fails, and cancel the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.choice(index)) for index in range(self.answer_count)]
        except* ApiError as errors:
            raise errors.exceptions[0] from None
        return self._make_response(self.kind, [task.result() for task in tasks]) | {"usage": self.usage.to_json()}

    async def stream(self) -> AsyncGenerator[str, None]:
        """Yield server-sent events: chunks of all answers as they come, then `[DONE]`."""
        options = self._body.stream_options
        usage = {"usage": None} if options is not None and options.include_usage else {}
        try:
            async with aclosing(_merge_streams([self.chunks(index) for index in range(self.answer_count)])) as chunks:
                async for chunk in chunks:
                    yield event(self._make_response(self.chunk_kind, [chunk]) | usage)
            if usage:
                yield event(self._make_response(self.chunk_kind, []) | {"usage": self.usage.to_json()})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield event(error.body())

    async def _iterate_deltas(self, index: int) -> AsyncGenerator[Delta, None]:
        answers_per_prompt = self._body.n or 1
        prompt = self._prompts[index // answers_per_prompt]
        seed_offset = index % answers_per_prompt
        answer = generate_deltas(self._served, prompt, seed_offset, self.usage, self._metrics, self._seconds)
        async with aclosing(answer) as deltas:
            async for delta in deltas:
                yield delta

    async def _full_answer(self, index: int) -> tuple[str, list[Token], Delta]:
        """Return an answer's text, its tokens, and its last delta."""
        deltas = [delta async for delta in self._iterate_deltas(index)]
        tokens = [token for delta in deltas for token in delta.tokens]
        return "".join(delta.text for delta in deltas), tokens, deltas[-1]

    def _add_prompt(self, ids: list[int], requested: int | None, param: str, **settings: Any) -> None:
        """Add a prompt. Raise ApiError if the model does not accept it."""
        opened = self._served.opened
        try:
            check_embedded(opened.model, opened.tokenizer, ids)
        except InputError as error:
            raise ApiError(400, error.problems[0].what, param) from None
        new_tokens = answer_limit(self._served, ids, requested, param)
        self._prompts.append(Prompt(ids, new_tokens=new_tokens, **settings))
        self.usage.prompt_tokens += len(ids)

    def _make_response(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._served.name,
            "choices": choices,
        }


class Completions(RequestAnswers):
    """Continuations of prompts, at /v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, served: ServedModel, body: CompletionRequest, metrics: Metrics, seconds: float) -> None:
        super().__init__(served, body, metrics, seconds)
        self._request = body

    async def _make_prompts(self) -> None:
        served, body = self._served, self._request
        options = sampling_options(body, served, logprobs=body.logprobs)
        tokenizer = served.opened.tokenizer
        end = TurnEnd(served.text_end.ids | set(body.stop_token_ids or ()), stop_texts(body))
        if body.return_token_ids and (body.echo or body.stream):
            raise ApiError(400, "is for whole completions: use it without echo and stream", "return_token_ids")
        if body.echo and (body.logprobs is None or body.stream or end.texts):
            message = "echo is for the logprobs of prompts: use it with logprobs, without stream and stop"
            raise ApiError(400, message, "echo")
        for prompt in body.prompts:
            ids = prompt if isinstance(prompt, list) else await served.work(partial(tokenizer.prompt, prompt))
            special_tokens = body.skip_special_tokens is False
            self._add_prompt(ids, body.max_tokens, "prompt", options=options, end=end, special_tokens=special_tokens)
            if body.echo:  # an end token in the prompt has no effect
                prompt_only = self._prompts[-1]
                self._prompts[-1] = replace(prompt_only, ids=ids[:1], forced=ids[1:], end=TurnEnd(frozenset()))

    async def choice(self, index: int) -> dict[str, Any]:
        text, tokens, last = await self._full_answer(index)
        prompt = self._prompts[index // (self._request.n or 1)]
        ids = {}
        if self._request.return_token_ids:
            tokens += [last.end_token] if last.end_token is not None else []
            ids = {"prompt_token_ids": prompt.ids, "token_ids": [token.id for token in tokens]}
        if self._request.echo:
            self.usage.completion_tokens -= len(prompt.forced)
            text = self._served.token_text(prompt.ids[0]) + text
            tokens = [Token(prompt.ids[0]), *tokens]
        logprobs = await self._served.work(partial(self._format_logprobs, tokens, 0))
        return self._make_choice(index, text, last.finish_reason, logprobs) | ids

    async def chunks(self, index: int) -> AsyncGenerator[dict[str, Any], None]:
        text_length = 0
        async for delta in self._iterate_deltas(index):
            yield self._make_choice(
                index, delta.text, delta.finish_reason, self._format_logprobs(delta.tokens, text_length)
            )
            text_length += len(delta.text)

    def _make_choice(self, index: int, text: str, finish: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _format_logprobs(self, tokens: list[Token], offset: int) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(self._served.token_text(token.id))
        return {
            "tokens": [self._served.token_name(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [None if token.logprob is None else self._name_top_logprobs(token) for token in tokens],
            "text_offset": offsets,
        }

    def _name_top_logprobs(self, token: Token) -> dict[str, float]:
        """Return the most likely tokens at this position. Of two with the same name, keep the more likely one."""
        return {self._served.token_name(candidate): logprob for candidate, logprob in reversed(token.top)}


async def _merge_streams(streams: list[AsyncGenerator[dict[str, Any], None]]) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the items of several streams as they come. Raise the first error."""
    items: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()

    async def feed(stream: Any) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    items.put_nowait(item)
            items.put_nowait(None)
        except Exception as error:  # any error must reach the reader, or it would wait forever
            items.put_nowait(error)

    tasks = [asyncio.create_task(feed(stream)) for stream in streams]
    try:
        remaining = len(tasks)
        while remaining:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                remaining -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def event(content: dict[str, Any]) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
