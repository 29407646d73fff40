"""Conversations from rows of chat data (JSON lines, a JSON array or parquet).

The fields of a row determine its form; or a user function converts it. Rules, besides those of `turns`:

- Messages after the last one of the assistant are dropped and counted. A row without an answer is rejected.
- The assistant may speak first (the greeting of a role-play).
- A tree of replies gives its main branch: at each message the reply of the lowest rank, or the first if none has a
  rank. Deleted replies are skipped. All branches of a tree would repeat its beginning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from artel.config import SourceConfig
from artel.errors import InputError, Problem
from artel.plugins import describe_exception, import_user_module
from artel.registry import FORMATS
from artel.text.formats.format import Format
from artel.text.formats.jsonl import SUFFIXES, describe_fields, has_lines, read_rows
from artel.text.formats.parquet import SUFFIX, check_parquet_rows
from artel.text.formats.tool_rows import check_names, check_results, drop_nulls, extract_tools, is_padded, tools_field
from artel.text.formats.turns import THOUGHT_FIELDS, RowReader, Turn, is_text
from artel.text.reading.source_file import SourceFile
from artel.text.records import BadRecord, Conversation, Message, Preference, Prompt, Record, Rejected, Tools

Fields = Iterable[tuple[str, Conversation | Preference | BadRecord]]
"""(path inside the row, its conversation or preference, or a BadRecord)."""
PathTurns = tuple[str, "list[Turn] | BadRecord"]
"""(path inside the row, empty if the row is one conversation; its turns or a BadRecord)."""

UserFunction = Callable[[dict[str, Any]], Any]


def read_chat(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield a record per conversation. If a row has several, the origin has the path: `file:line (instances[1])`."""
    return read_row_records(file, Converter(file.source).conversations)


def read_row_records(file: SourceFile, fields_of: Callable[[Any], Fields]) -> Iterator[Record | Rejected]:
    """Yield the records of the conversations or preferences that `fields_of` returns for each row."""
    is_table = not has_lines(file)
    for row_origin, row in read_rows(file):
        try:
            for path, fields in fields_of(drop_nulls(row) if is_table or is_padded(row) else row):
                origin = f"{row_origin} ({path})" if path else row_origin
                if isinstance(fields, BadRecord):
                    yield file.reject(origin, fields)
                else:
                    yield build_record(fields, origin, file.set_name)
        except BadRecord as error:
            yield file.reject(row_origin, error)


def build_record(fields: Conversation | Preference | Prompt, origin: str, set_name: str) -> Record:
    """Return the record of a conversation, preference or prompt. Its text is that of all messages.

    Conversations that begin with the same question, and preferences with the same prompt, go into the same split: a
    model must not have learned the answers that it is evaluated on.
    """
    if isinstance(fields, Prompt):
        text = fields.text or _join_texts(fields.messages)
        return Record(text, origin, set_name, fields, group=text)
    if isinstance(fields, Conversation):
        question = next(message.content for message in fields.messages if message.role == "user")
        return Record(_join_texts(fields.messages), origin, set_name, fields, group=question)
    answers = [answer for answer in (fields.chosen, fields.rejected) if answer is not None]
    return Record(_join_texts((*fields.prompt, *answers)), origin, set_name, fields, group=_join_texts(fields.prompt))


def _join_texts(messages: Iterable[Message]) -> str:
    return "\n\n".join(text for message in messages for text in message.texts)


def check_converter(source: SourceConfig, key: str) -> list[Problem]:
    """Return the problems of `converter` of the source at `key` of the run file. Imports user functions."""
    converters = FORMATS[source.format].converters
    if not converters or source.converter == "auto":
        return []
    if ":" in source.converter:
        try:
            import_function(source.converter, f"{key}.converter")
        except InputError as error:
            return list(error.problems)
        return []
    if source.converter in converters:
        return []
    what = f"there is no converter {source.converter!r} of format {source.format}"
    return [Problem(f"{key}.converter", what, f"write auto, {', '.join(converters)}, or module:function")]


def import_function(converter: str, key: str) -> UserFunction:
    """Import the user function `module:function`, also from the working folder. Raise InputError if there is none."""
    module, _, name = converter.partition(":")
    function = getattr(import_user_module(module, key, "write module:function"), name, None)
    if not callable(function):
        fix = f"define {name}(row) there; it is given a row and returns a list of {{role, content}}"
        raise InputError.at(key, f"{module!r} has no function {name!r}", fix)
    return function


def converter_file(source: SourceConfig, key: str) -> list[Path]:
    """Return the file of the user function, if the source has one. It is part of the store key."""
    if not FORMATS[source.format].converters or ":" not in source.converter:
        return []
    import_function(source.converter, f"{key}.converter")
    file = sys.modules[source.converter.partition(":")[0]].__file__
    return [Path(file)] if file else []


