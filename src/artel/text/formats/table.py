"""Texts in a column of a table: .csv and .tsv, plain or compressed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.text.formats.pairs import csv_rows
from artel.text.reading.encodings import NotText
from artel.text.reading.lines import BadLine
from artel.text.records import Record, Rejected


def read_table(
    file: Path, origin: str, set_name: str, source: SourceConfig, data: DataConfig
) -> Iterator[Record | Rejected]:
    """A record a row, its origin `file:line`.

    Raises InputError for a column that is not there, a quote that is never closed, a damaged compressed file.
    """
    columns = [("field", source.field)]
    if source.set_field:
        columns.append(("set_field", source.set_field))
    try:
        for where, row in csv_rows(file, origin, tuple(columns), source.encoding, data.max_document):
            if isinstance(row, BadLine):
                yield Rejected(where, row.reason, row.detail, set_name)
            elif not all(row[1:]):
                yield Rejected(where, "no_set", f"has nothing in the column {source.set_field!r}", set_name)
            else:
                yield Record(row[0], where, row[1] if source.set_field else set_name)
    except NotText as error:
        yield Rejected(origin, error.reason, error.detail, set_name)
