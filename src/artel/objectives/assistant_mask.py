"""Where each turn of a conversation stands in the text that a chat template makes of it.

A template is a program, so a turn need not end where its content ends. The template therefore renders the conversation
with marks in place of the contents: the text between the marks is its own. The generation prompt before an assistant's
content belongs to the prompt; the model writes all after it, up to the mark that generation stops at. Then the real
conversation is rendered in one piece, and must have the same frame around the real contents.

Some templates write an answer in the history otherwise than it was written: without its thought, or (YandexGPT,
DeepSeek R1) not at all where it is the last one. What the model sees when it answers decides: the common beginning of
the generation prompt and the turn is the prompt, and what a template leaves out of the last answer is written after the
generation prompt itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from artel.text import Message
from artel.tokens import Tokenizer
from artel.tokens.tokenizer.chat_template import TemplateRefuses, added_tokens, render, turn_end

# Marks are of Unicode's private use, which texts do not have and templates do not know.
_MARK = re.compile("\ue000([0-9]+)([ct])\ue001")
_OPEN_TAG = "<think>\n"


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


@dataclass(frozen=True, slots=True)
class Difference:
    """The first turn that the whole conversation has otherwise than the model sees and writes it when it answers."""

    turn: int
    """Counted over the assistant's turns, from 1."""
    kind: str
    """thought: its thought is left out later; prompt: what stands before it is written otherwise later; opening: the
    generation prompt goes on where the turn does not; unlearned: the turn opens otherwise, and is not learned."""


@dataclass(frozen=True, slots=True)
class WrittenOut:
    """A conversation as its template writes it."""

    text: str
    turns: tuple[Turn, ...]
    open_end: int
    """The token that ends the last turn where the template does not close it."""
    difference: Difference | None


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
    """For each assistant message that is learned: characters of the text before its first slot that belong to the
    prompt."""
    closing: dict[int, int]
    """And characters of the text after its last slot that close its turn."""
    open_end: int
    difference: Difference | None
    after_prompt: bool = False
    """Whether the template leaves out something of the last answer, which then follows the generation prompt."""


