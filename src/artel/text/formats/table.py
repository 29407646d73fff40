"""Tables: .csv and .tsv files, plain or compressed. The values of named columns, or of all."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError, Problem
from artel.text.formats.format import Format
from artel.text.formats.jsonl import read_rows
from artel.text.formats.parquet import check_parquet_rows
from artel.text.formats.table_lines import TableRows, is_quoted, too_long_error
from artel.text.reading.encodings import BLOCK_BYTES, describe_other_encoding, make_line_check
from artel.text.reading.files import (
    DECOMPRESSION_ERRORS,
    decompression_error,
    file_name,
    open_decompressed,
    uncompressed_name,
    with_compressed,
)
from artel.text.reading.lines import line_encoding
from artel.text.reading.source_file import SourceFile, column_fix, settings_key
from artel.text.records import BadRecord, Record, Rejected

Row = tuple[str, tuple[str, ...] | BadRecord]
"""The origin of a row (`file:line`), and its values or a BadRecord."""

TABLE_SUFFIXES = with_compressed(".csv", ".tsv")
_SURROGATE_CODES = range(0xDC80, 0xDD00)  # bytes that cannot be decoded, after `surrogateescape`


def read_table(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield a record per row; its origin is `file:line`. Raise InputError for a missing column or an open quote."""
    source = file.source
    for origin, row in read_csv_rows(file, table_columns(source)):
        if isinstance(row, BadRecord):
            yield file.reject(origin, row)
        elif not all(row[1:]):
            yield file.reject(origin, BadRecord("no_set", f"has an empty column {source.set_field!r}"))
        else:
            yield Record(row[0], origin, row[1] if source.set_field else file.set_name)


def table_columns(source: SourceConfig) -> list[tuple[str, str]]:
    """Return (key of the source, name in the header) of each column to read."""
    return [("field", source.field), *([("set_field", source.set_field)] if source.set_field else [])]


