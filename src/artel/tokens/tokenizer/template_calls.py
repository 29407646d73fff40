"""The format of tool calls in a chat template: the text around names and arguments, found by rendering trial calls.

A forced call must have the form that the model has learned: that of its template. The names and arguments of the trials
occur nowhere else in a prompt, so the text between them is the form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from artel.text import Message, ToolCall
from artel.tokens.tokenizer.chat_template import TemplateRejection, TurnEnd, added_tokens, render
from artel.tokens.tokenizer.template_tools import ToolStyle
from artel.tokens.tokenizer.tokenizer import Tokenizer

NUMBER = "\0"
"""Placeholder for any number in the texts of a form."""
_CLOSING_TAG = re.compile(r"\s*</\w+>")
_OPENING_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """The texts around arguments that have a tag each, as Qwen3-Coder and GLM write them."""

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
        """The end of a value, up to the closing tag: `\\n</parameter>`."""
        match = _CLOSING_TAG.match(self.last)
        assert match is not None
        return match[0]


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around the names and arguments of calls, from the beginning of an answer."""

    prefix: str
    """Before the first name."""
    after_name: str
    """Between a name and arguments in JSON; empty if there are `tags`."""
    between_calls: str | None
    """Between the arguments of a call and the name of the next; None if an answer has one call."""
    suffix: str
    """After the last arguments; empty if there are `tags`."""
    tags: ArgumentTags | None = None

    @property
    def prefix_after_text(self) -> str:
        """Before the first name, if the answer has text before its calls."""
        return self.prefix.rpartition("</think>")[2].lstrip()  # a forced call first closes the thought

    @property
    def mark(self) -> str:
        """The tag that opens calls and nothing else, as `<tool_call>` or `[TOOL_CALLS]`; empty if there is none.

        Llama 4's `<|python_start|>` may also open code, and may be left out; gpt-oss writes its header in two
        ways; GigaChat 3's `<|message_sep|>` also ends an answer without calls.
        """
        tag = _OPENING_TAG.match(self.prefix_after_text)
        return tag[0] if tag is not None and "call" in tag[0].lower() else ""


def find_call_form(tokenizer: Tokenizer, template: str, style: ToolStyle, end: TurnEnd) -> CallForm | None:
    """Return the form in which a template writes calls; None if arguments are neither JSON nor have a tag each."""
    trials = _Trials(tokenizer, template, style, end)
    answer = trials.answer(_FIRST)
    if answer is None or answer.count(_FIRST.name) != 1:
        return None
    form = _find_json_form(answer, trials) or _find_tag_form(answer, trials)
    return None if form is None or trials.end_at(form.prefix + form.after_name) is not None else form


_FIRST = ToolCall("triedname", {"triedkey": "triedvalue"})
_SECOND = ToolCall("laidname", {"laidkey": "laid"})


