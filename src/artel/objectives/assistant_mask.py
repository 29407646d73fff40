"""Where each turn of a conversation stands in the text that a chat template makes of it.

A template is a program, so a turn need not end where its content ends. The template therefore renders the conversation
with marks in place of the contents: the text between the marks is its own. The generation prompt before an assistant's
content belongs to the prompt; the model writes all after it, up to the end of what closes the turn. Then the real
conversation is rendered in one piece, and must have the same frame around the real contents.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from artel.text import Message
from artel.tokens import Tokenizer
from artel.tokens.tokenizer.chat_template import TemplateRefuses, render

# Marks are of Unicode's private use, which texts do not have and templates do not know.
_MARK = re.compile("\ue000([0-9]+)([ct])\ue001")


class Unfit(Exception):
    """A conversation in whose rendered text the turns cannot be located."""


@dataclass(frozen=True, slots=True)
class Turn:
    """An assistant's turn: which message it is, and its characters [start, end) in the whole text."""

    message: int
    start: int
    end: int
    closed: bool
    """Whether the template writes something that closes it, white space apart."""


@dataclass(frozen=True, slots=True)
class WrittenOut:
    """A conversation as its template writes it."""

    text: str
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place for what a message says, or thinks, and the template's own text before it."""

    before: str
    message: int
    is_thought: bool


@dataclass(frozen=True, slots=True)
class _Frame:
    """All that a template writes around conversations of one shape."""

    slots: tuple[_Slot, ...]
    after: str
    prompt_length: dict[int, int]
    """For each assistant message: characters of the text before its first slot that belong to the prompt."""
    closing: dict[int, int]
    """And characters of the text after its last slot that close its turn."""


class Turns:
    """Renders conversations with one template and locates the assistant's turns."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._frames: dict[tuple[tuple[str, bool], ...], _Frame | Unfit] = {}
        self._knows_thoughts = self._writes_thoughts()

    def write(self, messages: Sequence[Message]) -> WrittenOut:
        """The text and the assistant's turns in it. Raises Unfit, with the reason in words."""
        shape = tuple((message.role, bool(message.thought)) for message in messages)
        if shape not in self._frames:
            try:
                self._frames[shape] = self._frame(messages)
            except Unfit as unfit:
                self._frames[shape] = unfit
        frame = self._frames[shape]
        if isinstance(frame, Unfit):
            raise Unfit(*frame.args)
        text = self._render([self._template_fields(message) for message in messages])
        return WrittenOut(text, _turns(text, frame, messages))

    def prompt(self, messages: Sequence[Message]) -> str:
        """The prompt of the next answer: the conversation so far and the opening of its turn. Raises Unfit."""
        return self._render([self._template_fields(message) for message in messages], add_generation_prompt=True)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
        try:
            return render(self._tokenizer, self._template, messages, add_generation_prompt)
        except TemplateRefuses as refusal:
            raise Unfit(f"the chat template refuses it: {refusal}") from None

    def _template_fields(self, message: Message) -> dict[str, str]:
        """A message as templates take it. A template that has no place for thoughts gets them within the content."""
        fields = {"role": message.role, "content": message.content}
        if message.thought and self._knows_thoughts:
            fields["reasoning_content"] = message.thought
        elif message.thought:
            fields["content"] = f"<think>\n{message.thought}\n</think>\n\n{message.content}"
        return fields

    def _writes_thoughts(self) -> bool:
        message = {"role": "assistant", "content": _mark(1, "c"), "reasoning_content": _mark(1, "t")}
        try:
            return _mark(1, "t") in self._render([{"role": "user", "content": _mark(0, "c")}, message])
        except Unfit:
            return False

    def _frame(self, messages: Sequence[Message]) -> _Frame:
        marked = [
            Message(message.role, _mark(number, "c"), _mark(number, "t") if message.thought else "")
            for number, message in enumerate(messages)
        ]
        fields = [self._template_fields(message) for message in marked]
        slots, after = _slots(self._render(fields))
        self._check_order(slots, messages)
        openings, closings = {}, {}
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            own_slots = [place for place, slot in enumerate(slots) if slot.message == number]
            opening = slots[own_slots[0]].before
            follows = slots[own_slots[-1] + 1].before if own_slots[-1] + 1 < len(slots) else after
            openings[number] = self._prompt_length(fields[:number], opening)
            # What closes a turn is what follows it both here and where the conversation ends with it.
            at_end = _slots(self._render(fields[: number + 1]))[1]
            closings[number] = len(_common(follows, at_end).rstrip())
        return _Frame(tuple(slots), after, openings, closings)

    def _prompt_length(self, before: list[dict[str, str]], opening: str) -> int:
        """How much of the text before an assistant's content its generation prompt has already."""
        if any(message["role"] != "system" for message in before):
            prompt = _slots(self._render(before, add_generation_prompt=True))[1]
            if not opening.startswith(prompt):
                raise Unfit("the chat template opens an answer otherwise than its generation prompt does")
            return len(prompt)
        # An assistant that speaks first has no prompt before it: take the generation prompt after a user's turn.
        user = [{"role": "user", "content": _mark(0, "c")}]
        plain, prompt = (
            _slots(self._render(user, add_generation_prompt=wants_prompt))[1] for wants_prompt in (False, True)
        )
        header = prompt.removeprefix(plain)
        if not header or header not in opening:
            raise Unfit("the chat template has no place for an assistant that speaks first")
        return opening.rindex(header) + len(header)

    @staticmethod
    def _check_order(slots: list[_Slot], messages: Sequence[Message]) -> None:
        spoken = [slot.message for slot in slots if not slot.is_thought]
        missing = [messages[number].role for number in range(len(messages)) if number not in spoken]
        if missing:
            raise Unfit(f"the chat template leaves out what the {missing[0]} says")
        # A system message may stand anywhere (Mistral's is written into a user's turn); turns stand in their order.
        turns = [number for number in spoken if messages[number].role != "system"]
        if len(set(spoken)) < len(spoken) or turns != sorted(turns):
            raise Unfit("the chat template repeats turns, or changes their order")


