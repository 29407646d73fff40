"""Rows of chat data to conversations: the common forms, told by a row's fields, or a function of the user's own.

What is decided here, besides what `turns` does:
- What follows the assistant's last turn is left out and counted, since nothing answers it; a row without any answer is
  rejected.
- An assistant may speak first (the greeting of a role-play).
- Of a tree of replies the main branch is taken: at each message the reply of the lowest rank, the first where none has
  one; deleted replies are passed over. All paths of a tree would repeat its beginnings.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from artel.config import SourceConfig
from artel.errors import InputError, Problem
from artel.text.formats.turns import THOUGHT_FIELDS, RowReader, Turn, WrongRow, names_of
from artel.text.records import Conversation, Message, Preference, Record

Named = tuple[str, "list[Turn] | WrongRow"]
"""Where in a row the turns of a conversation stand (empty where the row is one), or what is wrong with them."""

OwnConverter = Callable[[dict[str, Any]], Any]

_CONVERTERS_OF_PREFERENCES = ("messages", "alpaca", "sharegpt")


def record_of(fields: Conversation | Preference, origin: str, set_name: str) -> Record:
    """The record of a conversation or preference.

    Its text is all that is said in it. What begins with the same question (of preferences: has the same prompt) falls
    into one part of the data: a model must not have learned the answers that it is judged by.
    """
    if isinstance(fields, Conversation):
        question = next(message.content for message in fields.messages if message.role == "user")
        return Record(_said(fields.messages), origin, set_name, fields, group=question)
    answers = [answer for answer in (fields.chosen, fields.rejected) if answer is not None]
    return Record(_said((*fields.prompt, *answers)), origin, set_name, fields, group=_said(fields.prompt))


def _said(messages: Iterable[Message]) -> str:
    return "\n\n".join(text for message in messages for text in (message.thought, message.content) if text)


def check_converter(source: SourceConfig, where: str) -> list[Problem]:
    """What is wrong with `converter` of a source; a function of the user's own is imported."""
    if source.format not in ("chat", "preference") or source.converter == "auto":
        return []
    known = tuple(_FORMS) if source.format == "chat" else _CONVERTERS_OF_PREFERENCES
    if ":" in source.converter:
        try:
            own_converter(source.converter, f"{where}.converter")
        except InputError as error:
            return list(error.problems)
        return []
    if source.converter in known:
        return []
    what = f"there is no converter {source.converter!r} of format {source.format}"
    return [Problem(f"{where}.converter", what, f"write auto, {', '.join(known)}, or module:function")]


def own_converter(converter: str, where: str) -> OwnConverter:
    """The user's function `module:function`, looked for in the working folder too. Raises InputError."""
    module, _, name = converter.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a file here must not stand in for a module that others import
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:  # the module is the user's: anything may go wrong in it
        what = f"{module!r} cannot be imported: {type(error).__name__}: {error}"
        fix = f"write module:function; the module is looked for in {here} and on PYTHONPATH"
        raise InputError.at(where, what, fix) from None
    if not callable(found):
        fix = f"define {name}(row) there; it is given a row and returns a list of {{role, content}}"
        raise InputError.at(where, f"{module!r} has no function {name!r}", fix)
    return found


def converter_file(source: SourceConfig, where: str) -> list[Path]:
    """The file of the user's function, where the source has one: other code makes other conversations."""
    if source.format not in ("chat", "preference") or ":" not in source.converter:
        return []
    own_converter(source.converter, f"{where}.converter")
    file = sys.modules[source.converter.partition(":")[0]].__file__
    return [Path(file)] if file else []


def converted(own: OwnConverter, converter: str, row: dict[str, Any]) -> Any:
    """What the user's function makes of a row. Anything that it raises costs the row only: WrongRow."""
    try:
        return own(row)
    except Exception as error:
        what = f"{converter} failed on it: {type(error).__name__}: {error}"
        raise WrongRow("converter_failed", f"{what}; mend the function, or leave the row out") from None


class Converter:
    """Rows of one source to conversations, by its `converter`."""

    def __init__(self, source: SourceConfig) -> None:
        self._name = source.converter
        self._own = own_converter(source.converter, "converter") if ":" in source.converter else None
        self._reader = RowReader(source)

    def conversations(self, row: Any) -> Iterator[tuple[str, Conversation | WrongRow]]:
        """(place in the row, conversation) of each that the row holds. Raises WrongRow for a row of no use at all."""
        for path, turns in self._turns(self._reader.named(row)):
            try:
                if isinstance(turns, WrongRow):
                    raise turns
                yield path, _conversation(self._reader.messages(turns))
            except WrongRow as wrong:
                yield path, wrong

    def _turns(self, row: dict[str, Any]) -> Iterable[Named]:
        if self._own is not None:
            found = converted(self._own, self._name, row)
            found = found.get("messages") if isinstance(found, dict) else found
            return [("", self._reader.turns(found, f"what {self._name} returned"))]
        return _FORMS[_form_of(row) if self._name == "auto" else self._name](self._reader, row)


def _conversation(messages: list[Message]) -> Conversation:
    if not messages:
        raise WrongRow("empty_conversation", "has no messages; leave it out")
    if all(message.role != "user" for message in messages):
        raise WrongRow("no_question", "has no message of the user; an answer needs a question, write one before it")
    last = max((number for number, message in enumerate(messages) if message.role == "assistant"), default=-1)
    kept = tuple(messages[: last + 1])
    if not any(message.role == "user" for message in kept):
        raise WrongRow("no_answer", "has no answer of the assistant to the user; write one, or leave it out")
    return Conversation(kept, len(messages) - len(kept))


