"""The text that a chat template writes around contents, and the positions of contents in a rendered conversation.

A template renders placeholders in place of contents. A `Slot` is the position of a placeholder. A `ConversationFrame`
is all text between the placeholders, for conversations of one shape. `locate` uses both to find the contents of a real
conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from artel.text import Message

SlotKind = Literal["content", "thought", "argument"]
_KINDS: dict[str, SlotKind] = {"c": "content", "t": "thought", "a": "argument"}

# Placeholders use Unicode's private use area, which occurs neither in texts nor in templates.
_PLACEHOLDER = re.compile("\ue000([0-9]+)([cta])\ue001")
_EMPTY_THOUGHT = re.compile(r"\s*(?:<(think|thinking|thought|reasoning)>\s*</\1>|<\|channel>thought\s*<channel\|>)\s*")


class ConversationError(Exception):
    """A conversation cannot be trained on, e.g. because its turns cannot be located in the rendered text."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant's turn: the index of its message, and its characters [start, end) in the text."""

    message: int
    start: int
    end: int
    is_closed: bool
    """True if the template writes an end of turn after it."""
    empty_thought: int = 0
    """End of the tags of an empty thought; `start` if there are none."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first turn whose text differs between training and inference."""

    turn: int
    """Number among the assistant's turns, from 1."""
    kind: str
    """The kind of difference:

    - thought: the thought or its tags disappear once the conversation continues;
    - prompt: the text before the turn changes once the conversation continues;
    - unlearned: the turn itself changes once the conversation continues;
    - opening: the generation prompt is longer than the beginning of the turn;
    - tokens: the tokens of the turn differ from those of the full text encoded at once.
    """


@dataclass(frozen=True, slots=True)
class RenderedConversation:
    """A rendered conversation, with its turns."""

    text: str
    turns: tuple[Turn, ...]
    open_end: int
    """The token that ends the last turn if the template does not close it."""
    difference: Difference | None
    results: tuple[tuple[int, int], ...] = ()
    """Characters [start, end) of the results of tools."""
    thoughts: int = 0
    """Number of thoughts in the text; templates may leave out those of earlier turns."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of a message's content, thought or argument, and the template's text before it."""

    before: str
    message: int
    kind: SlotKind

    @property
    def placeholder(self) -> str:
        return make_placeholder(self.message, self.kind)


@dataclass(frozen=True, slots=True)
class TurnFrame:
    """The text that a template writes around one assistant message, and the slots of the message."""

    first_slot: int
    end_slot: int
    """End of its slots, exclusive. Equal to `first_slot` if the message only calls tools."""
    prompt: str
    """Text from the previous slot to the turn."""
    suffix: str
    """Text from the turn to the next slot, or to the end."""
    is_closed: bool
    """True if the template writes an end of turn after it."""


@dataclass(frozen=True, slots=True)
class ConversationFrame:
    """All text that a template writes around the contents of conversations with one shape."""

    slots: tuple[Slot, ...]
    """Slots of contents and thoughts."""
    after: str
    """Text after the last slot."""
    turns: dict[int, TurnFrame]
    """The learned assistant messages, by index."""
    open_end: int
    difference: Difference | None
    after_prompt: bool = False
    """True if the template omits part of the last answer, which is then written after the generation prompt."""


def common_prefix(first: str, second: str) -> str:
    """Return the common prefix of two texts."""
    pairs = zip(first, second, strict=False)
    length = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return first[:length]


def make_placeholder(message: int, kind: SlotKind) -> str:
    """Return the text that stands for a content, thought or argument of a message while the template is rendered."""
    return f"\ue000{message}{kind[0]}\ue001"


def parse_slots(text: str) -> tuple[list[Slot], str]:
    """Return the slots of a text, and the text after the last slot."""
    slots, end = [], 0
    for match in _PLACEHOLDER.finditer(text):
        slots.append(Slot(text[end : match.start()], int(match[1]), _KINDS[match[2]]))
        end = match.end()
    return slots, text[end:]


def locate(
    text: str, slots: list[Slot], after: str, frame: ConversationFrame, messages: Sequence[Message]
) -> RenderedConversation:
    """Find the contents in a text, slot by slot. Templates may strip contents, or write them as JSON."""
    if [(slot.message, slot.kind) for slot in slots] != [(slot.message, slot.kind) for slot in frame.slots]:
        raise _shape_error()
    spans: list[tuple[int, int]] = []
    position = 0
    texts_after = [slot.before for slot in slots[1:]] + [after]
    for slot, text_after in zip(slots, texts_after, strict=True):
        message = messages[slot.message]
        content = message.thought if slot.kind == "thought" else message.content
        as_json = json.dumps(content, ensure_ascii=False)[1:-1]
        stripped = content.strip(), content.rstrip(), content.lstrip("\n"), content.strip("\n"), content.lstrip()
        variants = (content, *stripped, as_json)
        matches = (variant for variant in variants if text.startswith(slot.before + variant + text_after, position))
        variant = next(matches, None)
        if variant is None:
            raise _shape_error()
        start = position + len(slot.before)
        position = start + len(variant)
        spans.append((start, position))
    if len(text) != position + len(after):
        raise _shape_error()
    turns = tuple(_locate_turn(message, text, spans, turn) for message, turn in frame.turns.items())
    results = tuple(span for span, slot in zip(spans, slots, strict=True) if messages[slot.message].role == "tool")
    thoughts = sum(slot.kind == "thought" for slot in slots)
    return RenderedConversation(text, turns, frame.open_end, frame.difference, results, thoughts)


def _locate_turn(message: int, text: str, spans: list[tuple[int, int]], turn: TurnFrame) -> Turn:
    previous_end = spans[turn.first_slot - 1][1] if turn.first_slot else 0
    next_start = spans[turn.end_slot][0] if turn.end_slot < len(spans) else len(text)
    start = previous_end + len(turn.prompt)
    end = next_start - len(turn.suffix)
    if not text.startswith(turn.prompt, previous_end) or text[end:next_start] != turn.suffix or end < start:
        raise _shape_error()
    search_end = spans[turn.first_slot][0] if turn.first_slot < turn.end_slot else end
    tags = _EMPTY_THOUGHT.finditer(text, previous_end, search_end)
    # The generation prompt may already contain the opening tag.
    empty_thought_end = next((tag.end() for tag in tags if tag.start() <= start < tag.end()), start)
    return Turn(message, start, end, turn.is_closed, empty_thought_end)


def _shape_error() -> ConversationError:
    return ConversationError("the chat template renders this conversation differently from others with the same roles")
