"""A file of prompts: a text with a prompt a line, or JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from artel.errors import InputError, Problem
from artel.storage import check_regular, user_path

_KEY = "--prompts"
_JSON = (".jsonl", ".ndjson", ".json")
RESERVED = ("text", "finish_reason", "tokens")
"""Fields that the results have beside those of the prompts."""
_SHOWN_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """A line of the file. It has a text, or messages."""

    place: str
    """FILE:LINE."""
    fields: dict[str, Any]
    """What the result begins with: the line's own."""
    text: str = ""
    """What is to be continued or filled, or the question."""
    messages: list[dict[str, str]] | None = None
    context: str | None = None
    """The text that answers the question."""


class _BadLine(Exception):
    """What is wrong with a line, and what to write instead."""


def read_prompts(name: str) -> list[Prompt]:
    """All prompts of a file; empty lines are none. Raises InputError, with all lines that are wrong."""
    parse = _json_prompt if name.lower().endswith(_JSON) else _text_prompt
    prompts, problems = [], []
    for place, line in _lines(name):
        try:
            prompts.append(parse(place, _decoded(line)))
        except _BadLine as error:
            problems.append(Problem(place, *error.args))
    refuse(problems)
    if not prompts:
        raise InputError.at(_KEY, f"{name} has no prompts", "write one on each line")
    return prompts


def refuse(problems: list[Problem]) -> None:
    """Raise InputError with the problems of lines, if there are any; the first of very many."""
    more = len(problems) - _SHOWN_PROBLEMS
    if more > 0:
        problems = [*problems[:_SHOWN_PROBLEMS], Problem(_KEY, f"{more:,} more lines are wrong")]
    if problems:
        raise InputError(problems)


def _lines(name: str) -> Iterator[tuple[str, bytes]]:
    path = user_path(name, _KEY)
    check_regular(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError.at(_KEY, f"{name} cannot be read: {error.strerror}", "give a file of prompts") from None
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            yield f"{name}:{number}", line.removesuffix(b"\r")


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise _BadLine(f"is not UTF-8 (byte {error.start + 1} of the line)", "save it as UTF-8") from None


def _text_prompt(place: str, line: str) -> Prompt:
    return Prompt(place, {"prompt": line}, line)


def _json_prompt(place: str, line: str) -> Prompt:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"is not JSON: {error}", "write one object per line, or name the file .txt") from None
    if not isinstance(fields, dict):
        raise _BadLine(f"is {type(fields).__name__}, not an object", 'write {"prompt": "…"}')
    taken = [name for name in RESERVED if name in fields]
    if taken:
        raise _BadLine(f"has a field {taken[0]!r}, which the result is to have", "call it otherwise")
    kinds = [name for name in _KINDS if name in fields]
    if len(kinds) != 1:
        what = f"has {' and '.join(kinds)}" if kinds else f"has none of the fields {', '.join(_KINDS)}"
        raise _BadLine(what, 'write {"prompt": "…"}, {"messages": […]} or {"question": "…", "context": "…"}')
    return _KINDS[kinds[0]](place, fields)


def _of_text(place: str, fields: dict[str, Any]) -> Prompt:
    return Prompt(place, fields, _text(fields, "prompt"))


def _of_question(place: str, fields: dict[str, Any]) -> Prompt:
    if "context" not in fields:
        raise _BadLine("has a question and no context", "give the text that answers it as context")
    return Prompt(place, fields, _text(fields, "question"), context=_text(fields, "context"))


def _of_messages(place: str, fields: dict[str, Any]) -> Prompt:
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise _BadLine("its messages are no list of objects", 'write [{"role": "user", "content": "…"}]')
    turns = []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise _BadLine(f"messages[{number}] has no role and content", 'write {"role": "user", "content": "…"}')
        where = f"messages[{number}]."
        turns.append({name: _text(message, name, where) for name in ("role", "content")})
    if turns[-1]["role"] == "assistant":
        raise _BadLine("the last message is the assistant's own", "leave it out: it is what the model is to write")
    return Prompt(place, fields, messages=turns)


_KINDS: dict[str, Callable[[str, dict[str, Any]], Prompt]] = {
    "prompt": _of_text,
    "messages": _of_messages,
    "question": _of_question,
}


def _text(fields: dict[str, Any], name: str, where: str = "") -> str:
    text = fields[name]
    if not isinstance(text, str):
        raise _BadLine(f"{where}{name} is {type(text).__name__}, not text", "write it in quotes")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _BadLine(f"{where}{name} holds half a character (\\ud800 to \\udfff)", "mend it") from None
    return text
