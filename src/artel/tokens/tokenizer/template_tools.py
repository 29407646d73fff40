"""Tools in chat templates: finds the content that a template renders and its format of calls, by trial renderings.

Templates differ: some take arguments as an object, some as JSON; some need an empty content, some none; and Mistral's
rejects ids that are not nine letters and digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

import xxhash

from artel.text import Message, ToolCall, Tools
from artel.tokens.tokenizer.chat_template import TemplateRejection, render
from artel.tokens.tokenizer.tokenizer import Tokenizer

_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_TOOL = {
    "type": "function",
    "function": {
        "name": "triedname",
        "description": "trieddescription",
        "parameters": {"type": "object", "properties": {"triedkey": {"type": "string", "description": "tried"}}},
    },
}


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """The format in which a template takes messages with calls."""

    arguments_as_text: bool = False
    """True for arguments as JSON, not as an object."""
    empty_content: Literal["text", "none", "absent"] = "text"
    """The content of a message that only has calls."""
    ids: Literal["own", "nine", "named"] = "own"
    """The ids of calls: those of the data; nine letters and digits (Mistral); functions.NAME:0 (Kimi)."""
    writes_tools: bool = True
    writes_results: bool = True

    def link_calls(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with the name and id of the call in each result, and with the required ids in calls."""
        linked: list[Message] = []
        open_calls: list[ToolCall] = []
        by_id: dict[str, ToolCall] = {}  # the calls of the last message, by their old and new ids
        num_calls = 0
        for message_index, message in enumerate(messages):
            if message.tool_calls:
                calls = message.tool_calls
                calls_with_ids = [
                    self._with_id(call, f"{message_index} {index}", num_calls + index)
                    for index, call in enumerate(calls)
                ]
                by_id = {call.id: call for call in calls_with_ids} | {
                    old.id: new for old, new in zip(calls, calls_with_ids, strict=True) if old.id
                }
                num_calls += len(calls)
                open_calls = list(calls_with_ids)
                message = replace(message, tool_calls=tuple(calls_with_ids))
            elif message.role == "tool":
                message = self._with_call(message, open_calls, by_id)
            linked.append(message)
        return linked

    def _with_id(self, call: ToolCall, position: str, call_index: int) -> ToolCall:
        """Return the call with the id that a template needs. `call_index`: index of the call in the conversation."""
        if self.ids == "nine":
            return replace(call, id=_mistral_id(call.id or f"{position} {call.as_json()}"))
        return replace(call, id=f"functions.{call.name}:{call_index}") if self.ids == "named" else call

    def _with_call(self, message: Message, open_calls: list[ToolCall], by_id: dict[str, ToolCall]) -> Message:
        """Return a result with the name and id of its call: the one with its id, else the next open one."""
        call_id = message.tool_call_id
        call = by_id.get(call_id) if call_id else None
        if call not in open_calls:
            call = open_calls[0] if open_calls else None
        if call is None:
            return replace(message, tool_call_id=_mistral_id(call_id) if self.ids == "nine" and call_id else call_id)
        open_calls.remove(call)
        call_id = call.id if self.ids != "own" else call_id or call.id
        return replace(message, name=message.name or call.name, tool_call_id=call_id)

    def fields(self, message: Message) -> dict[str, Any]:
        """Convert a message to the template's format, without its thought."""
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            fields["tool_calls"] = [self._format_call(call) for call in message.tool_calls]
            if not message.content and self.empty_content == "none":
                fields["content"] = None
            elif not message.content and self.empty_content == "absent":
                del fields["content"]
        answers = {"name": message.name, "tool_call_id": message.tool_call_id}
        return fields | {name: value for name, value in answers.items() if value}

    def _format_call(self, call: ToolCall) -> dict[str, Any]:
        arguments = json.dumps(call.arguments, ensure_ascii=False) if self.arguments_as_text else call.arguments
        id_field = {"id": call.id} if call.id else {}
        return {**id_field, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _mistral_id(call_id: str) -> str:
    """Return the id if it is nine letters and digits, else nine derived from it."""
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    digest = xxhash.xxh3_64_intdigest(call_id.encode())
    letters = ""
    for _ in range(9):
        digest, letter = divmod(digest, len(_LETTERS))
        letters += _LETTERS[letter]
    return letters


def tool_style(tokenizer: Tokenizer, template: str) -> ToolStyle | None:
    """Return the format in which a template takes calls; None if it renders none."""
    call = Message("assistant", "", tool_calls=(ToolCall("triedname", {"triedkey": "triedvalue"}),))
    contents: tuple[Literal["text", "none", "absent"], ...] = ("text", "none", "absent")
    ids: tuple[Literal["own", "nine", "named"], ...] = ("own", "nine", "named")
    for kind, as_text, content in product(ids, (False, True), contents):
        style = ToolStyle(as_text, content, kind)
        text = _try_render(tokenizer, template, style, [Message("user", "triedquestion"), call])
        call_text = text.partition("triedquestion")[2]
        is_repr = "{'triedkey': 'triedvalue'}" in call_text and not as_text
        is_object_or_text = not is_repr and '\\"triedkey' not in call_text
        if is_object_or_text and all(mark in call_text for mark in ("triedname", "triedkey", "triedvalue")):
            return _find_abilities(tokenizer, template, style, call)
    return None


def _find_abilities(tokenizer: Tokenizer, template: str, style: ToolStyle, call: Message) -> ToolStyle:
    """Return the style with `writes_tools` and `writes_results` set by trying."""
    question = Message("user", "triedquestion")
    system = Message("system", "triedsystem")  # some templates render tools only with a system message
    texts = (
        _try_render(tokenizer, template, style, messages, (_TOOL,)) for messages in ([question], [system, question])
    )
    tools_text = "".join(texts)
    results = [question, call, Message("tool", "triedresult"), Message("assistant", "triedanswer")]
    results_text = _try_render(tokenizer, template, style, results, (_TOOL,))
    return replace(style, writes_tools="trieddescription" in tools_text, writes_results="triedresult" in results_text)


def _try_render(
    tokenizer: Tokenizer, template: str, style: ToolStyle, messages: list[Message], tools: Tools = ()
) -> str:
    """Render messages; return "" if the template refuses them."""
    try:
        fields = [style.fields(message) for message in style.link_calls(messages)]
        return render(tokenizer, template, fields, False, list(tools) or None)
    except TemplateRejection:
        return ""
