"""Calls beside the parameters that their functions declare, compared before the first step.

Such calls are learned all the same: published data sets have some, and a schema may be what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from artel.text import Conversation, Document, ToolCall, Tools


def call_notes(documents: Iterable[Document]) -> list[str]:
    """A sentence about the calls of conversations that do not fit their declared parameters; none where all do.

    Turns that are not learned may call what they like.
    """
    looked_at = calls = unfit = 0
    first = ""
    for document in documents:
        looked_at += 1
        conversation = document.record.fields
        assert isinstance(conversation, Conversation)
        learned = (message for message in conversation.messages if message.trained is not False)
        for call in (call for message in learned for call in message.tool_calls):
            calls += 1
            if wrong := misfit(call, conversation.tools):
                unfit += 1
                first = first or f"{document.record.origin}: {wrong}"
    if not unfit:
        return []
    count = f"{unfit:,} of {calls:,} calls in the first {looked_at:,} conversations"
    return [f"{count} do not fit the parameters that their tool declares, the first {first}"]


def misfit(call: ToolCall, tools: Tools) -> str:
    """How the arguments of a call differ from its function's parameters: those that are required and lack, and those
    that the function does not list. Empty where there is no difference, or no list of parameters.
    """
    declared = [tool["function"] for tool in tools if tool.get("function", {}).get("name") == call.name]
    schema: Any = declared[0].get("parameters") if declared else None
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not (isinstance(properties, dict) and properties):
        return ""
    required = schema.get("required")
    lacking = [str(name) for name in (required if isinstance(required, list) else []) if name not in call.arguments]
    unknown = [] if schema.get("additionalProperties") else [name for name in call.arguments if name not in properties]
    differs = [f"lacks {', '.join(lacking)}"] if lacking else []
    differs += [f"has {', '.join(unknown)}, which it does not declare"] if unknown else []
    return f"{call.name} {' and '.join(differs)}" if differs else ""
