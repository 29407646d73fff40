"""/v1/completions and /v1/chat/completions: whole answers, or streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from artel.errors import InputError
from artel.inference.serve.answers import (
    Delta,
    Prompt,
    Usage,
    options_of,
    room_for_answer,
    stop_texts,
    write,
)
from artel.inference.serve.bodies import ignored_fields
from artel.inference.serve.chat_prompt import chat_ids, chat_tools
from artel.inference.serve.errors import ApiError
from artel.inference.serve.grammar import ANY_OBJECT
from artel.inference.serve.metrics import Metrics
from artel.inference.serve.schema import (
    ChatRequest,
    CompletionRequest,
    JsonFormat,
    JsonSchemaFormat,
    SamplingBody,
)
from artel.inference.serve.served import ServedModel
from artel.inference.serve.tool_calls import CallDeltas, ConstrainedCalls, FreeCalls, constrain_calls, merge_deltas
from artel.models.generate import check_embedded
from artel.models.sampler import Token
from artel.tokens.tokenizer.chat_template import TurnEnd


class Answering(ABC):
    """The answers to one request."""

    kind: str
    """`object` of the response."""
    chunk: str
    """`object` of a part of a stream."""

    def __init__(self, served: ServedModel, body: SamplingBody, metrics: Metrics, seconds: float) -> None:
        self._served, self._metrics, self._seconds = served, metrics, seconds
        self._body = body
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._prompts: list[Prompt] = []
        self.usage = Usage()

    prefix: str

    async def prepare(self) -> None:
        """Make the prompts. Raises ApiError."""
        await self._make_prompts()
        self._metrics.prompt(self.usage.prompt_tokens)

    @abstractmethod
    async def _make_prompts(self) -> None:
        """Raises ApiError."""

    @abstractmethod
    async def choice(self, index: int) -> dict[str, Any]:
        """A whole answer. Raises ApiError."""

    @abstractmethod
    def parts(self, index: int) -> AsyncGenerator[dict[str, Any], None]:
        """An answer in parts. Raises ApiError."""

    @property
    def count(self) -> int:
        """Answers to the request."""
        return self._body.answers

    async def whole(self) -> dict[str, Any]:
        """The response. Raises ApiError, of the first answer that fails; the others end then."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.choice(index)) for index in range(self.count)]
        except* ApiError as errors:
            raise errors.exceptions[0] from None
        return self._response(self.kind, [task.result() for task in tasks]) | {"usage": self.usage.to_json()}

    async def stream(self) -> AsyncGenerator[str, None]:
        """Server-sent events: parts of all answers as they come, and `[DONE]`."""
        options = self._body.stream_options
        usage = {"usage": None} if options is not None and options.include_usage else {}
        try:
            async with aclosing(_merged([self.parts(index) for index in range(self.count)])) as parts:
                async for part in parts:
                    yield event(self._response(self.chunk, [part]) | usage)
            if usage:
                yield event(self._response(self.chunk, []) | {"usage": self.usage.to_json()})
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield event(error.body())

    async def _deltas(self, index: int) -> AsyncGenerator[Delta, None]:
        answers = self._body.n or 1
        prompt = self._prompts[index // answers]
        written = write(self._served, prompt, index % answers, self.usage, self._metrics, self._seconds)
        async with aclosing(written) as deltas:
            async for delta in deltas:
                yield delta

    async def _whole_answer(self, index: int) -> tuple[str, list[Token], str | None]:
        """The text of an answer, its tokens, and why it ended."""
        deltas = [delta async for delta in self._deltas(index)]
        tokens = [token for delta in deltas for token in delta.tokens]
        return "".join(delta.text for delta in deltas), tokens, deltas[-1].finish_reason

    def _add_prompt(self, ids: list[int], requested: int | None, param: str, **settings: Any) -> None:
        """Raises ApiError for one that the model cannot take."""
        opened = self._served.opened
        try:
            check_embedded(opened.model, opened.tokenizer, ids)
        except InputError as error:
            raise ApiError(400, error.problems[0].what, param) from None
        new_tokens = room_for_answer(self._served, ids, requested, param)
        self._prompts.append(Prompt(ids, new_tokens=new_tokens, **settings))
        self.usage.prompt_tokens += len(ids)

    def _response(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._served.name,
            "choices": choices,
        }


class Completions(Answering):
    """Texts that continue prompts."""

    prefix, kind, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, served: ServedModel, body: CompletionRequest, metrics: Metrics, seconds: float) -> None:
        super().__init__(served, body, metrics, seconds)
        self._request = body

    async def _make_prompts(self) -> None:
        served, body = self._served, self._request
        options = options_of(body, served, logprobs=body.logprobs)
        end, tokenizer = TurnEnd(served.text_end.ids, stop_texts(body)), served.opened.tokenizer
        if body.echo and (body.logprobs is None or body.stream or end.texts):
            raise ApiError(
                400, "echo is for the logprobs of prompts: write logprobs, and neither stream nor stop", "echo"
            )
        for prompt in body.prompts:
            ids = prompt if isinstance(prompt, list) else await served.work(partial(tokenizer.prompt, prompt))
            self._add_prompt(ids, body.max_tokens, "prompt", options=options, end=end, special_tokens=False)
            if body.echo:  # an end token within the prompt ends nothing
                whole = self._prompts[-1]
                self._prompts[-1] = replace(whole, ids=ids[:1], forced=ids[1:], end=TurnEnd(frozenset()))

    async def choice(self, index: int) -> dict[str, Any]:
        text, tokens, finish = await self._whole_answer(index)
        if self._request.echo:
            prompt = self._prompts[index // (self._request.n or 1)]
            self.usage.completion_tokens -= len(prompt.forced)
            text = self._served.token_text(prompt.ids[0]) + text
            tokens = [Token(prompt.ids[0]), *tokens]
        logprobs = await self._served.work(partial(self._logprobs, tokens, 0))
        return self._choice(index, text, finish, logprobs)

    async def parts(self, index: int) -> AsyncGenerator[dict[str, Any], None]:
        length = 0
        async for delta in self._deltas(index):
            yield self._choice(index, delta.text, delta.finish_reason, self._logprobs(delta.tokens, length))
            length += len(delta.text)

    def _choice(self, index: int, text: str, finish: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, tokens: list[Token], offset: int) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(self._served.token_text(token.id))
        return {
            "tokens": [self._served.token_name(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [None if token.logprob is None else self._likeliest(token) for token in tokens],
            "text_offset": offsets,
        }

    def _likeliest(self, token: Token) -> dict[str, float]:
        """The likeliest tokens in its place. Of two tokens of one name the likelier stays."""
        return {self._served.token_name(other): logprob for other, logprob in reversed(token.top)}


@dataclass(frozen=True, slots=True)
class _Said:
    """What came of an answer since the last one."""

    text: str
    calls: list[dict[str, Any]]
    """What is new of its calls, as a stream has it."""
    tokens: list[Token]
    finish_reason: str | None


class ChatCompletions(Answering):
    """Answers to a conversation."""

    prefix, kind, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, served: ServedModel, body: ChatRequest, metrics: Metrics, seconds: float) -> None:
        super().__init__(served, body, metrics, seconds)
        self._request = body
        self._tools = chat_tools(body)
        self._constrained: ConstrainedCalls | None = None

    async def _make_prompts(self) -> None:
        served, body = self._served, self._request
        await self._say_what_is_ignored(messages=body.messages, tools=body.tools)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "needs logprobs: true", "top_logprobs")
        options = options_of(body, served, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
        make_matcher = None
        schema = _answer_schema(body)
        if schema is not None:
            make_matcher = await served.work(lambda: served.grammars.matcher(schema))
        ids = await served.work(lambda: chat_ids(served, body))
        # What ends a turn in letters may stand in a text within JSON; the grammar ends such an answer.
        ends = () if schema is not None else served.turn_end.texts
        end = TurnEnd(served.turn_end.ids, (*ends, *stop_texts(body)))
        self._constrained = constrained = await served.work(lambda: constrain_calls(served, body, schema))
        if constrained is not None:
            make_matcher = constrained.make_matcher
            if constrained.must_call:  # the grammar ends the answer, and no text within arguments does
                end = TurnEnd(served.turn_end.ids)
        most = body.max_completion_tokens or body.max_tokens
        # Some models begin a call with a control token: [TOOL_CALLS], <|python_tag|>.
        with_marks = bool(self._tools)
        self._add_prompt(
            ids,
            most,
            "messages",
            options=options,
            end=end,
            stop_until="" if constrained is None else constrained.mark,
            make_matcher=make_matcher,
            must_fit=schema is not None and make_matcher is not None,
            special_tokens=with_marks,
        )

    async def _say_what_is_ignored(self, **objects: Any) -> None:
        """Name the fields of the client's objects that nothing here uses, each once, in the log."""

        def ignored() -> dict[str, None]:
            return dict.fromkeys(field for name, value in objects.items() for field in ignored_fields(value, name))

        for field in await self._served.work(ignored):
            self._served.say_once(f"{field} is ignored")

    async def choice(self, index: int) -> dict[str, Any]:
        text, finish = "", None
        call_deltas: list[dict[str, Any]] = []
        tokens: list[Token] = []
        async for said in self._said(index):
            text += said.text
            call_deltas += said.calls
            tokens += said.tokens
            finish = said.finish_reason
        calls = merge_deltas(call_deltas)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if calls else ""),
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        logprobs = await self._served.work(partial(self._logprobs, tokens))
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    async def parts(self, index: int) -> AsyncGenerator[dict[str, Any], None]:
        content = None if self._constrained is not None and self._constrained.must_call else ""
        yield self._part(index, {"role": "assistant", "content": content, "refusal": None}, None, [])
        async for said in self._said(index):
            fields: dict[str, Any] = {"content": said.text} if said.text else {}
            if said.calls:
                fields["tool_calls"] = said.calls
            if fields or said.finish_reason or said.tokens:
                yield self._part(index, fields, said.finish_reason, said.tokens)

    async def _said(self, index: int) -> AsyncGenerator[_Said, None]:
        """An answer as it is written, its calls apart."""
        reader = self._reader()
        begun = False
        async with aclosing(self._deltas(index)) as deltas:
            async for delta in deltas:
                text = delta.text
                finish: str | None = delta.finish_reason
                if reader is not None:
                    text = reader.add(text) + (reader.rest() if finish is not None else "")
                    if reader.count and (reader.is_full or finish == "stop"):
                        finish = "tool_calls"
                text = text if begun else text.lstrip()  # white space before an answer belongs to the template
                begun = begun or bool(text)
                yield _Said(text, [] if reader is None else reader.take(), delta.tokens, finish)
                if finish is not None:
                    return

    def _reader(self) -> CallDeltas | None:
        if self._constrained is not None:
            return self._constrained.reader()
        one_alone = self._request.parallel_tool_calls is False
        return FreeCalls(self._tools, 1 if one_alone else None) if self._tools else None

    def _part(self, index: int, delta: dict[str, Any], finish: str | None, tokens: list[Token]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return {
            "content": [
                self._logprob(token.id, token.logprob)
                | {"top_logprobs": [self._logprob(other, logprob) for other, logprob in token.top]}
                for token in tokens
            ],
            "refusal": None,
        }

    def _logprob(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._served.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(self._served.token_bytes(token))}


def _answer_schema(body: ChatRequest) -> dict[str, Any] | None:
    """The schema of an answer in JSON; None for free text."""
    answer_format = body.response_format
    if isinstance(answer_format, JsonSchemaFormat):
        return answer_format.json_schema.schema_ or ANY_OBJECT
    return ANY_OBJECT if isinstance(answer_format, JsonFormat) else None


async def _merged(streams: list[AsyncGenerator[dict[str, Any], None]]) -> AsyncGenerator[dict[str, Any], None]:
    """What comes from several, as it comes. Raises the error of the first that fails."""
    items: asyncio.Queue[dict[str, Any] | Exception | None] = asyncio.Queue()

    async def feed(stream: Any) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    items.put_nowait(item)
            items.put_nowait(None)
        except Exception as error:  # whatever it is, the reader must not wait for ever
            items.put_nowait(error)

    tasks = [asyncio.create_task(feed(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
