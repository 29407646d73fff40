"""Compares the tool calls of a model in held-out conversations with those of the record.

At each assistant turn, the model continues the conversation so far. Its turn is correct if it makes the same calls as
the record: the same functions with the same arguments as JSON values, in any order. If the record has no call, any call
is wrong. Nothing is executed: this is the AST match of the Berkeley Function Calling Leaderboard (Patil et al. 2025,
ICML, "The Berkeley Function Calling Leaderboard"), and its relevance detection. The leaderboard may accept several
values of an argument. Here each has one value, and strings must match exactly.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from artel.objectives.conversation.frame import ConversationError
from artel.text import Conversation, Message, ToolCall, Tools
from artel.text.tool_calls import read_calls

_MAX_TABLE_ROWS, _MAX_TABLE_CHARACTERS = 10, 60  # wrong turns in a table, and characters of each text


@dataclass(frozen=True, slots=True)
class CallTurn:
    """A turn for the model to write."""

    ids: list[int]
    """The prompt: the conversation before the turn."""
    answer: Message
    """The turn of the record."""
    tools: Tools
    question: str
    """The message before the turn."""


def has_tools(messages: Iterable[Message], tools: Tools) -> bool:
    """True if a conversation has tools, or calls of tools."""
    return bool(tools) or any(message.tool_calls for message in messages)


def conversation_reference(conversation: Conversation) -> dict[str, Any]:
    """Return the reference that a store keeps for a held-out conversation.

    The conversation is JSON within JSON, because arguments may be numbers that do not fit the JSON of a store.
    """
    return {"conversation": dump_conversation(conversation.messages, conversation.tools)}


def dump_conversation(messages: Sequence[Message], tools: Tools) -> str:
    """Return a conversation as JSON, for a reference."""
    return json.dumps({"messages": [asdict(message) for message in messages], "tools": tools})


def load_conversation(stored: str) -> tuple[list[Message], Tools]:
    """Return the messages and tools that `dump_conversation` wrote."""
    fields = json.loads(stored)
    messages = [
        Message(**{**message, "tool_calls": tuple(ToolCall(**call) for call in message["tool_calls"])})
        for message in fields["messages"]
    ]
    return messages, tuple(fields["tools"])


def read_conversations(references: Iterable[dict[str, Any]]) -> Iterator[tuple[list[Message], Tools]]:
    """Yield the messages and tools of stored conversations."""
    for reference in references:
        if "conversation" not in reference:  # a prompt without an answer (objective: policy)
            continue
        yield load_conversation(reference["conversation"])


def call_turns(
    references: Iterable[dict[str, Any]], prompt: Callable[[Sequence[Message], Tools], list[int]], max_turns: int
) -> tuple[list[CallTurn], int]:
    """Return the first `max_turns` assistant turns in stored conversations with tools, and the number of skipped turns.

    `prompt` returns the ids that the model reads before a turn. Turns without a prompt (ConversationError) are skipped.
    Turns before the first user or tool message, and turns that the data exclude from training, do not count.
    """
    turns: list[CallTurn] = []
    num_skipped = 0
    for messages, tools in read_conversations(references):
        if not has_tools(messages, tools):
            continue
        for index, answer in enumerate(messages):
            if len(turns) == max_turns:
                return turns, num_skipped
            context = messages[:index]
            has_prompt = any(message.role in ("user", "tool") for message in context)
            if answer.role != "assistant" or answer.trained is False or not has_prompt:
                continue
            try:
                turns.append(CallTurn(prompt(context, tools), answer, tools, context[-1].content))
            except ConversationError:
                num_skipped += 1
    return turns, num_skipped


def call_metrics(turns: Sequence[CallTurn], texts: Sequence[str]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return metrics from 0 to 1 of a model's answers to the turns, and a table of the first wrong turns.

    `calls`: fraction of turns with correct calls. `calls_named`: fraction of turns that call the correct functions with
    any arguments. `calls_expected`: `calls` over the turns in which the record has calls; absent without such turns.
    """
    parsed = [read_calls(text, turn.tools) for turn, text in zip(turns, texts, strict=True)]
    correct = [same_calls(calls, turn.answer.tool_calls) for turn, (_, calls) in zip(turns, parsed, strict=True)]
    same_functions = [
        sorted(call.name for call in calls) == sorted(call.name for call in turn.answer.tool_calls)
        for turn, (_, calls) in zip(turns, parsed, strict=True)
    ]
    expected = [is_correct for turn, is_correct in zip(turns, correct, strict=True) if turn.answer.tool_calls]
    metrics = {"calls": sum(correct) / len(turns), "calls_named": sum(same_functions) / len(turns)}
    if expected:
        metrics["calls_expected"] = sum(expected) / len(expected)
    wrong = [
        {
            "message": _shorten(turn.question),
            "record": _shorten(_calls_or_text(turn.answer.tool_calls, turn.answer.content)),
            "model": _shorten(_calls_or_text(calls, text)),
        }
        for turn, (text, calls), is_correct in zip(turns, parsed, correct, strict=True)
        if not is_correct
    ]
    return metrics, {"tables": {"Wrong calls": wrong[:_MAX_TABLE_ROWS]}} if wrong else {}


def same_calls(calls: Iterable[ToolCall], expected: Iterable[ToolCall]) -> bool:
    """True if both call the same functions with the same arguments, in any order."""
    try:
        return Counter(map(_canonical_form, calls)) == Counter(map(_canonical_form, expected))
    except RecursionError:  # a model may nest arguments too deeply, a record does not
        return False


def _canonical_form(call: ToolCall) -> tuple[str, str]:
    """Return a form that is equal for equal arguments: 1 equals 1.0, and neither equals true."""
    arguments = json.loads(json.dumps(call.arguments), parse_float=_parse_number)
    return call.name, json.dumps(arguments, sort_keys=True)


def _parse_number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _calls_or_text(calls: Sequence[ToolCall], text: str) -> str:
    return ", ".join(call.as_json() for call in calls) or text


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_TABLE_CHARACTERS else f"{line[: _MAX_TABLE_CHARACTERS - 1]}…"
