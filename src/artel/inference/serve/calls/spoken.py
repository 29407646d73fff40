"""Answers that may speak, and whose calls are held to a form: the grammar, and what is read out of such an answer.

Text is free until the mark with which a form opens its calls, `<tool_call>` or `[TOOL_CALLS]`; from there on nothing
but calls is allowed. Forms whose mark a model may leave out or write otherwise (Llama, gpt-oss), or that also ends what
is only said (GigaChat 3), are not held.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from artel.inference.serve.calls.forced import Texts, call_rules, forced_calls
from artel.inference.serve.calls.read import CallUpdates
from artel.inference.serve.grammar import WRITTEN
from artel.text import Tools
from artel.tokens import Tokenizer
from artel.tokens.tokenizer.chat_template import added_tokens
from artel.tokens.tokenizer.template_calls import CallForm

_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")


@dataclass(frozen=True, slots=True)
class _Opening:
    """How calls open after a text."""

    mark: str
    """From here on there are calls."""
    rest: str
    """Between the mark and the first name."""


def has_mark(form: CallForm) -> bool:
    """Whether calls always open with a tag, which opens nothing else.

    `<|python_start|>` may also open code, and Llama 4 may leave it out; gpt-oss writes its header in two ways; GigaChat
    3's `<|message_sep|>` also ends an answer that calls nothing.
    """
    return "call" in _opening(form).mark.lower()


def _opening(form: CallForm) -> _Opening:
    opens = form.opens.rpartition("</think>")[2].lstrip()  # a forced call closes the thought before it
    tag = _TAG.match(opens)
    end = 0 if tag is None else tag.end()
    return _Opening(opens[:end], opens[end:])


def spoken_grammar(
    form: CallForm,
    tools: Tools,
    tokenizer: Tokenizer,
    ends: Collection[int],
    *,
    several: bool,
    answer: dict[str, Any] | None = None,
) -> str:
    """A grammar of answers that are text, calls of `tools`, or text and then calls, one or `several`.

    The arguments of a function that is `strict` fit its schema, and those of others are any object. `ends` are the ids
    that end an answer. With `answer`, a schema, an answer is calls or JSON that fits it.

    Raises CannotForce for parameters that the form has no place for. The form has a mark.
    """
    texts = Texts(tokenizer)
    opening = _opening(form)
    functions = [(tool["function"], bool(tool["function"].get("strict"))) for tool in tools]
    if answer is not None:
        start = [
            f"start: answer | {texts.of(opening.mark + opening.rest)} calls",
            f"answer: %json {json.dumps({'x-guidance': WRITTEN} | answer)}",
        ]
    else:
        start = [*_marked_rules(opening, texts, tokenizer, ends)]
    return "\n".join([*start, *call_rules(form, functions, texts, several=several)])


def _any_of(ids: Collection[int]) -> str:
    return f"<[{','.join(map(str, sorted(ids)))}]>"


def _marked_rules(opening: _Opening, texts: Texts, tokenizer: Tokenizer, ends: Collection[int]) -> Iterator[str]:
    """The rules of an answer that begins with text. The mark stands in no text, neither as a token nor in letters."""
    mark = re.escape(opening.mark).replace("/", "\\/")
    added = added_tokens(tokenizer)
    free = {number for text, number in added.items() if text != opening.mark} - {*ends}
    yield f"start: {'said* ' if free else ''}(TEXT? | begin {texts.of(opening.rest)} calls)"
    if free:
        yield f"said: TEXT? {_any_of(free)}"
    yield f"TEXT: /(?s:.+)/ & ~/(?s:.*){mark}(?s:.*)/"
    if opening.mark in added:
        yield f"begin: TEXT? {texts.of(opening.mark)}"
    else:
        yield "begin[lazy]: MARKED"
        yield f"MARKED: /(?s:.*){mark}/"


def opening_text(form: CallForm) -> str:
    """The text after which an answer is calls."""
    return _opening(form).mark


def spoken_calls(form: CallForm, tools: Tools, *, at_once: bool = False) -> CallUpdates:
    """What reads the text and the calls of an answer that such a grammar allows.

    `at_once`: calls begin the answer, or it has none; JSON may mention the mark.
    """
    opening = _opening(form)
    return _AfterText(opening.mark, forced_calls(replace(form, opens=opening.mark + opening.rest), tools), at_once)


class _AfterText(CallUpdates):
    """Gives the text before the mark, and hands what follows to the reader of calls."""

    def __init__(self, mark: str, calls: CallUpdates, at_once: bool) -> None:
        super().__init__()
        self._mark, self._calls, self._at_once = mark, calls, at_once
        self._held = ""
        self._is_calling = self._is_speaking = False

    def add(self, text: str) -> str:
        """The text that is no call, as far as that is certain."""
        if self._is_calling:
            self._calls.add(text)
            self.count = self._calls.count
            return ""
        self._held += text
        said, calls = self._parted()
        if calls:
            self._held, self._is_calling = "", True
            return said + self.add(calls)
        self._held = self._held[len(said) :]
        return said

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held

    def updates(self) -> list[dict[str, Any]]:
        return self._calls.updates()

    def _parted(self) -> tuple[str, str]:
        """What is text for certain, and what is calls; between them stands what may become a mark."""
        held, mark = self._held, self._mark
        if self._at_once:
            begun = held.lstrip()
            self._is_speaking = self._is_speaking or not mark.startswith(begun[: len(mark)])
            if self._is_speaking:
                return held, ""
            return "", begun if begun.startswith(mark) else ""
        said, found, after = held.partition(mark)
        if found:
            return said, found + after
        kept = max(size for size in range(len(mark)) if held.endswith(mark[:size]))
        return held[: len(held) - kept], ""
