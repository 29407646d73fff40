"""Conversations and preferences from rows of JSON lines, of a JSON array or of parquet; a row may hold several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from artel.config import DataConfig, SourceConfig
from artel.errors import Problem
from artel.text.formats.conversations import FORMS, PREFERENCE_CONVERTERS, Converter, record_of
from artel.text.formats.format import Format
from artel.text.formats.jsonl import SUFFIXES, has_lines, read_rows
from artel.text.formats.parquet import SUFFIX, check_parquet_rows
from artel.text.formats.preferences import PreferenceReader
from artel.text.formats.tool_rows import is_padded, without_nulls
from artel.text.reading.file_names import file_name
from artel.text.reading.source_file import SourceFile
from artel.text.records import BadRecord, Conversation, Preference, Record, Rejected

Fields = Iterable[tuple[str, Conversation | Preference | BadRecord]]
"""(path inside the row, the conversation or preference there or why it is bad)."""


def read_chat(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield a record per conversation. If a row holds several, the origin has the path: `file:line (instances[1])`."""
    return _records(file, Converter(file.source).conversations)


def read_preferences(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield a record per row."""
    reader = PreferenceReader(file.source)
    return _records(file, lambda row: [("", reader.preference(row))])


def _records(file: SourceFile, fields_of: Callable[[Any], Fields]) -> Iterator[Record | Rejected]:
    is_table = not has_lines(file)
    for place, row in read_rows(file):
        try:
            for path, fields in fields_of(without_nulls(row) if is_table or is_padded(row) else row):
                origin = f"{place} ({path})" if path else place
                if isinstance(fields, BadRecord):
                    yield file.reject(origin, fields)
                else:
                    yield record_of(fields, origin, file.set_name)
        except BadRecord as error:
            yield file.reject(place, error)


def _check(path: Path, source: SourceConfig, key: str, data: DataConfig) -> list[Problem]:
    return check_parquet_rows(path, key) if file_name(str(path)).endswith(SUFFIX) else []


CHAT = Format(
    read=read_chat,
    yields=("conversations",),
    suffixes=(*SUFFIXES, SUFFIX),
    converters=tuple(FORMS),
    has_lines=has_lines,
    check=_check,
)
PREFERENCE = Format(
    read=read_preferences,
    yields=("preferences",),
    suffixes=(*SUFFIXES, SUFFIX),
    converters=PREFERENCE_CONVERTERS,
    has_lines=has_lines,
    check=_check,
)