def call_function(function: UserFunction, converter: str, row: dict[str, Any]) -> Any:
    """Call a user function on a row. Turns its exceptions into BadRecord, so that only the row is rejected."""
    try:
        return function(row)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        what = f"{converter} failed on it: {describe_exception(error)}"
        raise BadRecord("converter_failed", f"{what}; fix the function, or remove the row") from None


class Converter:
    """Turns rows of one source into conversations, with its `converter`."""

    def __init__(self, source: SourceConfig) -> None:
        self._name = source.converter
        self._function = import_function(source.converter, "converter") if ":" in source.converter else None
        self._reader = RowReader(source)

    def conversations(self, row: Any) -> Iterator[tuple[str, Conversation | BadRecord]]:
        """Yield (path inside the row, conversation) for each conversation. Raise BadRecord for an unusable row."""
        row = self._reader.rename_fields(row)
        if self._function is not None:
            result = call_function(self._function, self._name, row)
            row = result if isinstance(result, dict) else row | {"messages": result}
        tools = self._reader.tools(row)
        # A system message may describe more functions in words.
        has_all_tools = bool(tools) and tools_field(row) is not None
        for path, turns in self._read_turns(row):
            try:
                if isinstance(turns, BadRecord):
                    raise turns
                yield path, _build_conversation(self._reader.messages(turns), tools, has_all_tools)
            except BadRecord as error:
                yield path, error

    def _read_turns(self, row: dict[str, Any]) -> Iterable[PathTurns]:
        if self._function is not None:
            return [("", self._reader.turns(row.get("messages"), f"what {self._name} returned"))]
        return FORMS[_detect_form(row) if self._name == "auto" else self._name](self._reader, row)


def _build_conversation(messages: list[Message], tools: Tools, has_all_tools: bool) -> Conversation:
    messages, tools, changes = extract_tools(messages, tools)
    if not messages:
        raise BadRecord("empty_conversation", "has no messages; remove it")
    if all(message.role != "user" for message in messages):
        raise BadRecord("no_question", "has no message of the user; an answer needs a question, write one before it")
    last_answer = max((index for index, message in enumerate(messages) if message.role == "assistant"), default=-1)
    kept_messages = tuple(messages[: last_answer + 1])
    if not any(message.role == "user" for message in kept_messages):
        raise BadRecord("no_answer", "has no answer of the assistant; write one, or remove it")
    if has_all_tools:
        check_names(kept_messages, tools)
    check_results(kept_messages)
    num_dropped = len(messages) - len(kept_messages)
    return Conversation(kept_messages, tools, changes | ({"turns_left_out": num_dropped} if num_dropped else {}))


def _detect_form(row: dict[str, Any]) -> str:
    """Return the converter of a row, by its fields."""
    for form, names in (
        ("messages", ("messages",)),
        ("sharegpt", ("conversations", "conversation")),
        ("character", ("dialogues", "example_dialogue")),
    ):
        if any(row.get(name) is not None for name in names):
            return form
    if isinstance(row.get("prompt"), dict):
        return "oasst"
    if isinstance(row.get("role"), list) and isinstance(row.get("content"), list):
        return "dialog"
    if "instruction" in row:
        return "alpaca"
    if "query" in row and "answers" in row:
        return "xlam"
    if "prompt" in row and "completion" in row:
        return "completion"
    fix = "name its fields (mapping: {instruction: question, output: answer}), or write converter: module:function"
    raise BadRecord("unknown_form", f"has no known form of a conversation (it has: {describe_fields(row)}); {fix}")


def _read_dialog(reader: RowReader, row: dict[str, Any]) -> Iterable[PathTurns]:
    if isinstance(row.get("role"), list):
        columns = {name: row[name] for name in ("role", "content") if name in row}
        return [("", [*reader.system(row), *reader.turns(columns, "the row")])]
    return _read_field_turns(reader, row, "messages", "conversation", "conversations")


def _read_field_turns(reader: RowReader, row: dict[str, Any], *names: str) -> Iterable[PathTurns]:
    """Return the turns in the first of the fields `names` that the row has."""
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        field_name = reader.mapping.get(names[0], names[0])
        fix = f"write mapping: {{{names[0]}: NAME}}, or another converter"
        raise BadRecord("no_field", f"has no field {field_name!r} (it has: {describe_fields(row)}); {fix}")
    return [("", [*reader.system(row), *reader.turns(row[name], name)])]