class Turns:
    """Renders conversations with one template and locates the assistant's turns."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._frames: dict[tuple[tuple[str, bool], ...], _Frame | Unfit] = {}
        self._added = added_tokens(tokenizer)
        ends = turn_end(tokenizer, template)
        self._any_token = _any_of(self._added)
        self._stop_token = _any_of(token for token, number in self._added.items() if number in ends.ids)
        self._stop = _any_of([*(token for token, number in self._added.items() if number in ends.ids), *ends.texts])
        self._thought_field = self._find_thought_field()

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
        fields = [self._template_fields(message) for message in messages]
        if frame.after_prompt:
            text = self._render(fields[:-1], add_generation_prompt=True)
            text += _answer(text, messages[-1].thought, messages[-1].content)
        else:
            text = self._render(fields)
        return WrittenOut(text, _turns(text, frame, messages), frame.open_end, frame.difference)

    def prompt(self, messages: Sequence[Message]) -> str:
        """The prompt of the next answer: the conversation so far and the opening of its turn. Raises Unfit."""
        return self._render([self._template_fields(message) for message in messages], add_generation_prompt=True)

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
        try:
            return render(self._tokenizer, self._template, messages, add_generation_prompt)
        except TemplateRefuses as refusal:
            raise Unfit(f"the chat template refuses it: {refusal}") from None

    def _template_fields(self, message: Message) -> dict[str, str]:
        """A message as the template takes it."""
        fields = {"role": message.role, "content": message.content}
        if message.thought and self._thought_field is not None:
            fields |= _thought_fields(self._thought_field, message.thought, message.content)
        return fields

    def _find_thought_field(self) -> str | None:
        """The field that the template reads a thought from: its own, or the content; None if it writes no thoughts."""
        for field in ("reasoning_content", "thinking", "content"):
            message = {
                "role": "assistant",
                "content": _mark(1, "c"),
                **_thought_fields(field, _mark(1, "t"), _mark(1, "c")),
            }
            with suppress(Unfit):
                if _mark(1, "t") in self._render([{"role": "user", "content": _mark(0, "c")}, message]):
                    return field
        return None

    def _frame(self, messages: Sequence[Message]) -> _Frame:
        marked = [
            Message(message.role, _mark(number, "c"), _mark(number, "t") if message.thought else "")
            for number, message in enumerate(messages)
        ]
        fields = [self._template_fields(message) for message in marked]
        text = self._render(fields)
        last = messages[-1]
        after_prompt = last.role == "assistant" and (
            marked[-1].content not in text or (bool(last.thought) and marked[-1].thought not in text)
        )
        if after_prompt:
            text = self._render(fields[:-1], add_generation_prompt=True)
            text += _answer(text, marked[-1].thought, marked[-1].content)
        slots, after = _slots(text)
        self._check_order(slots, messages)
        openings, closings = {}, {}
        differences: list[Difference] = []
        answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
        for turn, number in enumerate(answers, 1):
            own_slots = [place for place, slot in enumerate(slots) if slot.message == number]
            opening = slots[own_slots[0]].before
            follows = slots[own_slots[-1] + 1].before if own_slots[-1] + 1 < len(slots) else after
            alone = text if number == len(messages) - 1 else self._alone(fields[: number + 1], text)
            if after_prompt and number < len(messages) - 1 and _mark(number, "c") not in alone:
                # Such a template writes no last answer: what an earlier one is there for is to be read, not written.
                differences.append(Difference(turn, "unlearned"))
                continue
            at_end = _slots(alone)[1]
            tag = _OPEN_TAG if messages[number].thought and self._thought_field == "content" else ""
            openings[number] = self._prompt_length(fields[:number], opening.removesuffix(tag))
            # What closes a turn is what follows it both here and where the conversation ends with it.
            closings[number] = self._closing_length(follows, at_end)
            start = text.index(_mark_of(slots[own_slots[0]])) - len(opening) + openings[number]
            end = text.index(_mark_of(slots[own_slots[-1]]))
            kind = self._difference(fields[:number], text, alone, start, end, number)
            if kind:
                differences.append(Difference(turn, kind))
        open_end = self._tokenizer.end_id
        if answers and not closings[answers[-1]] and not after_prompt:
            open_end = self._open_end(fields)
        difference = differences[0] if differences else None
        return _Frame(tuple(slots), after, openings, closings, open_end, difference, after_prompt)

    def _prompt_length(self, before: list[dict[str, str]], opening: str) -> int:
        """How much of the text before an assistant's content its generation prompt has already."""
        if not any(message["role"] != "system" for message in before):
            # An assistant that speaks first has no prompt before it.
            length = self._header_end(opening)
            if length is None:
                raise Unfit("the chat template has no place for an assistant that speaks first")
            return length
        prompt = _slots(self._render(before, add_generation_prompt=True))[1]
        length = None
        if opening.startswith(prompt):
            length = len(prompt)
        elif prompt.startswith(opening) and opening.strip():
            length = len(opening)  # the prompt goes on, with the beginning of a thought, and this turn has none
        if before[-1]["role"] == "assistant":  # of which some templates ask for no answer
            header_end = self._header_end(opening[length or 0 :])
            length = length if header_end is None else (length or 0) + header_end
        if length is None:
            raise Unfit("the chat template opens an answer otherwise than its generation prompt does")
        return length

    def _header_end(self, opening: str) -> int | None:
        """Where an answer's header ends in the text before it: what the generation prompt adds after a user's turn."""
        user = [{"role": "user", "content": _mark(0, "c")}]
        plain, prompt = (
            _slots(self._render(user, add_generation_prompt=wants_prompt))[1] for wants_prompt in (False, True)
        )
        header = prompt[len(self._common(plain, prompt)) :]
        if header and header in opening:
            return opening.rindex(header) + len(header)
        if not header:  # the template writes a generation prompt after every conversation
            header = _common(prompt[::-1], opening[::-1])[::-1]
        if any(opening.endswith(header[:length]) for length in range(len(header), 0, -1) if header[:length].strip()):
            return len(opening)
        return None

    def _closing_length(self, follows: str, at_end: str) -> int:
        """How much of the text after an assistant's content closes its turn: up to where generation stops."""
        common = self._common(follows, at_end)
        if stop := self._stop.search(common):
            return stop.end()
        if common.strip():
            return len(common.rstrip())
        # Nothing is written at the end of a conversation. Within one the next role may be what generation stops at.
        space = len(follows) - len(follows.lstrip())
        stop = self._stop_token.match(follows, space)
        return stop.end() if stop else 0

    def _common(self, one: str, other: str) -> str:
        """What both texts begin with; a token is common as a whole, or not at all."""
        common = _common(one, other)
        for text in (one, other):
            for token in self._any_token.finditer(text):
                if token.start() < len(common) < token.end():
                    common = common[: token.start()]
        return common

    def _alone(self, fields: list[dict[str, str]], whole: str) -> str:
        """A conversation that ends with an answer; the whole one where the template refuses it (no question yet)."""
        try:
            return self._render(fields)
        except Unfit:
            return whole

    def _open_end(self, fields: list[dict[str, str]]) -> int:
        """The token that ends a last turn without a mark: what begins a user's turn after it, or the end token."""
        with suppress(Unfit):
            follows = self._render([*fields, {"role": "user", "content": "\ue002"}]).partition("\ue002")[0]
            follows = _slots(follows)[1].lstrip()
            if stop := self._stop_token.match(follows):
                return self._added[stop[0]]
        return self._tokenizer.end_id

    def _difference(
        self, before: list[dict[str, str]], text: str, alone: str, start: int, end: int, number: int
    ) -> str | None:
        """How the conversation differs from what the model sees, and writes, when it gives the answer `number`."""
        thought = _mark(number, "t")
        if thought in alone and thought not in text:
            return "thought"
        if alone[:end] != text[:end]:
            return "prompt"
        if not any(message["role"] != "system" for message in before):
            return None
        prompt = self._render(before, add_generation_prompt=True)
        if prompt == text[:start]:
            return None
        return "opening" if prompt.startswith(text[:start]) else "prompt"

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


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of the texts, the longest first; nothing where there are none."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or "(?!)")