# The forms of rows


def _form_of(row: dict[str, Any]) -> str:
    """The converter of a row, by the fields it has."""
    told_by = {
        "messages": ("messages",), "sharegpt": ("conversations", "conversation"),
        "character": ("dialogues", "example_dialogue"),
    }  # fmt: skip
    for form, names in told_by.items():
        if any(row.get(name) is not None for name in names):
            return form
    if isinstance(row.get("prompt"), dict):
        return "oasst"
    if isinstance(row.get("role"), list) and isinstance(row.get("content"), list):
        return "dialog"
    if "instruction" in row:
        return "alpaca"
    fix = "name its fields (mapping: {instruction: question, output: answer}), or write converter: module:function"
    raise WrongRow("unknown_form", f"is no conversation of a known form (it has: {names_of(row)}); {fix}")


def _messages(reader: RowReader, row: dict[str, Any]) -> Iterable[Named]:
    return _listed(reader, row, ("messages",))


def _sharegpt(reader: RowReader, row: dict[str, Any]) -> Iterable[Named]:
    return _listed(reader, row, ("conversations", "conversation"))


def _dialog(reader: RowReader, row: dict[str, Any]) -> Iterable[Named]:
    if isinstance(row.get("role"), list):
        columns = {name: row[name] for name in ("role", "content") if name in row}
        return [("", [*reader.system(row), *reader.turns(columns, "the row")])]
    return _listed(reader, row, ("messages", "conversation", "conversations"))


def _listed(reader: RowReader, row: dict[str, Any], names: tuple[str, ...]) -> Iterable[Named]:
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        theirs = reader.mapping.get(names[0], names[0])
        fix = f"write mapping: {{{names[0]}: NAME}}, or another converter"
        raise WrongRow("no_field", f"has no field {theirs!r} (it has: {names_of(row)}); {fix}")
    return [("", [*reader.system(row), *reader.turns(row[name], name)])]


def _alpaca(reader: RowReader, row: dict[str, Any]) -> Iterable[Named]:
    def answer(fields: dict[str, Any], path: str = "") -> Turn:
        thought = {name: fields[name] for name in THOUGHT_FIELDS if name in fields}
        return {"role": "assistant", "content": reader.text(fields, "output", path), **thought}

    if "instances" in row:  # self-instruct: one instruction, and several times what it is given and answered
        return _each(row, "instances", lambda item, path: [*reader.question(row, item), answer(item, path)])
    return [("", [*reader.question(row), answer(row)])]


def _character(reader: RowReader, row: dict[str, Any]) -> Iterable[Named]:
    """Role-play, a conversation a dialogue. The system message is the context, after the name where it lacks that."""
    name, context = reader.optional(row, "name"), reader.optional(row, "context")
    said = "\n\n".join(part for part in ("" if name in context else name, context) if part.strip())
    who = [{"role": "system", "content": said}]
    if row.get("dialogues"):
        return _each(row, "dialogues", lambda item, path: [*who, *reader.turns(item.get("chat"), f"{path}.chat")])
    if not row.get("example_dialogue"):
        fix = "give it dialogues, or leave it out"
        raise WrongRow("empty_conversation", f"has neither dialogues nor an example_dialogue; {fix}")
    return [("", [*who, *reader.turns(row["example_dialogue"], "example_dialogue")])]


def _oasst(reader: RowReader, row: dict[str, Any]) -> Iterable[Named]:
    message: Any = row.get("prompt")
    if not isinstance(message, dict):
        fix = "write the tree of replies under it"
        raise WrongRow("no_field", f"has no object 'prompt' (it has: {names_of(row)}); {fix}")
    if message.get("deleted"):
        raise WrongRow("deleted", "the prompt of the tree is deleted; leave the tree out")
    turns: list[Turn] = []
    while message is not None:
        place = f"message {len(turns) + 1} of the main branch"
        turns.append({"role": reader.text(message, "role", place), "content": reader.text(message, "text", place)})
        replies = message.get("replies")
        there = [
            reply
            for reply in (replies if isinstance(replies, list) else [])
            if isinstance(reply, dict) and not reply.get("deleted")
        ]
        message = min(there, key=_rank, default=None)
    return [("", turns)]


def _rank(reply: dict[str, Any]) -> float:
    rank = reply.get("rank")
    return float(rank) if isinstance(rank, int | float) else float("inf")


def _each(row: dict[str, Any], name: str, turns: Callable[[dict[str, Any], str], list[Turn]]) -> Iterator[Named]:
    """The conversations of a list in a row; what is wrong with one costs that one only."""
    items = row[name]
    if not isinstance(items, list) or not items:
        what = "empty" if items == [] else type(items).__name__
        raise WrongRow("empty_conversation", f"field {name!r} is {what}; write a list of objects, or leave the row out")
    for number, item in enumerate(items):
        path = f"{name}[{number}]"
        try:
            if not isinstance(item, dict):
                raise WrongRow("no_field", f"{path} is {type(item).__name__}; write an object")
            yield path, turns(item, path)
        except WrongRow as wrong:
            yield path, wrong


_FORMS: dict[str, Callable[[RowReader, dict[str, Any]], Iterable[Named]]] = {
    "messages": _messages, "alpaca": _alpaca, "sharegpt": _sharegpt, "dialog": _dialog, "character": _character,
    "oasst": _oasst,
}  # fmt: skip
