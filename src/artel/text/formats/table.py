"""Texts in a column of a table: .csv and .tsv, plain or compressed."""

from __future__ import annotations

from collections.abc import Iterator

from artel.config import SourceConfig
from artel.text.formats.csv_rows import read_csv_rows
from artel.text.reading.source_file import SourceFile
from artel.text.records import BadRecord, Record, Rejected


def read_table(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield a record per row; its origin is `file:line`.

    Raises InputError for a missing column, a quote that is never closed, or a damaged compressed file.
    """
    source = file.source
    for place, row in read_csv_rows(file, table_columns(source)):
        if isinstance(row, BadRecord):
            yield file.reject(place, row)
        elif not all(row[1:]):
            yield file.reject(place, BadRecord("no_set", f"has nothing in the column {source.set_field!r}"))
        else:
            yield Record(row[0], place, row[1] if source.set_field else file.set_name)


def table_columns(source: SourceConfig) -> list[tuple[str, str]]:
    """(key of the source, name in the header) of each column that is read."""
    return [("field", source.field), *([("set_field", source.set_field)] if source.set_field else [])]