def _read_alpaca(reader: RowReader, row: dict[str, Any]) -> Iterable[PathTurns]:
    def answer(fields: dict[str, Any], path: str = "") -> Turn:
        thought = {name: fields[name] for name in THOUGHT_FIELDS if name in fields}
        return {"role": "assistant", "content": reader.text(fields, "output", path), **thought}

    if "instances" in row:  # self-instruct: one instruction with several inputs and outputs
        return _split_conversations(
            row, "instances", lambda item, path: [*reader.question(row, item), answer(item, path)]
        )
    return [("", [*reader.question(row), answer(row)])]


def _read_xlam(reader: RowReader, row: dict[str, Any]) -> Iterable[PathTurns]:
    """Return a question and the calls that answer it (Salesforce xLAM)."""
    question: Turn = {"role": "user", "content": reader.text(row, "query")}
    return [("", [*reader.system(row), question, {"role": "function_call", "content": row.get("answers")}])]


def _read_completion(reader: RowReader, row: dict[str, Any]) -> Iterable[PathTurns]:
    """Return a prompt and its completion, each a text or messages (TRL). Answers in the prompt are not learned."""

    def turns(name: str, role: str) -> list[Turn]:
        value = row.get(name)
        if value is None or is_text(value):
            return [{"role": role, "content": reader.text(row, name)}]
        return reader.turns(value, name)

    prompt = [{**turn, "loss_weight": 0} for turn in turns("prompt", "user")]
    return [("", [*reader.system(row), *prompt, *turns("completion", "assistant")])]


def _read_character(reader: RowReader, row: dict[str, Any]) -> Iterable[PathTurns]:
    """Return role-play, one conversation per dialogue, with `name` and `context` as system message."""
    name, context = reader.optional_text(row, "name"), reader.optional_text(row, "context")
    text = "\n\n".join(text for text in ("" if name in context else name, context) if text.strip())
    system = [{"role": "system", "content": text}]
    if row.get("dialogues"):
        return _split_conversations(
            row, "dialogues", lambda item, path: [*system, *reader.turns(item.get("chat"), f"{path}.chat")]
        )
    if not row.get("example_dialogue"):
        fix = "use dialogues, or remove it"
        raise BadRecord("empty_conversation", f"has neither dialogues nor an example_dialogue; {fix}")
    return [("", [*system, *reader.turns(row["example_dialogue"], "example_dialogue")])]


def _read_oasst(reader: RowReader, row: dict[str, Any]) -> Iterable[PathTurns]:
    message: Any = row.get("prompt")
    if not isinstance(message, dict):
        fix = "write the tree of replies under it"
        raise BadRecord("no_field", f"has no object 'prompt' (it has: {describe_fields(row)}); {fix}")
    if message.get("deleted"):
        raise BadRecord("deleted", "the prompt of the tree is deleted; remove the tree")
    turns: list[Turn] = []
    while message is not None:
        path = f"message {len(turns) + 1} of the main branch"
        turns.append({"role": reader.text(message, "role", path), "content": reader.text(message, "text", path)})
        replies = message.get("replies")
        replies = replies if isinstance(replies, list) else []
        replies = [reply for reply in replies if isinstance(reply, dict) and not reply.get("deleted")]
        message = min(replies, key=_get_rank, default=None)
    return [("", turns)]


def _get_rank(reply: dict[str, Any]) -> float:
    rank = reply.get("rank")
    return float(rank) if isinstance(rank, int | float) else float("inf")


def _split_conversations(
    row: dict[str, Any], name: str, read_turns: Callable[[dict[str, Any], str], list[Turn]]
) -> Iterator[PathTurns]:
    """Yield the conversations of a list in a row. A bad one does not affect the others."""
    items = row[name]
    if not isinstance(items, list) or not items:
        what = "empty" if items == [] else type(items).__name__
        fix = "write a list of objects, or remove the row"
        raise BadRecord("empty_conversation", f"field {name!r} is {what}; {fix}")
    for index, item in enumerate(items):
        path = f"{name}[{index}]"
        try:
            if not isinstance(item, dict):
                raise BadRecord("no_field", f"{path} is {type(item).__name__}; write an object")
            yield path, read_turns(item, path)
        except BadRecord as error:
            yield path, error


FORMS: dict[str, Callable[[RowReader, dict[str, Any]], Iterable[PathTurns]]] = {
    "messages": lambda reader, row: _read_field_turns(reader, row, "messages"),
    "alpaca": _read_alpaca,
    "sharegpt": lambda reader, row: _read_field_turns(reader, row, "conversations", "conversation"),
    "dialog": _read_dialog,
    "character": _read_character,
    "oasst": _read_oasst,
    "xlam": _read_xlam,
    "completion": _read_completion,
}


CHAT = Format(
    read=read_chat,
    yields=("conversations",),
    suffixes=(*SUFFIXES, SUFFIX),
    converters=tuple(FORMS),
    has_lines=has_lines,
    check=check_parquet_rows,
)