class _Trials:
    """Renders answers that are calls."""

    def __init__(self, tokenizer: Tokenizer, template: str, style: ToolStyle, end: TurnEnd) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._style = style
        texts = [text for text, token_id in added_tokens(tokenizer).items() if token_id in end.ids]
        self._ends = [*texts, *end.texts]
        self._call_ids: list[str] = []  # of the last answer

    def answer(self, *calls: ToolCall) -> str | None:
        """Return the answer of a model that makes these calls, without its end; None if the template rejects them."""
        tools = [_describe_tool(call) for call in calls]
        messages = self._style.link_calls(
            [Message("user", "triedquestion"), Message("assistant", "", tool_calls=calls)]
        )
        self._call_ids = [call.id for call in messages[1].tool_calls]
        try:
            prompt, conversation = self._render(messages[:1], tools, True), self._render(messages, tools, False)
        except TemplateRejection:
            return None
        start = _find_answer_start(prompt, conversation)
        answer = conversation[start:]
        words = [word for call in calls for word in (call.name, *call.arguments, *call.arguments.values())]
        last = max(map(answer.rfind, words))
        end = self.end_at(answer[last:])
        answer = answer[: None if end is None else last + end]
        # The prompt opens a thought, which the answer closes at once (DeepSeek R1).
        opens_thought = "<think>" in prompt[start:] and "</think>" not in prompt[start:]
        return f"\n</think>\n\n{answer.lstrip()}" if opens_thought else answer

    def end_at(self, text: str) -> int | None:
        """Return the position where a turn ends in a text."""
        return min((index for end in self._ends if (index := text.find(end)) >= 0), default=None)

    def without_ids(self, text: str) -> str:
        """Remove ids that models do not write (Mistral), and put NUMBER into those that contain the name."""
        for call_id in self._call_ids if self._style.ids == "nine" else ():
            text = re.sub(rf',\s*"id":\s*"{call_id}"|\[CALL_ID\]{call_id}', "", text)
        return re.sub(r"^:\d+", f":{NUMBER}", text) if self._style.ids == "named" else text

    def _render(self, messages: Sequence[Message], tools: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        fields = [self._style.fields(message) for message in messages]
        return render(self._tokenizer, self._template, fields, add_generation_prompt, tools)


def _find_answer_start(prompt: str, conversation: str) -> int:
    """Return the index where the answer starts, never inside a mark, even if the prompt is not a prefix."""
    if conversation.startswith(prompt):
        return len(prompt)
    common = next(index for index, letter in enumerate(prompt) if conversation[index : index + 1] != letter)
    open_mark = re.search(r"[<\[][^<>\[\]]*$", prompt[:common])
    return common if open_mark is None else open_mark.start()


def _describe_tool(call: ToolCall) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in call.arguments}}
    return {"type": "function", "function": {"name": call.name, "description": "tried", "parameters": parameters}}


def _find_json_form(answer: str, trials: _Trials) -> CallForm | None:
    """Return the form if arguments are a JSON object after the name."""
    texts = _split_at_call(answer, _FIRST)
    if texts is None:
        return None
    prefix, after_name, suffix = map(trials.without_ids, texts)
    between = None  # unless the template writes two calls, both in the same way
    two_calls = trials.answer(_FIRST, _SECOND)
    first = None if two_calls is None else _split_at_call(two_calls, _FIRST)
    second = None if first is None else _split_at_call(first[2], _SECOND)
    if first and second:
        texts_around = [trials.without_ids(text) for text in (*first[:2], *second[1:])]
        if texts_around == [prefix, after_name, after_name, suffix]:
            between = trials.without_ids(second[0])
    return CallForm(prefix, after_name, between, suffix)


def _split_at_call(text: str, call: ToolCall) -> tuple[str, str, str] | None:
    """Return (before the name, between it and the arguments, after them)."""
    (key,) = call.arguments
    match = re.search(rf'{call.name}([^{{]*?)\{{\s*"{key}"\s*:\s*"\w+"\s*\}}', text, re.DOTALL)
    return None if match is None else (text[: match.start()], match[1], text[match.end() :])


def _find_tag_form(answer: str, trials: _Trials) -> CallForm | None:
    """Return the form if each argument has a tag."""
    prefix, _, after = answer.partition("triedname")
    first, _, after = after.partition("triedkey")
    value, _, last = after.partition("triedvalue")
    empty = trials.answer(ToolCall(_FIRST.name, {}))
    more = trials.answer(ToolCall(_FIRST.name, _FIRST.arguments | _SECOND.arguments))
    if empty is None or more is None or not _CLOSING_TAG.match(last) or value.strip() in ("", ":", "="):
        return None
    start = f"{prefix}triedname{first}triedkey{value}triedvalue"
    next_text = more.removeprefix(start).partition("laidkey")[0]
    if more != f"{start}{next_text}laidkey{value}laid{last}":
        return None
    tags = ArgumentTags(empty.removeprefix(prefix + "triedname"), first, value, next_text, last)
    two_calls = trials.answer(_FIRST, _SECOND)
    between = (
        two_calls.removeprefix(answer).partition("laidname")[0]
        if two_calls is not None and two_calls.startswith(answer)
        else None
    )
    return CallForm(prefix, "", between, "", tags)
