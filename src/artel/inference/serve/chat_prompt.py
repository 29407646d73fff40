"""The prompt of a conversation: OpenAI's messages as the model's chat template writes them."""

from __future__ import annotations

import json
from typing import Any

from artel.errors import InputError
from artel.inference.serve.errors import ApiError
from artel.inference.serve.schema import ChatRequest, Message
from artel.inference.serve.served import ServedModel
from artel.tokens.tokenizer.chat_template import TemplateRefuses, prompt_ids


def chat_ids(served: ServedModel, body: ChatRequest) -> list[int]:
    """The ids of a conversation and of the beginning of an answer. Raises ApiError."""
    tools = None if body.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in body.tools or []]
    if tools and "tools" not in served.template:
        raise ApiError(400, "the model's chat template takes no tools", "tools")
    messages = [_as_template(number, message) for number, message in enumerate(body.messages)]
    try:
        return prompt_ids(served.opened.tokenizer, served.template, messages, tools or None)
    except (TemplateRefuses, InputError) as refusal:
        raise ApiError(400, f"the chat template refuses the conversation: {refusal}", "messages") from None


def _as_template(number: int, message: Message) -> dict[str, Any]:
    """A message as templates know it: text, and arguments of tools as objects. Raises ApiError."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or [])
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": text}
    if message.reasoning_content:
        fields["reasoning_content"] = message.reasoning_content
    if message.name:
        fields["name"] = message.name
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(number, call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return fields


def _arguments(number: int, arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        where = f"messages[{number}].tool_calls"
        raise ApiError(400, "arguments of a tool call are no JSON", where) from None
