"""Answers that may speak, and whose calls are held to a form: the grammar, and what is read out of such an answer.

Text is free until the mark with which a form opens its calls, `<tool_call>` or `[TOOL_CALLS]`; from there on nothing
but calls is allowed. A form without a mark (Llama 3) is recognized by its bracket, at the beginning of an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from artel.inference.serve.calls.forced import CannotForce, Texts, call_rules, forced_calls
from artel.inference.serve.calls.read import CallUpdates
from artel.text import Tools
from artel.tokens import Tokenizer
from artel.tokens.tokenizer.chat_template import added_tokens
from artel.tokens.tokenizer.template_calls import CallForm

_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
_BRACKET = re.compile(r"[{\[]")


@dataclass(frozen=True, slots=True)
class _Opening:
    """How calls open after a text."""

    mark: str
    """From here on there are calls."""
    rest: str
    """Between the mark and the first name."""
    is_bare: bool
    """The mark is a bracket, which is one at the beginning of an answer alone."""


def _opening(form: CallForm) -> _Opening:
    opens = form.opens.rpartition("</think>")[2].lstrip()  # a forced call closes the thought before it
    bracket = _BRACKET.search(opens)
    tag = _TAG.match(opens)
    if tag is None and bracket is not None and bracket.start() == 0:
        return _Opening(opens[0], opens[1:], True)
    end = tag.end() if tag is not None else bracket.start() if bracket is not None else len(opens)
    return _Opening(opens[:end], opens[end:], False)


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

    Raises CannotForce for parameters that the form has no place for.
    """
    texts = Texts(tokenizer)
    opening = _opening(form)
    functions = [(tool["function"], bool(tool["function"].get("strict"))) for tool in tools]
    if answer is not None:
        if opening.is_bare:
            raise CannotForce("a model that writes calls as JSON alone, beside a response_format in JSON")
        start = [
            f"start: answer | {texts.of(opening.mark + opening.rest)} calls",
            f"answer: %json {json.dumps(answer)}",
        ]
    else:
        rules = _bare_rules if opening.is_bare else _marked_rules
        start = [*rules(opening, texts, tokenizer, ends)]
    return "\n".join([*start, *call_rules(form, functions, texts, several=several)])


def _bare_rules(opening: _Opening, texts: Texts, tokenizer: Tokenizer, ends: Collection[int]) -> Iterator[str]:
    """The rules of an answer that is text, which no bracket begins, or calls. Text has no control token: it would begin
    calls (`<|python_tag|>`).
    """
    added = tokenizer.hf.added_tokens_decoder
    free = {number for number in added_tokens(tokenizer).values() if not added[number].special} - {*ends}
    yield f"start: TEXT? {'said* ' if free else ''}| {texts.of(opening.mark + opening.rest)} calls"
    if free:
        yield f"said: {_any_of(free)} MORE?"
    yield f"TEXT: /\\s*[^\\s{re.escape(opening.mark)}](?s:.*)/"
    yield "MORE: /(?s:.+)/"


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
    opening = _opening(form)
    return opening.mark + opening.rest if opening.is_bare else opening.mark


def spoken_calls(form: CallForm, tools: Tools) -> CallUpdates:
    """What reads the text and the calls of an answer that such a grammar allows."""
    opening = _opening(form)
    return _AfterText(opening, forced_calls(replace(form, opens=opening.mark + opening.rest), tools))


class _AfterText(CallUpdates):
    """Gives the text before the mark, and hands what follows to the reader of calls."""

    def __init__(self, opening: _Opening, calls: CallUpdates) -> None:
        super().__init__()
        self._opening, self._calls = opening, calls
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
        held, mark = self._held, self._opening.mark
        if self._opening.is_bare:
            begun = held.lstrip()
            self._is_speaking = self._is_speaking or (bool(begun) and not begun.startswith(mark))
            return (held, "") if self._is_speaking else ("", begun)
        said, found, after = held.partition(mark)
        if found:
            return said, found + after
        kept = max(size for size in range(len(mark)) if held.endswith(mark[:size]))
        return held[: len(held) - kept], ""
