"""What a chat template writes around the names and arguments of calls. Found out by trying.

A call is forced in the form in which the model has seen calls, which is the one its template writes. The template
renders a call with a name and arguments that occur nowhere else; what stands between them is the form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from artel.text import Message, ToolCall
from artel.tokens.tokenizer.chat_template import TemplateRefuses, TurnEnd, added_tokens, render
from artel.tokens.tokenizer.template_tools import ToolStyle
from artel.tokens.tokenizer.tokenizer import Tokenizer

NUMBER = "\0"
"""Stands for any number in the texts of a form."""
_ASKED = "triedquestion"
_CLOSING_TAG = re.compile(r"\s*</\w+>")


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """The texts around arguments that stand in tags of their own, as Qwen3-Coder and GLM write them."""

    none: str
    """From the name to the end of a call without arguments."""
    first: str
    """From the name to the first argument."""
    value: str
    """From an argument's name to its value."""
    next: str
    """From a value to the next argument."""
    last: str
    """From the last value to the end of the call."""

    @property
    def value_end(self) -> str:
        """What ends a value, up to the closing tag: `\\n</parameter>`."""
        match = _CLOSING_TAG.match(self.last)
        assert match is not None
        return match[0]


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around the names and arguments of calls, from the beginning of an answer."""

    opens: str
    """Before the first name."""
    named: str
    """Between a name and arguments in JSON; empty if there are `tags`."""
    between: str | None
    """Between the arguments of a call and the name of the next; None if an answer has one call."""
    closes: str
    """After the last arguments; empty if there are `tags`."""
    tags: ArgumentTags | None = None


def call_form(tokenizer: Tokenizer, template: str, style: ToolStyle, end: TurnEnd) -> CallForm | None:
    """The form in which a template writes calls; None if it is none that can be forced.

    `end` is what ends an answer. Forms with the arguments in JSON, or each in a tag of its own, can be forced.
    """
    trial = _Trial(tokenizer, template, style, end)
    one = trial.answer(ToolCall("triedname", {"triedkey": "triedvalue"}))
    if one is None or one.count("triedname") != 1:
        return None
    form = _in_json(one, trial) or _in_tags(one, trial)
    if form is None or trial.end_at(form.opens + form.named) is not None:
        return None
    return form


class _Trial:
    """Renders answers that are calls."""

    def __init__(self, tokenizer: Tokenizer, template: str, style: ToolStyle, end: TurnEnd) -> None:
        self._tokenizer, self._template, self._style = tokenizer, template, style
        texts = [text for text, number in added_tokens(tokenizer).items() if number in end.ids]
        self._ends = [*texts, *end.texts]
        self.ids: list[str] = []
        """The ids that the calls of the last answer were given."""

    def answer(self, *calls: ToolCall) -> str | None:
        """What the model would write to call so, up to the end of its turn; None if the template refuses."""
        named = {call.name: _tool(call) for call in calls}
        messages = self._style.linked([Message("user", _ASKED), Message("assistant", "", tool_calls=calls)])
        self.ids = [call.id for call in messages[1].tool_calls]
        try:
            prompt = self._render(messages[:1], list(named.values()), True)
            whole = self._render(messages, list(named.values()), False)
        except TemplateRefuses:
            return None
        begin = _answer_begin(prompt, whole)
        answer = whole[begin:]
        last = max(answer.rfind(text) for call in calls for text in (call.name, *_words(call.arguments)))
        end = self.end_at(answer[last:])
        answer = answer[: None if end is None else last + end]
        # The prompt opens a thought, which the answer closes at once (DeepSeek R1).
        opens_thought = "<think>" in prompt[begin:] and "</think>" not in prompt[begin:]
        return f"\n</think>\n\n{answer.lstrip()}" if opens_thought else answer

    def end_at(self, text: str) -> int | None:
        """Where a turn ends in a text."""
        return min((at for end in self._ends if (at := text.find(end)) >= 0), default=None)

    def without_ids(self, text: str) -> str:
        """The text without ids that models do not write (Mistral), and with any number in those with the name."""
        for identity in self.ids if self._style.ids == "nine" else ():
            text = re.sub(rf',\s*"id":\s*"{identity}"|\[CALL_ID\]{identity}', "", text)
        return re.sub(r"^:\d+", f":{NUMBER}", text) if self._style.ids == "named" else text

    def _render(self, messages: Sequence[Message], tools: list[dict[str, Any]], begin_answer: bool) -> str:
        fields = [self._style.fields(message) for message in messages]
        return render(self._tokenizer, self._template, fields, begin_answer, tools)


def _answer_begin(prompt: str, whole: str) -> int:
    """Where the answer begins in a conversation that should begin as the prompt does; marks stay whole."""
    if whole.startswith(prompt):
        return len(prompt)
    common = next(at for at, sign in enumerate(prompt) if whole[at : at + 1] != sign)
    opened = re.search(r"[<\[][^<>\[\]]*$", prompt[:common])
    return common if opened is None else opened.start()


def _tool(call: ToolCall) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in call.arguments}}
    return {"type": "function", "function": {"name": call.name, "description": "tried", "parameters": parameters}}


def _words(arguments: dict[str, Any]) -> list[str]:
    return [*arguments, *arguments.values()]


def _in_json(one: str, trial: _Trial) -> CallForm | None:
    """The form of calls whose arguments are an object of JSON after the name."""
    first = _parted(one, "triedname", "triedkey")
    if first is None:
        return None
    opens, named, closes = (trial.without_ids(text) for text in first)
    return CallForm(opens, named, _between(opens, named, closes, trial), closes)


def _between(opens: str, named: str, closes: str, trial: _Trial) -> str | None:
    """What stands between two calls in JSON; None if the template writes them otherwise, or one alone."""
    two = trial.answer(ToolCall("triedname", {"triedkey": "triedvalue"}), ToolCall("laidname", {"laidkey": "laid"}))
    first = None if two is None else _parted(two, "triedname", "triedkey")
    second = None if first is None else _parted(first[2], "laidname", "laidkey")
    if first is None or second is None:
        return None
    alike = [trial.without_ids(text) for text in (*first[:2], *second[1:])] == [opens, named, named, closes]
    return trial.without_ids(second[0]) if alike else None


def _parted(text: str, name: str, key: str) -> tuple[str, str, str] | None:
    """(before the name, between it and the arguments, after them)."""
    match = re.search(rf'{name}([^{{]*?)\{{\s*"{key}"\s*:\s*"\w+"\s*\}}', text, re.DOTALL)
    return None if match is None else (text[: match.start()], match[1], text[match.end() :])


def _in_tags(one: str, trial: _Trial) -> CallForm | None:
    """The form of calls whose arguments stand in a tag each."""
    opens, _, after = one.partition("triedname")
    first, _, after = after.partition("triedkey")
    value, _, last = after.partition("triedvalue")
    empty = trial.answer(ToolCall("triedname", {}))
    more = trial.answer(ToolCall("triedname", {"triedkey": "triedvalue", "laidkey": "laid"}))
    if empty is None or more is None or not _CLOSING_TAG.match(last) or value.strip() in ("", ":", "="):
        return None
    following = more.removeprefix(opens + "triedname" + first + "triedkey" + value + "triedvalue")
    tags = ArgumentTags(empty.removeprefix(opens + "triedname"), first, value, following.partition("laidkey")[0], last)
    if more != f"{opens}triedname{first}triedkey{value}triedvalue{tags.next}laidkey{value}laid{last}":
        return None
    two = trial.answer(ToolCall("triedname", {"triedkey": "triedvalue"}), ToolCall("laidname", {"laidkey": "laid"}))
    between = two.removeprefix(one).partition("laidname")[0] if two is not None and two.startswith(one) else None
    return CallForm(opens, "", between, "", tags)