def _thought_fields(field: str, thought: str, content: str) -> dict[str, str]:
    """A thought as a template reads it from `field`; within the content it stands in tags."""
    return {field: thought if field != "content" else f"{_OPEN_TAG}{thought}\n</think>\n\n{content}"}


def _answer(prompt: str, thought: str, content: str) -> str:
    """What the model writes after a generation prompt. Raises Unfit where the prompt has no place for a thought."""
    if not thought:
        return content
    if not prompt.rstrip().endswith("<think>"):
        raise Unfit("the chat template leaves out what the assistant thinks")
    return f"{thought}\n</think>\n\n{content}"


def _mark_of(slot: _Slot) -> str:
    return _mark(slot.message, "t" if slot.is_thought else "c")


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
        if slot.message in frame.prompt_length:
            starts.setdefault(slot.message, at + frame.prompt_length[slot.message])
            ends[slot.message] = opening_end + len(form) + frame.closing[slot.message]
        at = opening_end + len(form)
    if len(text) != at + len(frame.after):
        raise Unfit("the chat template writes this conversation otherwise than others of its shape")
    return tuple(Turn(number, start, ends[number], frame.closing[number] > 0) for number, start in starts.items())


def _forms(content: str) -> tuple[str, ...]:
    return content, content.strip(), content.rstrip(), content.lstrip("\n"), content.strip("\n"), content.lstrip()
