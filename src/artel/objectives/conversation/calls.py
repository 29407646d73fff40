"""The calls that a model makes in held-out conversations, compared with those of the record.

At each turn of the assistant the model continues the conversation so far. The turn is right if the calls in what it
writes are those of the record: as many, of the same functions, with the same arguments as values of JSON, in any order.
Where the record calls nothing, any call is wrong. Nothing is executed: that is the AST match of the Berkeley Function
Calling Leaderboard (Patil et al. 2025, ICML, "The Berkeley Function Calling Leaderboard"), and its relevance detection.
There a record may allow several values of an argument; here it has one, and texts are equal to the letter.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from artel.objectives.conversation.frame import Unfit
from artel.text import Conversation, Message, ToolCall, Tools
from artel.text.calls.reader import read_calls

_LISTED, _SHOWN = 10, 60  # wrong turns in a table, and characters of each text


@dataclass(frozen=True, slots=True)
class CallTurn:
    """A turn that the model is to write."""

    ids: list[int]
    """The prompt: the conversation up to it."""
    answer: Message
    """The turn of the record."""
    tools: Tools
    asked: str
    """The message before it."""


def source_of(conversation: Conversation) -> dict[str, Any] | None:
    """What a store keeps of a held-out conversation; None for one without tools.

    It is text, for arguments may be numbers that the store's own JSON has no room for.
    """
    if not conversation.tools and not any(message.tool_calls for message in conversation.messages):
        return None
    messages = [asdict(message) for message in conversation.messages]
    return {"conversation": json.dumps({"messages": messages, "tools": conversation.tools})}


def call_turns(
    sources: Iterable[dict[str, Any]], prompt: Callable[[Sequence[Message], Tools], list[int]], most: int
) -> tuple[list[CallTurn], int]:
    """The first `most` turns of the assistant in stored conversations, and how many were left out among them.

    `prompt` gives the ids that the model reads before a turn; a turn before which the template writes none (Unfit) is
    left out. Not counted are turns before any message of somebody else, and those that the data say are not learned.
    """
    turns: list[CallTurn] = []
    left_out = 0
    for source in sources:
        messages, tools = _read(source)
        for number, answer in enumerate(messages):
            if len(turns) == most:
                return turns, left_out
            before = messages[:number]
            is_asked = any(message.role in ("user", "tool") for message in before)
            if answer.role != "assistant" or answer.trained is False or not is_asked:
                continue
            try:
                turns.append(CallTurn(prompt(before, tools), answer, tools, before[-1].content))
            except Unfit:
                left_out += 1
    return turns, left_out


def call_figures(turns: Sequence[CallTurn], texts: Sequence[str]) -> tuple[dict[str, float], dict[str, Any]]:
    """Figures of what a model wrote for the turns, from 0 to 1, and a table of the first turns that are wrong.

    `calls` is the share of turns whose calls are right, `calls_named` of those that call the right functions, whatever
    the arguments; `calls_expected` is `calls` of the turns in which the record calls, absent where there are none.
    """
    read = [read_calls(text, turn.tools) for turn, text in zip(turns, texts, strict=True)]
    right = [same_calls(calls, turn.answer.tool_calls) for turn, (_, calls) in zip(turns, read, strict=True)]
    named = [_names(calls) == _names(turn.answer.tool_calls) for turn, (_, calls) in zip(turns, read, strict=True)]
    expected = [is_right for turn, is_right in zip(turns, right, strict=True) if turn.answer.tool_calls]
    figures = {"calls": sum(right) / len(turns), "calls_named": sum(named) / len(turns)}
    if expected:
        figures["calls_expected"] = sum(expected) / len(expected)
    wrong = [
        {
            "message": _shown(turn.asked),
            "record": _shown(_calls_or_text(turn.answer.tool_calls, turn.answer.content)),
            "model": _shown(_calls_or_text(calls, rest)),
        }
        for turn, (rest, calls), is_right in zip(turns, read, right, strict=True)
        if not is_right
    ]
    return figures, {"tables": {"Wrong calls": wrong[:_LISTED]}} if wrong else {}


def same_calls(calls: Sequence[ToolCall], expected: Sequence[ToolCall]) -> bool:
    """Whether both have the same functions with the same arguments, in any order."""
    left = list(expected)
    for call in calls:
        equal = (place for place, other in enumerate(left) if _is_same_call(call, other))
        place = next(equal, None)
        if place is None:
            return False
        del left[place]
    return not left


def _is_same_call(one: ToolCall, other: ToolCall) -> bool:
    try:
        return one.name == other.name and _is_same(one.arguments, other.arguments)
    except RecursionError:  # what a model nests without end is no argument of a record
        return False


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal: 1 is 1.0, and neither is true."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _names(calls: Iterable[ToolCall]) -> Counter[str]:
    return Counter(call.name for call in calls)


def _read(source: dict[str, Any]) -> tuple[list[Message], Tools]:
    stored = json.loads(source["conversation"])
    messages = [
        Message(**{**fields, "tool_calls": tuple(ToolCall(**call) for call in fields["tool_calls"])})
        for fields in stored["messages"]
    ]
    return messages, tuple(stored["tools"])


def _calls_or_text(calls: Sequence[ToolCall], text: str) -> str:
    return ", ".join(call.written() for call in calls) or text


def _shown(text: str) -> str:
    """The beginning of a text in a line of a table."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"
