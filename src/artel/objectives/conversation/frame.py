"""The text that a chat template writes around contents, and the positions of contents in a rendered conversation.

A template renders marks in place of contents. A `Slot` is the position of a mark, a `Frame` all text between the marks,
for conversations of one shape. `locate` uses them to find the contents of a real conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from artel.text import Message

# Marks use Unicode's private use area, which occurs neither in texts nor in templates.
_MARK = re.compile("\ue000([0-9]+)([cta])\ue001")
_EMPTY_THOUGHT = re.compile(r"\s*(?:<(think|thinking|thought|reasoning)>\s*</\1>|<\|channel>thought\s*<channel\|>)\s*")


class ConversationError(Exception):
    """The turns of a conversation cannot be located in its rendered text."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant's turn: the number of its message, and its characters [start, end) in the text."""

    message: int
    start: int
    end: int
    closed: bool
    """True if the template writes an end of turn after it."""
    empty_thought: int = 0
    """End of the tags of an empty thought; `start` if there are none."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first turn whose text differs between training and inference."""

    turn: int
    """Its number among the assistant's turns, from 1."""
    kind: str
    """thought: its thought, or its tags, disappear once the conversation continues; prompt: the text before it changes
    then; unlearned: the turn itself changes then; opening: the generation prompt is longer than the turn's beginning;
    tokens: its tokens differ from those of the text encoded as a whole."""


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A rendered conversation, with its turns."""

    text: str
    turns: tuple[Turn, ...]
    open_end: int
    """The token that ends the last turn if the template does not close it."""
    difference: Difference | None
    results: tuple[tuple[int, int], ...] = ()
    """Characters [start, end) of what tools returned."""
    thoughts: int = 0
    """Number of thoughts in the text; templates may leave out those of earlier turns."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of a message's content, thought or argument, and the template's text before it."""

    before: str
    message: int
    kind: str
    """c, t or a."""


@dataclass(frozen=True, slots=True)
class Frame:
    """All text that a template writes around conversations of one shape."""

    slots: tuple[Slot, ...]
    """Marks of contents and reasoning."""
    after: str
    places: dict[int, tuple[int, int]]
    """For each learned assistant message its slots [first, end); empty if it only calls tools."""
    prompts: dict[int, str]
    """Per learned assistant message: text from the previous slot to the turn."""
    rests: dict[int, str]
    """Per learned assistant message: text from the turn to the next slot, or the end."""
    closed: dict[int, bool]
    open_end: int
    difference: Difference | None
    after_prompt: bool = False
    """True if the template omits part of the last answer, which is then written after the generation prompt."""


def common_prefix(one: str, other: str) -> str:
    """Return the common prefix of two texts."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:same]


def mark_of(slot: Slot) -> str:
    return make_mark(slot.message, slot.kind)


def make_mark(number: int, kind: str) -> str:
    return f"\ue000{number}{kind}\ue001"


def parse_slots(text: str) -> tuple[list[Slot], str]:
    """Return the slots of a text, and the text after the last."""
    slots, end = [], 0
    for mark in _MARK.finditer(text):
        slots.append(Slot(text[end : mark.start()], int(mark[1]), mark[2]))
        end = mark.end()
    return slots, text[end:]


def locate(text: str, slots: list[Slot], after: str, frame: Frame, messages: Sequence[Message]) -> RenderedConversation:
    """Find the contents in a text, slot by slot. Templates may strip contents, or write them as JSON."""
    if [(slot.message, slot.kind) for slot in slots] != [(slot.message, slot.kind) for slot in frame.slots]:
        raise _unexpected()
    spans: list[tuple[int, int]] = []
    position = 0
    following = [slot.before for slot in slots[1:]] + [after]
    for slot, follows in zip(slots, following, strict=True):
        message = messages[slot.message]
        content = message.thought if slot.kind == "t" else message.content
        as_json = json.dumps(content, ensure_ascii=False)[1:-1]
        stripped = content.strip(), content.rstrip(), content.lstrip("\n"), content.strip("\n"), content.lstrip()
        forms = (content, *stripped, as_json)
        fits = (form for form in forms if text.startswith(slot.before + form + follows, position))
        form = next(fits, None)
        if form is None:
            raise _unexpected()
        begin = position + len(slot.before)
        position = begin + len(form)
        spans.append((begin, position))
    if len(text) != position + len(after):
        raise _unexpected()
    turns = tuple(_turn(number, text, spans, frame) for number in frame.prompts)
    of_tools = (messages[slot.message].role == "tool" for slot in slots)
    results = tuple(span for span, is_result in zip(spans, of_tools, strict=True) if is_result)
    thoughts = sum(slot.kind == "t" for slot in slots)
    return RenderedConversation(text, turns, frame.open_end, frame.difference, results, thoughts)


def _turn(number: int, text: str, spans: list[tuple[int, int]], frame: Frame) -> Turn:
    prompt, rest = frame.prompts[number], frame.rests[number]
    first, end = frame.places[number]
    begin = spans[first - 1][1] if first else 0
    stop = spans[end][0] if end < len(spans) else len(text)
    start, end_of_turn = begin + len(prompt), stop - len(rest)
    if not text.startswith(prompt, begin) or text[end_of_turn:stop] != rest or end_of_turn < start:
        raise _unexpected()
    tags = _EMPTY_THOUGHT.finditer(text, begin, spans[first][0] if first < end else end_of_turn)
    # The generation prompt may have the first of the tags already.
    empty = next((tag.end() for tag in tags if tag.start() <= start < tag.end()), start)
    return Turn(number, start, end_of_turn, frame.closed[number], empty)


def _unexpected() -> ConversationError:
    return ConversationError("the chat template renders this conversation differently from others with the same roles")
