"""Conversations and preferences from rows of JSON lines, of a JSON array or of parquet; a row may hold several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from artel.text.formats.conversations import Converter, record_of
from artel.text.formats.jsonl import read_rows
from artel.text.formats.preferences import PreferenceReader
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
    for place, row in read_rows(file):
        try:
            for path, fields in fields_of(row):
                origin = f"{place} ({path})" if path else place
                if isinstance(fields, BadRecord):
                    yield file.reject(origin, fields)
                else:
                    yield record_of(fields, origin, file.set_name)
        except BadRecord as error:
            yield file.reject(place, error)
