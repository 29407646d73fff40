"""Rows of JSON lines or of an array to records of conversations and preferences, one or several of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from artel.config import DataConfig, SourceConfig
from artel.text.formats.conversations import Converter, record_of
from artel.text.formats.jsonl import read_rows
from artel.text.formats.preferences import PreferenceReader
from artel.text.formats.turns import WrongRow
from artel.text.reading.lines import BadLine
from artel.text.records import Conversation, Preference, Record, Rejected

Fields = Iterable[tuple[str, Conversation | Preference | WrongRow]]
"""(place in the row, what stands there or what is wrong with it)."""


def read_chat(
    file: Path, origin: str, set_name: str, source: SourceConfig, data: DataConfig
) -> Iterator[Record | Rejected]:
    """A record a conversation; where a row holds several, the origin says which: `file:line (instances[1])`."""
    return _records(file, origin, set_name, source, data, Converter(source).conversations)


def read_preferences(
    file: Path, origin: str, set_name: str, source: SourceConfig, data: DataConfig
) -> Iterator[Record | Rejected]:
    """A record a row."""
    reader = PreferenceReader(source)
    return _records(file, origin, set_name, source, data, lambda row: [("", reader.preference(row))])


def _records(
    file: Path, origin: str, set_name: str, source: SourceConfig, data: DataConfig, fields_of: Callable[[Any], Fields]
) -> Iterator[Record | Rejected]:
    for where, row in read_rows(file, origin, source.encoding, data.max_document):
        if isinstance(row, BadLine):
            yield Rejected(where, row.reason, row.detail, set_name)
            continue
        try:
            for path, fields in fields_of(row):
                place = f"{where} ({path})" if path else where
                if isinstance(fields, WrongRow):
                    yield Rejected(place, fields.reason, fields.detail, set_name)
                else:
                    yield record_of(fields, place, set_name)
        except WrongRow as wrong:
            yield Rejected(where, wrong.reason, wrong.detail, set_name)
