"""Pairs of texts: two columns of a csv, two fields of JSON lines, or two files that go row for row."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import TextIOWrapper
from itertools import zip_longest
from pathlib import Path

import orjson

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError, Problem
from artel.storage import own_path
from artel.text.reading.encodings import SAMPLE, NotText, detect_encoding, line_check, not_of
from artel.text.reading.file_names import PACKED, file_name, packed_too, unpacked_name
from artel.text.reading.lines import DAMAGED, BadLine, damaged, read_lines, unpacked
from artel.text.reading.unchanged import unchanged
from artel.text.records import Pair, Record, Rejected

Row = tuple[str, tuple[str, ...] | BadLine]
"""The place of a row (`file:line`) and its values, or what is wrong with it."""

_JSON = (".jsonl", ".ndjson", ".json", *PACKED)
_TABLES = (".csv", ".tsv")
_UNDECODED = range(0xDC80, 0xDD00)  # what `surrogateescape` makes of bytes that are no text


def read_pairs(
    file: Path, origin: str, set_name: str, source: SourceConfig, data: DataConfig
) -> Iterator[Record | Rejected]:
    """A record a row. What is learned is the output; pairs of one input fall into one part of the data."""
    try:
        outputs = own_path(source.outputs, "outputs") if source.outputs else file
        if outputs.resolve() != file.resolve():
            with unchanged(outputs):
                yield from _two_files(file, outputs, origin, set_name, source, data)
            return
        for where, row in _rows(file, origin, (("input", source.input), ("output", source.output)), source, data):
            if isinstance(row, BadLine):
                yield Rejected(where, row.reason, row.detail, set_name)
            else:
                yield _pair(where, set_name, *row)
    except NotText as error:
        yield Rejected(origin, error.reason, error.detail, set_name)


def _two_files(
    file: Path, other: Path, origin: str, set_name: str, source: SourceConfig, data: DataConfig
) -> Iterator[Record | Rejected]:
    """A row that cannot be read in either file costs this pair only: the rows after it still belong together."""
    if not other.is_file():
        raise InputError.at(source.outputs, "there is no such file", "name the file of outputs: outputs: FILE")
    inputs = _rows(file, origin, (("input", source.input),), source, data)
    outputs = _outputs(other, source, data)
    for both, (left, right) in enumerate(zip_longest(inputs, outputs)):
        if left is None or right is None:
            longer = both + 1 + sum(1 for _ in (outputs if left is None else inputs))
            here, there = (both, longer) if left is None else (longer, both)
            what = f"has {here:,} rows and {source.outputs} has {there:,}: they do not go row for row"
            raise InputError.at(origin, what, "give each input its output in the same row of the other file")
        (where, given), (place, wanted) = left, right
        if isinstance(given, BadLine):
            yield Rejected(where, given.reason, given.detail, set_name)
        elif isinstance(wanted, BadLine):
            yield Rejected(place, wanted.reason, wanted.detail, set_name)
        else:
            yield _pair(where, set_name, given[0], wanted[0])


def _outputs(file: Path, source: SourceConfig, data: DataConfig) -> Iterator[Row]:
    """Binary data are told of the file that holds them."""
    try:
        yield from _rows(file, source.outputs, (("output", source.output),), source, data)
    except NotText as error:
        what = f"{error.detail}; its inputs have nothing to go with"
        raise InputError.at(source.outputs, what, "name the file of outputs: outputs: FILE") from None


def _pair(where: str, set_name: str, given: str, wanted: str) -> Record | Rejected:
    for side, text in (("input", given), ("output", wanted)):
        if not text.strip():
            return Rejected(where, "empty_side", f"the {side} is empty; fill it in, or leave the row out", set_name)
    return Record(wanted, where, set_name, Pair(given, wanted), group=given)


def _rows(
    file: Path, origin: str, columns: tuple[tuple[str, str], ...], source: SourceConfig, data: DataConfig
) -> Iterator[Row]:
    """The values of the columns, each given as (key of the source, name of the column), row by row."""
    name = file_name(origin)
    if name.endswith(packed_too(*_TABLES)[len(_TABLES) :]):
        raise InputError.at(origin, "is a compressed csv, which cannot be read", "unpack it")
    if name.endswith(_JSON):
        return _json_rows(file, origin, columns, source.encoding, data.max_document)
    if source.outputs and not name.endswith(_TABLES):
        return _plain_rows(file, origin, source.encoding, data.max_document)
    return csv_rows(file, origin, columns, source.encoding, data.max_document)


def _plain_rows(file: Path, origin: str, encoding: str, largest: int) -> Iterator[Row]:
    """Two parallel texts: a line is a row, an empty one too."""
    for number, line in read_lines(file, origin, encoding, largest):
        yield f"{origin}:{number}", line if isinstance(line, BadLine) else (line,)


def _json_rows(
    file: Path, origin: str, columns: tuple[tuple[str, str], ...], encoding: str, largest: int
) -> Iterator[Row]:
    for number, line in read_lines(file, origin, encoding, largest):
        where = f"{origin}:{number}"
        if isinstance(line, BadLine):
            yield where, line
        elif line.strip():
            if number == 1 and line.lstrip().startswith("["):
                what, fix = "is one JSON array, not an object a line", "write an object a line: jq -c '.[]' FILE"
                raise InputError.at(where, what, fix)
            yield where, _fields(line, columns)


def _fields(line: str, columns: tuple[tuple[str, str], ...]) -> tuple[str, ...] | BadLine:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return BadLine("bad_json", f"is not JSON: {error}; write one object a line")
    if not isinstance(entry, dict):
        return BadLine("bad_json", f"is {type(entry).__name__}; write an object with fields")
    for key, name in columns:
        if name not in entry:
            have = ", ".join(entry) or "none"
            return BadLine("no_field", f"has no field {name!r} (it has: {have}); write {key}: NAME in the source")
        if not isinstance(entry[name], str):
            found = type(entry[name]).__name__
            return BadLine("no_text", f"field {name!r} is {found}; write it as text, in quotes")
    return tuple(entry[name] for _, name in columns)


def csv_rows(
    file: Path, origin: str, columns: tuple[tuple[str, str], ...], encoding: str, largest: int
) -> Iterator[Row]:
    """The values of the columns, each given as (key of the source, name in the header), row by row; .tsv by tabs.

    Raises NotText for binary data, InputError for a header, quote or compressed file that is wrong.
    """
    csv.field_size_limit(largest)  # the module's own, 131,072 characters, is less than many a document has
    with unpacked(file, origin) as stream:
        if encoding == "auto":
            try:
                encoding = detect_encoding(stream.peek(SAMPLE)[:SAMPLE], cut=True)
            except DAMAGED as error:
                raise _is_damaged(f"{origin}:1", error) from None
        # Bytes that are no text must cost their row only, and the quotes around them still count.
        text = TextIOWrapper(stream, encoding, errors="surrogateescape", newline="")
        delimiter = "\t" if unpacked_name(origin).endswith(".tsv") else ","
        reader = csv.reader(_pieces(text, origin, largest), delimiter=delimiter, strict=True)
        rows = _parsed(reader, origin, largest)
        where, header = next(rows, (f"{origin}:1", []))
        if isinstance(header, BadLine):
            raise InputError.at(where, f"the header cannot be read: it {header.detail}", "mend the first line")
        places = _places(where, header, columns)
        for where, row in rows:
            yield where, row if isinstance(row, BadLine) else _values(row, len(header), places, encoding)


def _pieces(text: TextIOWrapper, origin: str, largest: int) -> Iterator[str]:
    """The lines of a csv, none so long that memory ends."""
    number = 0
    try:
        while line := text.readline(largest + 1):
            number += 1
            if len(line) > largest:
                raise _too_long(f"{origin}:{number}", "the line", largest)
            yield line
    except UnicodeError as error:  # only of encodings in which a byte is no character: UTF-16, UTF-32
        what = f"is not {text.encoding}: {error}"
        raise InputError.at(f"{origin}:{number + 1}", what, "save the file as UTF-8") from None
    except DAMAGED as error:
        raise _is_damaged(f"{origin}:{number + 1}", error) from None


def _is_damaged(where: str, error: Exception) -> InputError:
    return InputError.at(where, damaged(error).detail, "leave the file out until then")


def _too_long(where: str, what: str, largest: int) -> InputError:
    fix = "close or double the quote, or write a larger data.max_document"
    said = f"{what} is over {largest:,} characters (data.max_document), or its quote is never closed"
    return InputError.at(where, said, fix)


def _parsed(reader: Iterator[list[str]], origin: str, largest: int) -> Iterator[tuple[str, list[str] | BadLine]]:
    """(place of the row's first line, its cells); rows without anything are no rows.

    A quote that is never closed swallows all the rows after it: then the file is wrong, not the row.
    """
    while True:
        where = f"{origin}:{reader.line_num + 1}"  # type: ignore[attr-defined]
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "field limit" in str(error):
                raise _too_long(where, "the row that begins here", largest) from None
            if "end of data" in str(error):
                fix = 'close the quote; a quote inside of a text is written twice: ""'
                raise InputError.at(where, "a quote is opened in this row and never closed", fix) from None
            yield where, BadLine("bad_row", f'is not csv: {error}; a quote inside of a text is written twice: ""')
            continue
        if row:
            yield where, row


def _places(where: str, header: list[str], columns: tuple[tuple[str, str], ...]) -> list[int]:
    names = [name.removeprefix("\ufeff").strip() for name in header]
    problems = []
    for key, name in columns:
        if names.count(name) != 1:
            what = f"has {names.count(name) or 'no'} column{'s' * (name in names)} {name!r}"
            # Bytes that are no text are shown as \xff.
            have = ", ".join(names).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") or "none"
            fix = f"name the column in the source ({key}: NAME), or rename it in the header"
            if len(names) == 1 and ";" in have:
                fix = f"separate the columns by commas, not by semicolons; then {fix}"
            problems.append(Problem(where, f"the header {what} (it has: {have})", fix))
    if problems:
        raise InputError(problems)
    return [names.index(name) for _, name in columns]


def _values(row: list[str], width: int, places: list[int], encoding: str) -> tuple[str, ...] | BadLine:
    if len(row) != width:
        fix = "mend the row; a text that holds the delimiter stands in quotes"
        return BadLine("bad_row", f"has {len(row)} columns where the header has {width}; {fix}")
    values = tuple(row[place].replace("\r\n", "\n").replace("\r", "\n") for place in places)
    if all(map(str.isascii, values)):
        return values
    wrong = next((letter for value in values for letter in value if ord(letter) in _UNDECODED), "")
    if wrong:
        byte = ord(wrong) - 0xDC00
        return BadLine(
            "unreadable", f"is not {encoding}: byte {byte:#04x}; mend it, or name the encoding of the source"
        )
    if (check := line_check(encoding)) is not None:
        for other in (check(value.encode(encoding)) for value in values):
            if other:
                return BadLine("other_encoding", not_of(encoding, other))
    return values
