"""What a chat template writes around the contents of a conversation, and where the contents of a real one then stand.

A template renders marks in place of contents. A `Slot` is the place of a mark; a `Frame` is all text between them, for
conversations of one shape. `locate` walks along the text of a real conversation by these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from artel.text import Message

# Marks are of Unicode's private use, which texts do not have and templates do not know.
_MARK = re.compile("\ue000([0-9]+)([cta])\ue001")
_EMPTY_THOUGHT = re.compile(r"\s*(?:<(think|thinking|thought|reasoning)>\s*</\1>|<\|channel>thought\s*<channel\|>)\s*")


class Unfit(Exception):
    """A conversation in whose rendered text the turns cannot be located."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant's turn: which message it is, and its characters [start, end) in the whole text."""

    message: int
    start: int
    end: int
    closed: bool
    """Whether the template writes a mark after it that generation stops at, or another end of its own."""
    empty_thought: int = 0
    """Up to where it is the tags of a thought that is not there; `start` if there are none."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first turn that the whole conversation has otherwise than the model sees and writes it when it answers."""

    turn: int
    """Counted over the assistant's turns, from 1."""
    kind: str
    """thought: its thought, or the tags of one, is left out later; prompt: what stands before it is written otherwise
    later; opening: the generation prompt goes on where the turn does not; unlearned: it is written otherwise later;
    tokens: it is learned with other tokens than the text has when it is encoded as a whole."""


@dataclass(frozen=True, slots=True)
class WrittenOut:
    """A conversation as its template writes it."""

    text: str
    turns: tuple[Turn, ...]
    open_end: int
    """The token that ends the last turn where the template does not close it."""
    difference: Difference | None
    results: tuple[tuple[int, int], ...] = ()
    """Characters [start, end) of what tools returned."""
    thoughts: int = 0
    """Thoughts that the template writes; it may leave out those of earlier turns."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for what a message says, thinks or passes as an argument, and the template's own text before it."""

    before: str
    message: int
    kind: str
    """c, t or a."""


@dataclass(frozen=True, slots=True)
class Frame:
    """All that a template writes around conversations of one shape."""

    slots: tuple[Slot, ...]
    """Of contents and thoughts."""
    after: str
    places: dict[int, tuple[int, int]]
    """For each assistant message that is learned: its slots [first, end) among them; none if it only calls."""
    prompts: dict[int, str]
    """And the text between the slot before it and what the model writes."""
    rests: dict[int, str]
    """And the text between the end of its turn and the next slot, or the end."""
    closed: dict[int, bool]
    open_end: int
    difference: Difference | None
    after_prompt: bool = False
    """Whether the template leaves out something of the last answer, which then follows the generation prompt."""


def common_beginning(one: str, other: str) -> str:
    """What both texts begin with."""
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:same]


def mark_of(slot: Slot) -> str:
    return mark_for(slot.message, slot.kind)


def mark_for(number: int, kind: str) -> str:
    return f"\ue000{number}{kind}\ue001"


def slots_of(text: str) -> tuple[list[Slot], str]:
    """The marks of a text, each with what stands before it, and what stands after the last."""
    slots, end = [], 0
    for mark in _MARK.finditer(text):
        slots.append(Slot(text[end : mark.start()], int(mark[1]), mark[2]))
        end = mark.end()
    return slots, text[end:]


def locate(text: str, slots: list[Slot], after: str, frame: Frame, messages: Sequence[Message]) -> WrittenOut:
    """Walk along the real text by slots; templates may take white space off the contents' ends, or write JSON."""
    if [(slot.message, slot.kind) for slot in slots] != [(slot.message, slot.kind) for slot in frame.slots]:
        raise _otherwise()
    spans: list[tuple[int, int]] = []
    at = 0
    following = [slot.before for slot in slots[1:]] + [after]
    for slot, follows in zip(slots, following, strict=True):
        message = messages[slot.message]
        content = message.thought if slot.kind == "t" else message.content
        fits = (form for form in _forms(content) if text.startswith(slot.before + form + follows, at))
        form = next(fits, None)
        if form is None:
            raise _otherwise()
        begin = at + len(slot.before)
        at = begin + len(form)
        spans.append((begin, at))
    if len(text) != at + len(after):
        raise _otherwise()
    turns = tuple(_turn(number, text, spans, frame) for number in frame.prompts)
    of_tools = (messages[slot.message].role == "tool" for slot in slots)
    results = tuple(span for span, is_result in zip(spans, of_tools, strict=True) if is_result)
    thoughts = sum(slot.kind == "t" for slot in slots)
    return WrittenOut(text, turns, frame.open_end, frame.difference, results, thoughts)


def _turn(number: int, text: str, spans: list[tuple[int, int]], frame: Frame) -> Turn:
    prompt, rest = frame.prompts[number], frame.rests[number]
    first, end = frame.places[number]
    begin = spans[first - 1][1] if first else 0
    stop = spans[end][0] if end < len(spans) else len(text)
    start, end_of_turn = begin + len(prompt), stop - len(rest)
    if not text.startswith(prompt, begin) or text[end_of_turn:stop] != rest or end_of_turn < start:
        raise _otherwise()
    tags = _EMPTY_THOUGHT.finditer(text, begin, spans[first][0] if first < end else end_of_turn)
    # The generation prompt may have the first of the tags already.
    empty = next((tag.end() for tag in tags if tag.start() <= start < tag.end()), start)
    return Turn(number, start, end_of_turn, frame.closed[number], empty)


def _otherwise() -> Unfit:
    return Unfit("the chat template writes this conversation otherwise than others of its shape")


def _forms(content: str) -> tuple[str, ...]:
    as_json = json.dumps(content, ensure_ascii=False)[1:-1]
    stripped = content.strip(), content.rstrip(), content.lstrip("\n"), content.strip("\n"), content.lstrip()
    return content, *stripped, as_json