def read_csv_rows(file: SourceFile, columns: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """Yield the values of `columns`, given as (key of the source, name in the header), row by row.

    The delimiter is a comma, or a tab in .tsv files. Raise BadRecord for binary data, InputError for a wrong header, a
    damaged compressed file, and a quote that is never closed inside a row.
    """
    return _read_rows(file, lambda origin, names: _column_indices(origin, names, columns, file.key))


def read_csv_objects(file: SourceFile) -> Iterator[tuple[str, dict[str, str] | BadRecord]]:
    """Yield (origin, {column: value}) of each row, for all columns."""
    names: list[str] = []

    def all_columns(origin: str, header: list[str]) -> list[int]:
        names.extend(header)
        return _column_indices(origin, names, [("mapping", name) for name in names], file.key)

    for origin, row in _read_rows(file, all_columns):
        yield origin, row if isinstance(row, BadRecord) else dict(zip(names, row, strict=True))


def read_objects(file: SourceFile) -> Iterator[tuple[str, Any]]:
    """Yield (origin, row) of JSON lines, a JSON array, parquet or a table, as `read_rows` and `read_csv_objects` do."""
    return read_csv_objects(file) if file_name(file.origin).endswith(TABLE_SUFFIXES) else read_rows(file)


def check_objects(path: Path, source: SourceConfig, key: str, data: DataConfig) -> list[Problem]:
    """Return the problems of the columns of a table or parquet file, all of which are read."""
    if not file_name(str(path)).endswith(TABLE_SUFFIXES):
        return check_parquet_rows(path, source, key, data)
    return check_columns(path, source, key, data)


def check_columns(
    path: Path, source: SourceConfig, key: str, data: DataConfig, columns: Sequence[tuple[str, str]] | None = None
) -> list[Problem]:
    """Return the problems in the header of a table if `columns` (default: all) are to be read."""
    file = SourceFile(path, str(path), "", source, data, key=settings_key(key))
    try:
        with suppress(BadRecord), _open_table(file) as (_, header, origin):
            _column_indices(origin, header, columns or [("mapping", name) for name in header], file.key)
    except InputError as error:
        return list(error.problems)
    return []


def _read_rows(file: SourceFile, columns: Callable[[str, list[str]], list[int]]) -> Iterator[Row]:
    """Yield the values of some columns. `columns` returns their indices for the origin of the header and its names."""
    encoding = line_encoding(file.path, file.origin, file.source.encoding)
    trusts_quotes = cache(lambda: _is_quoted(file))
    with _open_table(file, trusts_quotes) as (rows, header, origin):
        indices = columns(origin, header)
        is_literal = _is_tsv(file) and _has_quotes(file) and not trusts_quotes()
        for line_number, row in rows.without_quoting() if is_literal else rows:
            origin = f"{file.origin}:{line_number}"
            yield origin, row if isinstance(row, BadRecord) else _select_values(row, len(header), indices, encoding)


@contextmanager
def _open_table(
    file: SourceFile, trusts_quotes: Callable[[], bool] = lambda: False
) -> Iterator[tuple[TableRows, list[str], str]]:
    """Open a table: its rows after the header, the names in the header, and the origin of the header."""
    csv.field_size_limit(file.max_bytes)  # many documents exceed the default of 131,072 characters
    encoding = line_encoding(file.path, file.origin, file.source.encoding)
    # Bytes that cannot be decoded cost only their row, and the quotes around them still count.
    with (
        open_decompressed(file.path, file.origin) as stream,
        TextIOWrapper(stream, encoding, errors="surrogateescape", newline="") as text,
    ):
        lines = _read_lines(text, file.origin, file.max_bytes)
        rows = TableRows(lines, file.origin, "\t" if _is_tsv(file) else ",", file.max_bytes, trusts_quotes)
        line_number, header = next(iter(rows), (1, []))
        origin = f"{file.origin}:{line_number}"
        if isinstance(header, BadRecord):
            raise InputError.at(origin, f"the header cannot be read: it {header.detail}", "fix the first line")
        yield rows, [name.strip() for name in header], origin


def _is_tsv(file: SourceFile) -> bool:
    return uncompressed_name(file.origin).endswith(".tsv")


def _has_quotes(file: SourceFile) -> bool:
    """True if the file has any quote. Most .tsv files have none, and are read only once."""
    with open_decompressed(file.path, file.origin) as stream, suppress(*DECOMPRESSION_ERRORS):
        return any(b'"' in block for block in iter(lambda: stream.read1(BLOCK_BYTES), b""))
    return False


def _is_quoted(file: SourceFile) -> bool:
    """Apply `is_quoted` to all rows, reading the file once more."""
    with _open_table(file) as (rows, _, _):
        return is_quoted(rows)


def _read_lines(text: TextIOWrapper, origin: str, max_characters: int) -> Iterator[str]:
    """Yield the lines of a table. Raise InputError for a line that is too long for memory."""
    line_number = 0
    try:
        while line := text.readline(max_characters + 1):
            line_number += 1
            if len(line) > max_characters:
                raise too_long_error(f"{origin}:{line_number}", "the line", max_characters)
            yield line.removeprefix("\ufeff")  # also in the middle of joined files
    except UnicodeError as error:  # only in encodings of several bytes per character: UTF-16, UTF-32
        what = f"is not {text.encoding}: {error}"
        raise InputError.at(f"{origin}:{line_number + 1}", what, "save the file as UTF-8") from None
    except DECOMPRESSION_ERRORS as error:
        fix = "remove the file until then"
        raise InputError.at(f"{origin}:{line_number + 1}", decompression_error(error).detail, fix) from None


def _column_indices(origin: str, names: list[str], columns: Sequence[tuple[str, str]], source_key: str) -> list[int]:
    problems = []
    for key, name in columns:
        if names.count(name) != 1:
            what = f"has {names.count(name) or 'no'} column{'s' * (name in names)} {name!r}"
            # Bytes that cannot be decoded are shown as \xff.
            existing = ", ".join(names).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") or "none"
            fix = f"name the column in the source ({column_fix(key, source_key)}), or rename it in the header"
            if len(names) == 1 and ";" in existing:
                fix = f"separate the columns by commas, not by semicolons; then {fix}"
            problems.append(Problem(origin, f"the header {what} (it has: {existing})", fix))
    if problems:
        raise InputError(problems)
    return [names.index(name) for _, name in columns]


def _select_values(row: list[str], width: int, indices: list[int], encoding: str) -> tuple[str, ...] | BadRecord:
    if len(row) != width:
        fix = "fix the row; put texts with the delimiter in quotes"
        return BadRecord("bad_row", f"has {len(row)} columns, but the header has {width}; {fix}")
    values = tuple(row[index].replace("\r\n", "\n").replace("\r", "\n") for index in indices)
    if all(map(str.isascii, values)):
        return values
    surrogate = next((letter for value in values for letter in value if ord(letter) in _SURROGATE_CODES), "")
    if surrogate:
        byte = ord(surrogate) - 0xDC00
        fix = "fix it, or name the encoding of the source"
        return BadRecord("unreadable", f"is not {encoding}: byte {byte:#04x}; {fix}")
    if (check := make_line_check(encoding)) is not None:
        for other in (check(value.encode(encoding)) for value in values):
            if other:
                return BadRecord("other_encoding", describe_other_encoding(encoding, other))
    return values


CSV = Format(
    read=read_table,
    suffixes=TABLE_SUFFIXES,
    names_sets=True,
    is_table=True,
    has_lines=lambda file: True,
    check=lambda path, source, key, data: check_columns(path, source, key, data, table_columns(source)),
)
