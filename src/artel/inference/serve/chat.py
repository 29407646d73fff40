"""/v1/chat/completions and /v1/responses: answers to a conversation, with tool calls."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from artel import text
from artel.errors import InputError
from artel.generation.sampler import Token
from artel.inference.serve.api_errors import ApiError
from artel.inference.serve.completions import RequestAnswers, event, sampling_options, stop_texts
from artel.inference.serve.grammars import ANY_OBJECT
from artel.inference.serve.metrics import Metrics
from artel.inference.serve.schema import (
    ChatRequest,
    Function,
    JsonFormat,
    JsonSchemaFormat,
    Message,
    ResponsesRequest,
    ignored_fields,
)
from artel.inference.serve.served import ServedModel
from artel.inference.serve.tool_calls import CallDeltas, ConstrainedCalls, FreeCalls, constrain_calls, merge_deltas
from artel.text import Tools
from artel.text.records import BadRecord
from artel.text.tool_calls import parse_call
from artel.tokens.tokenizer.chat_template import TemplateRejection, TurnEnd, prompt_ids
from artel.tokens.tokenizer.template_tools import ToolStyle


def chat_tools(body: ChatRequest) -> Tools:
    """Return the functions that the model may call."""
    tools = [] if body.tool_choice == "none" else body.tools or []
    return tuple({"type": tool.type, "function": _get_function_fields(tool.function)} for tool in tools)


def _get_function_fields(function: Function) -> dict[str, Any]:
    """Return the fields of a function that belong in the prompt: fields of the schema that have a value.

    Does not copy parameters: `model_dump` takes 0.5 s for 2 MB of them, and other threads wait.
    """
    fields = {name: getattr(function, name) for name in Function.model_fields}
    return {name: value for name, value in fields.items() if value is not None}


def chat_ids(served: ServedModel, body: ChatRequest) -> list[int]:
    """Return the token ids of a conversation and the start of an answer. Raise ApiError if the template rejects it."""
    _check_results(body.messages)
    tools = list(chat_tools(body))
    style = served.tool_style
    if tools and (style is None or not style.writes_tools):
        fix = "serve a model whose template does, or train one with chat.template: chatml"
        raise ApiError(400, f"the model's chat template does not support tools; {fix}", "tools")
    style = style or ToolStyle()
    messages = style.link_calls([as_record(index, message) for index, message in enumerate(body.messages)])
    fields = [
        style.fields(message) | ({"reasoning_content": message.thought} if message.thought else {})
        for message in messages
    ]
    try:
        json.dumps([fields, tools], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "a lone surrogate (\\ud800 to \\udfff) is not valid text", "messages") from None
    except RecursionError:
        pass  # reported below
    try:
        return prompt_ids(served.opened.tokenizer, served.template, fields, tools or None)
    except (TemplateRejection, InputError) as refusal:
        raise ApiError(400, f"the chat template raises an error: {refusal}", "messages") from None
    except RecursionError:
        raise ApiError(400, "the parameters of a function are nested too deeply", "tools") from None


def _check_results(messages: Sequence[Message]) -> None:
    """Raise ApiError, as OpenAI does, for a tool result without a call in the preceding message."""
    ids: set[str] = set()
    for index, message in enumerate(messages):
        if message.role != "tool":
            ids = {call.id for call in message.tool_calls or []} if message.role == "assistant" else set()
            continue
        param = f"messages[{index}]"
        if not ids:
            reason = "messages with role 'tool' must be a response to a preceding message with 'tool_calls'"
            raise ApiError(400, f"{param}: {reason}", f"{param}.role")
        call_id = message.tool_call_id
        if call_id and call_id not in ids:
            reason = f"the previous message has no call {call_id[:100]!r}; its calls are {', '.join(sorted(ids))[:500]}"
            raise ApiError(400, f"{param}.tool_call_id: {reason}", f"{param}.tool_call_id")


def as_record(index: int, message: Message) -> text.Message:
    """Convert a message of a request to a message of a conversation. Raise ApiError if a tool call is invalid."""
    content = message.content
    joined = content if isinstance(content, str) else "".join(part.text for part in content or [])
    role = "system" if message.role == "developer" else message.role
    try:
        calls = tuple(parse_call(call.model_dump(include={"id", "function"})) for call in message.tool_calls or [])
    except BadRecord as error:
        raise ApiError(400, error.detail, f"messages[{index}].tool_calls") from None
    thought = message.reasoning_content or ""
    return text.Message(role, joined, thought, None, calls, message.name or "", message.tool_call_id or "")


@dataclass(frozen=True, slots=True)
class _ChatDelta:
    """New text, tool calls and tokens of an answer."""

    text: str
    calls: list[dict[str, Any]]
    """Deltas of tool calls, as in OpenAI's API."""
    tokens: list[Token]
    finish_reason: str | None


