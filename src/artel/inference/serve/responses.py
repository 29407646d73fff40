"""/v1/responses: OpenAI's newer API for one answer, whole or as a stream of events. The chat path computes it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from artel.inference.serve.completions import ChatCompletions, event
from artel.inference.serve.errors import ApiError
from artel.inference.serve.metrics import Metrics
from artel.inference.serve.schema import ResponsesRequest
from artel.inference.serve.served import ServedModel


class Responses(ChatCompletions):
    """The answer to the input of a request, as an object of OpenAI's Responses API."""

    prefix, kind = "resp", "response"

    def __init__(self, served: ServedModel, body: ResponsesRequest, metrics: Metrics, seconds: float) -> None:
        super().__init__(served, body.as_chat(), metrics, seconds)
        self._responses_request = body
        self._item_id = self._id.replace(self.prefix, "msg", 1)

    async def _make_prompts(self) -> None:
        await self._say_what_is_ignored(input=self._responses_request.input)
        try:
            await super()._make_prompts()
        except ApiError as error:
            error.param = {"messages": "input", "response_format": "text"}.get(error.param or "", error.param)
            raise

    async def whole(self) -> dict[str, Any]:
        """Return the response. Raises ApiError."""
        choice = await self.choice(0)
        return self._finished(choice["message"]["content"], choice["finish_reason"])

    async def stream(self) -> AsyncGenerator[str, None]:
        """Yield server-sent events: the response, its one message and its text as they grow."""
        sent = 0

        def named(kind: str, **fields: Any) -> str:
            nonlocal sent
            sent += 1
            content = {"type": kind, "sequence_number": sent - 1} | fields
            return f"event: {kind}\n{event(content)}"

        item: dict[str, Any] = {"output_index": 0}
        part: dict[str, Any] = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        text, finish = "", None
        try:
            for kind in ("response.created", "response.in_progress"):
                yield named(kind, response=self._object("in_progress", []))
            yield named("response.output_item.added", **item, item=self._message("in_progress", []))
            yield named("response.content_part.added", **part, part=_text_part(""))
            async with aclosing(self._said(0)) as answer:
                async for said in answer:
                    text += said.text
                    finish = said.finish_reason
                    if said.text:
                        yield named("response.output_text.delta", **part, delta=said.text, logprobs=[])
            response = self._finished(text, finish)
            yield named("response.output_text.done", **part, text=text, logprobs=[])
            yield named("response.content_part.done", **part, part=_text_part(text))
            yield named("response.output_item.done", **item, item=response["output"][0])
            yield named(f"response.{response['status']}", response=response)
        except ApiError as error:
            problem = {"code": "server_error", "message": str(error)}
            yield named("response.failed", response=self._object("failed", [], error=problem))

    def _finished(self, text: str, finish: str | None) -> dict[str, Any]:
        """Return the response whose answer ended."""
        status = "incomplete" if finish == "length" else "completed"
        usage = {
            "input_tokens": self.usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self.usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.usage.prompt_tokens + self.usage.completion_tokens,
        }
        return self._object(
            status,
            [self._message(status, [_text_part(text)])],
            incomplete_details={"reason": "max_output_tokens"} if finish == "length" else None,
            completed_at=int(time.time()) if status == "completed" else None,
            usage=usage,
        )

    def _object(self, status: str, output: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
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

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