def _common(one: str, other: str) -> str:
    """What both texts begin with."""
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:same]


def _mark(number: int, kind: str) -> str:
    return f"\ue000{number}{kind}\ue001"


def _slots(text: str) -> tuple[list[_Slot], str]:
    """The marks of a text, each with what stands before it, and what stands after the last."""
    slots, end = [], 0
    for mark in _MARK.finditer(text):
        slots.append(_Slot(text[end : mark.start()], int(mark[1]), mark[2] == "t"))
        end = mark.end()
    return slots, text[end:]


def _turns(text: str, frame: _Frame, messages: Sequence[Message]) -> tuple[Turn, ...]:
    """Walk along the real text, frame and contents by turns; templates may take white space off the contents' ends."""
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    at = 0
    following = [slot.before for slot in frame.slots[1:]] + [frame.after]
    for slot, follows in zip(frame.slots, following, strict=True):
        message = messages[slot.message]
        content = message.thought if slot.is_thought else message.content
        opening_end = at + len(slot.before)
        fits = (form for form in _forms(content) if text.startswith(slot.before + form + follows, at))
        form = next(fits, None)
        if form is None:
            raise Unfit("the chat template writes this conversation otherwise than others of its shape")
        if message.role == "assistant":
            starts.setdefault(slot.message, at + frame.prompt_length[slot.message])
            ends[slot.message] = opening_end + len(form) + frame.closing[slot.message]
        at = opening_end + len(form)
    if len(text) != at + len(frame.after):
        raise Unfit("the chat template writes this conversation otherwise than others of its shape")
    return tuple(Turn(number, start, ends[number], frame.closing[number] > 0) for number, start in starts.items())


def _forms(content: str) -> tuple[str, ...]:
    return content, content.strip(), content.rstrip(), content.lstrip("\n"), content.strip("\n"), content.lstrip()
