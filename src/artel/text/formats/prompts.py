"""Prompts for learning from rewards, with the columns that rewards use.

The prompt of a row is the first of these fields that the row has:
- `prompt`: a text, which the model continues, or messages, which it answers.
- `messages` or `conversations`: messages. They take precedence over a `prompt` that is a text (UltraChat has both).
- `instruction` (with `input`), `question`, `problem` or `query`: a text, which becomes a user message.

All other fields are columns, as JSON values: dates, decimals and UTF-8 bytes become texts, and NaN becomes null. The
fields `system` and `tools` belong to the conversation. If it ends with an assistant message, the messages after the
last user message are cut and counted, and their text becomes the column `answer`, unless the row has one.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import orjson

from artel.config import SourceConfig
from artel.text.formats.chat import build_record, call_function, import_function
from artel.text.formats.format import Format
from artel.text.formats.jsonl import SUFFIXES, describe_fields, has_lines
from artel.text.formats.parquet import SUFFIX
from artel.text.formats.preferences import PROMPT_FIELDS
from artel.text.formats.table import TABLE_SUFFIXES, check_objects, read_objects
from artel.text.formats.tool_rows import TOOLS_FIELDS, drop_nulls, extract_tools, is_padded
from artel.text.formats.turns import RowReader, check_prompt, is_text, wrap_message
from artel.text.reading.source_file import SourceFile
from artel.text.records import BadRecord, Message, Prompt, Record, Rejected

_QUESTION_FIELDS = ("question", "problem", "query")
_ALL_FIELDS = (*(name for names in PROMPT_FIELDS.values() for name in names), *_QUESTION_FIELDS)
_MESSAGES_FIELDS = ("messages", *PROMPT_FIELDS["sharegpt"])


def read_prompts(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield a record per row."""
    reader = PromptReader(file.source, has_nulls=not has_lines(file))
    for origin, row in read_objects(file):
        try:
            yield build_record(reader.prompt(row), origin, file.set_name)
        except BadRecord as error:
            yield file.reject(origin, error)


class PromptReader:
    """Turns rows of one source into prompts. All methods raise BadRecord for an invalid row.

    `has_nulls`: rows have nulls for missing keys, as in parquet.
    """

    def __init__(self, source: SourceConfig, *, has_nulls: bool = False) -> None:
        self._rows = RowReader(source)
        self._has_nulls = has_nulls
        self._converter = source.converter
        self._function = import_function(source.converter, "converter") if ":" in source.converter else None
        self._prompt_fields = PROMPT_FIELDS.get(source.converter, _ALL_FIELDS)

    def prompt(self, row: Any) -> Prompt:
        """Return the prompt of a row. A user function returns a row, a text or messages."""
        row = self._rows.rename_fields(row)
        name = ""
        if self._function is not None:
            result = call_function(self._function, self._converter, row)
            row, name = (result, "") if isinstance(result, dict) else (row | {"prompt": result}, "prompt")
        # Nulls are dropped only from the prompt: a null in a column may be a value.
        fields = drop_nulls(row) if self._has_nulls or is_padded(row) else row
        name = name or self._find_prompt(fields)
        used = {name, "system", *TOOLS_FIELDS, *(("input", "history") if name == "instruction" else ())}
        columns = {str(column): _to_json(value, column) for column, value in row.items() if column not in used}
        if name == "prompt" and is_text(fields.get(name)):
            return Prompt(text=self._text(fields), columns=columns)
        messages = self._messages(fields, name)
        messages, tools, changes = extract_tools(messages, self._rows.tools(fields))
        end = 1 + max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
        if end and messages[-1].role == "assistant":
            if columns.get("answer") is None:
                columns["answer"] = _answer_text(messages[end:])
            messages, changes = messages[:end], changes | {"answers_cut": 1}
        return Prompt(check_prompt(messages), "", tools, columns, changes)

    def _find_prompt(self, row: dict[str, Any]) -> str:
        """Return the field with the prompt of a row."""
        names = [name for name in self._prompt_fields if row.get(name) is not None]
        if not names:
            field_name = self._rows.mapping.get("prompt", self._prompt_fields[0])
            fix = "name it in the source: mapping: {question: NAME}, or {prompt: NAME} for a text to continue"
            raise BadRecord(
                "no_prompt", f"has no prompt: no field {field_name!r} (it has: {describe_fields(row)}); {fix}"
            )
        if is_text(row[names[0]]):
            return next((name for name in names if name in _MESSAGES_FIELDS), names[0])
        return names[0]

    def _text(self, row: dict[str, Any]) -> str:
        unused = "a system message" if self._rows.system(row) else "tools" if self._rows.tools(row) else ""
        if unused:
            name = self._rows.mapping.get("prompt", "prompt")
            fix = f"to make it a message of the user, write mapping: {{question: {name}}}"
            raise BadRecord("no_conversation", f"has {unused}, but its prompt is a text to continue; {fix}")
        text = self._rows.fill_in(row["prompt"])
        if not text.strip():
            raise BadRecord("no_prompt", "the prompt is empty; fill it in, or remove the row")
        return text

    def _messages(self, row: dict[str, Any], name: str) -> list[Message]:
        if name == "instruction":
            turns = self._rows.question(row)
        elif name in _QUESTION_FIELDS:
            turns = [*self._rows.system(row), {"role": "user", "content": self._rows.text(row, name)}]
        else:
            turns = [*self._rows.system(row), *self._rows.turns(wrap_message(row.get(name)), name)]
        return self._rows.messages(turns, "prompt: ")


def _answer_text(messages: list[Message]) -> str:
    """Return the text of the assistant messages. A message without content is written as its tool calls in JSON."""
    answers = [message for message in messages if message.role == "assistant"]
    return "\n\n".join(text for answer in answers for text in ([answer.content] if answer.content else answer.texts))


def _to_json(value: Any, column: str) -> Any:
    try:
        return orjson.loads(orjson.dumps(value, value_to_text, orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY))
    except orjson.JSONEncodeError as error:
        detail = f"the column {str(column)!r} is not JSON: {error.__cause__ or error}; convert it, or remove the column"
        raise BadRecord("bad_column", detail) from None


def value_to_text(value: Any) -> str:
    """Convert a value that orjson does not support. Raise TypeError if that is impossible."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise TypeError("it holds bytes that are not text in UTF-8") from None
    if isinstance(value, Decimal | datetime.date | datetime.timedelta):
        return str(value)
    raise TypeError(f"it holds {type(value).__name__}")


PROMPTS = Format(
    read=read_prompts,
    yields=("prompts",),
    suffixes=(*SUFFIXES, SUFFIX, *TABLE_SUFFIXES),
    converters=tuple(PROMPT_FIELDS),
    has_lines=has_lines,
    check=check_objects,
)
