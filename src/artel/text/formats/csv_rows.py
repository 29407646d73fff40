"""Rows of .csv and .tsv files: the values of named columns, or of all."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper

from artel.errors import InputError, Problem
from artel.text.reading.encodings import SAMPLE, detect_encoding, other_encoding_check, other_encoding_detail
from artel.text.reading.file_names import uncompressed_name
from artel.text.reading.lines import DECOMPRESSION_ERRORS, decompression_error, open_decompressed
from artel.text.reading.source_file import SourceFile, column_fix
from artel.text.records import BadRecord

Row = tuple[str, tuple[str, ...] | BadRecord]
"""The place of a row (`file:line`) and its values, or what is wrong with it."""

_UNDECODED = range(0xDC80, 0xDD00)  # what `surrogateescape` makes of bytes that are not text


def read_csv_rows(file: SourceFile, columns: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """Yield the values of the columns, given as (key of the source, name in the header), row by row; .tsv by tabs.

    Raises BadRecord for binary data, InputError for a wrong header, quote or compressed file.
    """
    return _rows(file, lambda place, header: _column_indices(place, _names(header), columns, file.key))


def read_csv_objects(file: SourceFile) -> Iterator[tuple[str, dict[str, str] | BadRecord]]:
    """The same of all columns: the texts of a row by the names in the header."""
    names: list[str] = []

    def all_columns(place: str, header: list[str]) -> list[int]:
        names.extend(_names(header))
        return _column_indices(place, names, [("mapping", name) for name in names], file.key)

    for place, row in _rows(file, all_columns):
        yield place, row if isinstance(row, BadRecord) else dict(zip(names, row, strict=True))


def _rows(file: SourceFile, columns: Callable[[str, list[str]], list[int]]) -> Iterator[Row]:
    """Yield the values of the columns whose indices `columns` gives for the place of the header and the header."""
    csv.field_size_limit(file.max_bytes)  # the module's default of 131,072 characters is less than many documents have
    encoding = file.source.encoding
    with open_decompressed(file.path, file.origin) as stream:
        if encoding == "auto":
            try:
                encoding = detect_encoding(stream.peek(SAMPLE)[:SAMPLE], cut=True)
            except DECOMPRESSION_ERRORS as error:
                raise _damaged(f"{file.origin}:1", error) from None
        # Bytes that are not text must cost their row only, and the quotes around them still count.
        text = TextIOWrapper(stream, encoding, errors="surrogateescape", newline="")
        delimiter = "\t" if uncompressed_name(file.origin).endswith(".tsv") else ","
        reader = csv.reader(_lines(text, file.origin, file.max_bytes), delimiter=delimiter, strict=True)
        rows = _parsed(reader, file.origin, file.max_bytes)
        place, header = next(rows, (f"{file.origin}:1", []))
        if isinstance(header, BadRecord):
            raise InputError.at(place, f"the header cannot be read: it {header.detail}", "mend the first line")
        indices = columns(place, header)
        for place, row in rows:
            yield place, row if isinstance(row, BadRecord) else _values(row, len(header), indices, encoding)


def _lines(text: TextIOWrapper, origin: str, max_characters: int) -> Iterator[str]:
    """The lines of a csv file. Raises InputError for one that is too long to be held in memory."""
    number = 0
    try:
        while line := text.readline(max_characters + 1):
            number += 1
            if len(line) > max_characters:
                raise _too_long(f"{origin}:{number}", "the line", max_characters)
            yield line
    except UnicodeError as error:  # only in encodings of several bytes per character: UTF-16, UTF-32
        what = f"is not {text.encoding}: {error}"
        raise InputError.at(f"{origin}:{number + 1}", what, "save the file as UTF-8") from None
    except DECOMPRESSION_ERRORS as error:
        raise _damaged(f"{origin}:{number + 1}", error) from None


def _damaged(place: str, error: Exception) -> InputError:
    return InputError.at(place, decompression_error(error).detail, "leave the file out until then")


def _too_long(place: str, what: str, max_characters: int) -> InputError:
    fix = "close or double the quote, or write a larger data.max_document"
    what = f"{what} is over {max_characters:,} characters (data.max_document), or its quote is never closed"
    return InputError.at(place, what, fix)


def _parsed(
    reader: Iterator[list[str]], origin: str, max_characters: int
) -> Iterator[tuple[str, list[str] | BadRecord]]:
    """Yield (place of the row's first line, its cells). Empty rows are skipped.

    Raises InputError for a quote that is never closed: it swallows all rows after it, so the file is wrong.
    """
    while True:
        place = f"{origin}:{reader.line_num + 1}"  # type: ignore[attr-defined]
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "field limit" in str(error):
                raise _too_long(place, "the row that begins here", max_characters) from None
            if "end of data" in str(error):
                fix = 'close the quote; a quote inside of a text is written twice: ""'
                raise InputError.at(place, "a quote is opened in this row and never closed", fix) from None
            yield place, BadRecord("bad_row", f'is not csv: {error}; a quote inside of a text is written twice: ""')
            continue
        if row:
            yield place, row


def _names(header: list[str]) -> list[str]:
    return [name.removeprefix("\ufeff").strip() for name in header]


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
        fix = "mend the row; a text that holds the delimiter stands in quotes"
        return BadRecord("bad_row", f"has {len(row)} columns where the header has {width}; {fix}")
    values = tuple(row[index].replace("\r\n", "\n").replace("\r", "\n") for index in indices)
    if all(map(str.isascii, values)):
        return values
    undecoded = next((letter for value in values for letter in value if ord(letter) in _UNDECODED), "")
    if undecoded:
        byte = ord(undecoded) - 0xDC00
        fix = "mend it, or name the encoding of the source"
        return BadRecord("unreadable", f"is not {encoding}: byte {byte:#04x}; {fix}")
    if (check := other_encoding_check(encoding)) is not None:
        for other in (check(value.encode(encoding)) for value in values):
            if other:
                return BadRecord("other_encoding", other_encoding_detail(encoding, other))
    return values