class ChatCompletions(RequestAnswers):
    """Answers to a conversation, at /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, served: ServedModel, body: ChatRequest, metrics: Metrics, seconds: float) -> None:
        super().__init__(served, body, metrics, seconds)
        self._request = body
        self._tools = chat_tools(body)
        self._constrained: ConstrainedCalls | None = None

    async def _make_prompts(self) -> None:
        served, body = self._served, self._request
        await self._log_ignored_fields(messages=body.messages, tools=body.tools)
        if body.top_logprobs and not body.logprobs:
            raise ApiError(400, "needs logprobs: true", "top_logprobs")
        options = sampling_options(body, served, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
        make_matcher = None
        schema = _answer_schema(body)
        if schema is not None:
            make_matcher = await served.work(lambda: served.grammars.json_matcher_factory(schema))
        ids = await served.work(lambda: chat_ids(served, body))
        # With a schema the grammar ends the answer, since the text that ends a turn may occur in a JSON string.
        ends = () if schema is not None else served.turn_end.texts
        end = TurnEnd(served.turn_end.ids, (*ends, *stop_texts(body)))
        self._constrained = constrained = await served.work(lambda: constrain_calls(served, body, self._tools, schema))
        if constrained is not None:
            make_matcher = constrained.make_matcher
            if constrained.must_call:  # the grammar ends the answer, since stop texts may occur in arguments
                end = TurnEnd(served.turn_end.ids)
        self._add_prompt(
            ids,
            body.max_completion_tokens or body.max_tokens,
            "messages",
            options=options,
            end=end,
            stop_until="" if constrained is None else constrained.mark,
            make_matcher=make_matcher,
            must_fit=schema is not None and make_matcher is not None,
            special_tokens=bool(self._tools),  # a call may begin with one: [TOOL_CALLS], <|python_tag|>
        )

    async def _log_ignored_fields(self, **objects: Any) -> None:
        """Log each field of the client's objects that the server ignores, once."""

        def find_ignored() -> dict[str, None]:
            return dict.fromkeys(field for name, value in objects.items() for field in ignored_fields(value, name))

        for field in await self._served.work(find_ignored):
            self._served.log_once(f"{field} is ignored")

    async def choice(self, index: int) -> dict[str, Any]:
        text, finish = "", None
        call_deltas: list[dict[str, Any]] = []
        tokens: list[Token] = []
        async for delta in self._iterate_chat_deltas(index):
            text += delta.text
            call_deltas += delta.calls
            tokens += delta.tokens
            finish = delta.finish_reason
        calls = merge_deltas(call_deltas)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        logprobs = await self._served.work(partial(self._format_logprobs, tokens))
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    async def chunks(self, index: int) -> AsyncGenerator[dict[str, Any], None]:
        content = None if self._constrained is not None and self._constrained.must_call else ""
        yield self._make_chunk(index, {"role": "assistant", "content": content, "refusal": None}, None, [])
        async for delta in self._iterate_chat_deltas(index):
            fields: dict[str, Any] = {"content": delta.text} if delta.text else {}
            if delta.calls:
                fields["tool_calls"] = delta.calls
            if fields or delta.finish_reason or delta.tokens:
                yield self._make_chunk(index, fields, delta.finish_reason, delta.tokens)

    async def _iterate_chat_deltas(self, index: int) -> AsyncGenerator[_ChatDelta, None]:
        """Yield an answer as it is generated, with text and calls separated."""
        reader = self._make_reader()
        has_text = False
        async with aclosing(self._iterate_deltas(index)) as deltas:
            async for delta in deltas:
                text = delta.text
                finish: str | None = delta.finish_reason
                if reader is not None:
                    text = reader.feed(text) + (reader.flush() if finish is not None else "")
                    if reader.count and (reader.is_full or finish == "stop"):
                        finish = "tool_calls"
                text = text if has_text else text.lstrip()  # whitespace before an answer belongs to the template
                has_text = has_text or bool(text)
                yield _ChatDelta(text, [] if reader is None else reader.take_deltas(), delta.tokens, finish)
                if finish is not None:
                    return

    def _make_reader(self) -> CallDeltas | None:
        if self._constrained is not None:
            return self._constrained.reader()
        limit = 1 if self._request.parallel_tool_calls is False else None
        return FreeCalls(self._tools, limit) if self._tools else None

    def _make_chunk(self, index: int, delta: dict[str, Any], finish: str | None, tokens: list[Token]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": self._format_logprobs(tokens), "finish_reason": finish}

    def _format_logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        return {
            "content": [
                self._format_logprob(token.id, token.logprob)
                | {"top_logprobs": [self._format_logprob(candidate, logprob) for candidate, logprob in token.top]}
                for token in tokens
            ],
            "refusal": None,
        }

    def _format_logprob(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._served.token_text(token)
        return {"token": text, "logprob": logprob, "bytes": list(self._served.token_bytes(token))}


def _answer_schema(body: ChatRequest) -> dict[str, Any] | None:
    """Return the JSON schema of the answer, or None for free text."""
    answer_format = body.response_format
    if isinstance(answer_format, JsonSchemaFormat):
        return answer_format.json_schema.schema_ or ANY_OBJECT
    return ANY_OBJECT if isinstance(answer_format, JsonFormat) else None


# /v1/responses


class Responses(ChatCompletions):
    """The response to a request of OpenAI's Responses API. Computes it as a chat completion."""

    prefix, kind = "resp", "response"

    def __init__(self, served: ServedModel, body: ResponsesRequest, metrics: Metrics, seconds: float) -> None:
        super().__init__(served, body.as_chat(), metrics, seconds)
        self._responses_request = body
        self._item_id = self._id.replace(self.prefix, "msg", 1)

    async def _make_prompts(self) -> None:
        await self._log_ignored_fields(input=self._responses_request.input)
        try:
            await super()._make_prompts()
        except ApiError as error:
            error.param = {"messages": "input", "response_format": "text"}.get(error.param or "", error.param)
            raise

    async def full_response(self) -> dict[str, Any]:
        """Return the response. Raise ApiError if the model fails."""
        choice = await self.choice(0)
        return self._final_response(choice["message"]["content"], choice["finish_reason"])

    async def stream(self) -> AsyncGenerator[str, None]:
        """Yield server-sent events: the response, its message, and the text as it is generated."""
        sent_events = 0

        def named_event(event_type: str, **fields: Any) -> str:
            nonlocal sent_events
            sent_events += 1
            content = {"type": event_type, "sequence_number": sent_events - 1} | fields
            return f"event: {event_type}\n{event(content)}"

        item: dict[str, Any] = {"output_index": 0}
        content_part: dict[str, Any] = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        text, finish = "", None
        try:
            for event_type in ("response.created", "response.in_progress"):
                yield named_event(event_type, response=self._response_object("in_progress", []))
            yield named_event("response.output_item.added", **item, item=self._make_message("in_progress", []))
            yield named_event("response.content_part.added", **content_part, part=_make_text_part(""))
            async with aclosing(self._iterate_chat_deltas(0)) as deltas:
                async for delta in deltas:
                    text += delta.text
                    finish = delta.finish_reason
                    if delta.text:
                        yield named_event("response.output_text.delta", **content_part, delta=delta.text, logprobs=[])
            response = self._final_response(text, finish)
            yield named_event("response.output_text.done", **content_part, text=text, logprobs=[])
            yield named_event("response.content_part.done", **content_part, part=_make_text_part(text))
            yield named_event("response.output_item.done", **item, item=response["output"][0])
            yield named_event(f"response.{response['status']}", response=response)
        except ApiError as error:
            problem = {"code": "server_error", "message": str(error)}
            yield named_event("response.failed", response=self._response_object("failed", [], error=problem))

    def _final_response(self, text: str, finish: str | None) -> dict[str, Any]:
        """Return the response with its finished answer."""
        status = "incomplete" if finish == "length" else "completed"
        usage = {
            "input_tokens": self.usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self.usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.usage.prompt_tokens + self.usage.completion_tokens,
        }
        return self._response_object(
            status,
            [self._make_message(status, [_make_text_part(text)])],
            incomplete_details={"reason": "max_output_tokens"} if finish == "length" else None,
            completed_at=int(time.time()) if status == "completed" else None,
            usage=usage,
        )

    def _response_object(self, status: str, output: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        body = self._responses_request
        format_ = None if body.text is None else body.text.format
        return {
            "id": self._id,
            "object": self.kind,
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._served.name,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"} if format_ is None else format_.model_dump(by_alias=True)},
            "tool_choice": "auto",
            "tools": [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        } | fields

    def _make_message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _make_text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
