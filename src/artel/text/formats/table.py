"""Texts in a column of a table: .csv and .tsv, plain or compressed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.errors import Problem
from artel.text.formats.csv_rows import check_columns, read_csv_rows
from artel.text.formats.format import Format
from artel.text.reading.file_names import with_compressed
from artel.text.reading.source_file import SourceFile, settings_key
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


def _check(path: Path, source: SourceConfig, key: str, data: DataConfig) -> list[Problem]:
    """Whether the table has the columns that the source names."""
    file = SourceFile(path, str(path), "", source, data, key=settings_key(key))
    return check_columns(file, table_columns(source))


CSV = Format(
    read=read_table,
    suffixes=with_compressed(".csv", ".tsv"),
    names_sets=True,
    is_table=True,
    has_lines=lambda file: True,
    check=_check,
)
