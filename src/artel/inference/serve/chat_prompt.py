"""The prompt of a conversation: OpenAI's messages as the model's chat template writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from artel import text
from artel.errors import InputError
from artel.inference.serve.errors import ApiError
from artel.inference.serve.schema import ChatRequest, Function, Message
from artel.inference.serve.served import ServedModel
from artel.text import Tools
from artel.text.records import BadRecord
from artel.text.tool_calls import parse_call
from artel.tokens.tokenizer.chat_template import TemplateRefuses, prompt_ids
from artel.tokens.tokenizer.template_tools import ToolStyle


def chat_tools(body: ChatRequest) -> Tools:
    """The functions that the model may call."""
    tools = [] if body.tool_choice == "none" else body.tools or []
    return tuple({"type": tool.type, "function": _fields(tool.function)} for tool in tools)


def _fields(function: Function) -> dict[str, Any]:
    """The fields of a function that are part of the prompt: not those of the client, and none without a value.

    Parameters are not copied: `model_dump` takes 0.5 s for 2 MB of them, and other threads wait for it.
    """
    known = {name: getattr(function, name) for name in Function.model_fields}
    return {name: value for name, value in known.items() if value is not None}


def chat_ids(served: ServedModel, body: ChatRequest) -> list[int]:
    """The ids of a conversation and of the beginning of an answer. Raises ApiError."""
    _check_results(body.messages)
    tools = list(chat_tools(body))
    style = served.tool_style
    if tools and (style is None or not style.writes_tools):
        fix = "serve a model whose template does, or train one with chat.template: chatml"
        raise ApiError(400, f"the model's chat template takes no tools; {fix}", "tools")
    style = style or ToolStyle()
    messages = style.linked([as_record(number, message) for number, message in enumerate(body.messages)])
    fields = [
        style.fields(message) | ({"reasoning_content": message.thought} if message.thought else {})
        for message in messages
    ]
    try:
        json.dumps([fields, tools], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "half a character (\\ud800 to \\udfff) is no text", "messages") from None
    except RecursionError:
        pass  # said below
    try:
        return prompt_ids(served.opened.tokenizer, served.template, fields, tools or None)
    except (TemplateRefuses, InputError) as refusal:
        raise ApiError(400, f"the chat template refuses the conversation: {refusal}", "messages") from None
    except RecursionError:
        raise ApiError(400, "the parameters of a function are nested too deeply", "tools") from None


def _check_results(messages: Sequence[Message]) -> None:
    """Raise ApiError for a tool's result that answers no call of the message before the results, as OpenAI does."""
    ids: set[str] = set()
    for number, message in enumerate(messages):
        if message.role != "tool":
            ids = {call.id for call in message.tool_calls or []} if message.role == "assistant" else set()
            continue
        param = f"messages[{number}]"
        if not ids:
            what = "messages with role 'tool' must be a response to a preceding message with 'tool_calls'"
            raise ApiError(400, f"{param}: {what}", f"{param}.role")
        identity = message.tool_call_id
        if identity and identity not in ids:
            what = f"the message before has no call {identity[:100]!r}; its calls are {', '.join(sorted(ids))[:500]}"
            raise ApiError(400, f"{param}.tool_call_id: {what}", f"{param}.tool_call_id")


def as_record(number: int, message: Message) -> text.Message:
    """A message as conversations have it. Raises ApiError."""
    content = message.content
    said = content if isinstance(content, str) else "".join(part.text for part in content or [])
    role = "system" if message.role == "developer" else message.role
    try:
        calls = tuple(parse_call(call.model_dump(include={"id", "function"})) for call in message.tool_calls or [])
    except BadRecord as error:
        raise ApiError(400, error.detail, f"messages[{number}].tool_calls") from None
    thought = message.reasoning_content or ""
    return text.Message(role, said, thought, None, calls, message.name or "", message.tool_call_id or "")
