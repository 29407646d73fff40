"""Tables: .csv and .tsv files, plain or compressed. The values of named columns, or of all."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from io import TextIOWrapper
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError, Problem
from artel.text.formats.format import Format
from artel.text.formats.table_lines import TableRows, is_quoted, too_long
from artel.text.reading.encodings import BLOCK, other_encoding_check, other_encoding_detail
from artel.text.reading.files import (
    DECOMPRESSION_ERRORS,
    decompression_error,
    open_decompressed,
    uncompressed_name,
    with_compressed,
)
from artel.text.reading.lines import line_encoding
from artel.text.reading.source_file import SourceFile, column_fix, settings_key
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


Row = tuple[str, tuple[str, ...] | BadRecord]
"""The place of a row (`file:line`) and its values, or what is wrong with it."""

_UNDECODED = range(0xDC80, 0xDD00)  # what `surrogateescape` makes of bytes that are not text


def read_csv_rows(file: SourceFile, columns: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """Yield the values of the columns, given as (key of the source, name in the header), row by row; .tsv by tabs.

    Raises BadRecord for binary data, InputError for a wrong header or compressed file, and for a quote that is never
    closed and begins no row of its own.
    """
    return _rows(file, lambda place, names: _column_indices(place, names, columns, file.key))


def read_csv_objects(file: SourceFile) -> Iterator[tuple[str, dict[str, str] | BadRecord]]:
    """The same of all columns: the texts of a row by the names in the header."""
    names: list[str] = []

    def all_columns(place: str, header: list[str]) -> list[int]:
        names.extend(header)
        return _column_indices(place, names, [("mapping", name) for name in names], file.key)

    for place, row in _rows(file, all_columns):
        yield place, row if isinstance(row, BadRecord) else dict(zip(names, row, strict=True))


def check_columns(file: SourceFile, columns: Sequence[tuple[str, str]] | None = None) -> list[Problem]:
    """Return the problems in the header of a table of which `columns`, or all columns, are read.

    No row after it is read. Binary data are reported by reading.
    """
    try:
        with suppress(BadRecord), _table(file) as (_, header, place):
            _column_indices(place, header, columns or [("mapping", name) for name in header], file.key)
    except InputError as error:
        return list(error.problems)
    return []


def _rows(file: SourceFile, columns: Callable[[str, list[str]], list[int]]) -> Iterator[Row]:
    """Yield the values of the columns whose indices `columns` gives for the place of the header and its names."""
    encoding = line_encoding(file.path, file.origin, file.source.encoding)
    trusts_quotes = cache(lambda: _is_quoted(file))
    with _table(file, trusts_quotes) as (rows, header, place):
        indices = columns(place, header)
        is_literal = _is_tsv(file) and _has_quotes(file) and not trusts_quotes()
        for number, row in rows.without_quoting() if is_literal else rows:
            place = f"{file.origin}:{number}"
            yield place, row if isinstance(row, BadRecord) else _values(row, len(header), indices, encoding)


@contextmanager
def _table(
    file: SourceFile, trusts_quotes: Callable[[], bool] = lambda: False
) -> Iterator[tuple[TableRows, list[str], str]]:
    """The rows of a table after its header, the names in the header, and its place."""
    csv.field_size_limit(file.max_bytes)  # the module's default of 131,072 characters is less than many documents have
    encoding = line_encoding(file.path, file.origin, file.source.encoding)
    # Bytes that are not text must cost their row only, and the quotes around them still count.
    with (
        open_decompressed(file.path, file.origin) as stream,
        TextIOWrapper(stream, encoding, errors="surrogateescape", newline="") as text,
    ):
        lines = _lines(text, file.origin, file.max_bytes)
        rows = TableRows(lines, file.origin, "\t" if _is_tsv(file) else ",", file.max_bytes, trusts_quotes)
        number, header = next(iter(rows), (1, []))
        place = f"{file.origin}:{number}"
        if isinstance(header, BadRecord):
            raise InputError.at(place, f"the header cannot be read: it {header.detail}", "fix the first line")
        yield rows, _names(header), place


def _is_tsv(file: SourceFile) -> bool:
    return uncompressed_name(file.origin).endswith(".tsv")


def _has_quotes(file: SourceFile) -> bool:
    """True if the file has a quote at all: most .tsv files have none, and are read once."""
    with open_decompressed(file.path, file.origin) as stream, suppress(*DECOMPRESSION_ERRORS):
        return any(b'"' in block for block in iter(lambda: stream.read1(BLOCK), b""))
    return False


def _is_quoted(file: SourceFile) -> bool:
    """`is_quoted` of all rows, which are read once more to find out."""
    with _table(file) as (rows, _, _):
        return is_quoted(rows)


def _lines(text: TextIOWrapper, origin: str, max_characters: int) -> Iterator[str]:
    """The lines of a table. Raises InputError for one that is too long to be held in memory."""
    number = 0
    try:
        while line := text.readline(max_characters + 1):
            number += 1
            if len(line) > max_characters:
                raise too_long(f"{origin}:{number}", "the line", max_characters)
            yield line.removeprefix("\ufeff")  # also in the middle, where files were joined
    except UnicodeError as error:  # only in encodings of several bytes per character: UTF-16, UTF-32
        what = f"is not {text.encoding}: {error}"
        raise InputError.at(f"{origin}:{number + 1}", what, "save the file as UTF-8") from None
    except DECOMPRESSION_ERRORS as error:
        fix = "leave the file out until then"
        raise InputError.at(f"{origin}:{number + 1}", decompression_error(error).detail, fix) from None


def _names(header: list[str]) -> list[str]:
    return [name.strip() for name in header]


def _column_indices(place: str, names: list[str], columns: Sequence[tuple[str, str]], source: str) -> list[int]:
    problems = []
    for key, name in columns:
        if names.count(name) != 1:
            what = f"has {names.count(name) or 'no'} column{'s' * (name in names)} {name!r}"
            # Bytes that are not text are shown as \xff.
            have = ", ".join(names).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") or "none"
            fix = f"name the column in the source ({column_fix(key, source)}), or rename it in the header"
            if len(names) == 1 and ";" in have:
                fix = f"separate the columns by commas, not by semicolons; then {fix}"
            problems.append(Problem(place, f"the header {what} (it has: {have})", fix))
    if problems:
        raise InputError(problems)
    return [names.index(name) for _, name in columns]


def _values(row: list[str], width: int, indices: list[int], encoding: str) -> tuple[str, ...] | BadRecord:
    if len(row) != width:
        fix = "fix the row; a text that holds the delimiter stands in quotes"
        return BadRecord("bad_row", f"has {len(row)} columns where the header has {width}; {fix}")
    values = tuple(row[index].replace("\r\n", "\n").replace("\r", "\n") for index in indices)
    if all(map(str.isascii, values)):
        return values
    undecoded = next((letter for value in values for letter in value if ord(letter) in _UNDECODED), "")
    if undecoded:
        byte = ord(undecoded) - 0xDC00
        fix = "fix it, or name the encoding of the source"
        return BadRecord("unreadable", f"is not {encoding}: byte {byte:#04x}; {fix}")
    if (check := other_encoding_check(encoding)) is not None:
        for other in (check(value.encode(encoding)) for value in values):
            if other:
                return BadRecord("other_encoding", other_encoding_detail(encoding, other))
    return values
