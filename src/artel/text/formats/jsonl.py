"""JSON lines (plain or compressed), or one JSON array of objects: the text stands in a named field."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError
from artel.text.formats.json_fields import parser_of
from artel.text.formats.parquet import parquet_rows
from artel.text.reading.encodings import NotText, decode
from artel.text.reading.file_names import file_name, packed_too
from artel.text.reading.lines import BadLine, Span, line_encoding, read_byte_lines, read_lines
from artel.text.reading.sets import column_of_sets, set_of
from artel.text.records import Record, Rejected


def read_jsonl(
    file: Path, origin: str, set_name: str, source: SourceConfig, data: DataConfig, *, span: Span | None = None
) -> Iterator[Record | Rejected]:
    """Of a span the lines are numbered from its beginning."""
    parse = parser_of(source.field, column_of_sets(source))
    for where, row in read_rows(file, origin, source.encoding, data.max_document, span, parse):
        if isinstance(row, BadLine):
            yield Rejected(where, row.reason, row.detail, set_name)
        else:
            yield _record(row, where, set_name, source)


def read_rows(
    file: Path,
    origin: str,
    encoding: str,
    largest: int,
    span: Span | None = None,
    parse: Callable[[bytes], Any] = orjson.loads,
) -> Iterator[tuple[str, Any]]:
    """(place, value) of each row, or a BadLine for its value: `file:line` of JSON lines, `file[number]` of an array.

    Lines in UTF-8 are given to `parse`. Rows of a parquet file, all its columns, are the same to those who read fields.
    Raises InputError for a line, or a compressed array, of more than `largest` bytes, and for a parquet file that is
    damaged.
    """
    if file_name(origin).endswith(".parquet"):
        yield from parquet_rows(file, origin)
        return
    try:
        if span is None and _is_array(file, origin, encoding, largest):
            yield from _array(file, origin, encoding, largest)
            return
        if codecs.lookup(line_encoding(file, origin, encoding)).name in ("utf-8", "utf-8-sig"):
            rows = _utf_8_rows(file, origin, largest, span, parse)
        else:
            rows = _decoded_rows(file, origin, encoding, largest, span)
        for number, row in rows:
            yield f"{origin}:{number}", row
    except NotText as error:
        yield origin, BadLine(error.reason, error.detail)


def _utf_8_rows(
    file: Path, origin: str, largest: int, span: Span | None, parse: Callable[[bytes], Any]
) -> Iterator[tuple[int, Any]]:
    """The parser reads UTF-8 itself, at nearly twice the rate; only what it refuses is looked at closely."""
    for number, line in read_byte_lines(file, origin, largest, span):
        if isinstance(line, BadLine):
            yield number, line
            continue
        try:
            yield number, parse(line)
        except orjson.JSONDecodeError:
            try:
                text = decode(line, "utf-8")
            except NotText as error:
                yield number, BadLine(error.reason, error.detail)
            else:
                if text.strip():
                    yield number, _parsed(text)


def _decoded_rows(file: Path, origin: str, encoding: str, largest: int, span: Span | None) -> Iterator[tuple[int, Any]]:
    for number, line in read_lines(file, origin, encoding, largest, span):
        if isinstance(line, BadLine):
            yield number, line
        elif line.strip():
            yield number, _parsed(line)


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        return BadLine("bad_json", f"is not JSON: {error}")


_ARRAYS = packed_too(".json")


def _is_array(file: Path, origin: str, encoding: str, largest: int) -> bool:
    if not file_name(origin).endswith(_ARRAYS):
        return False
    lines = (line for _, line in read_lines(file, origin, encoding, _bound(file, origin, largest)))
    first = next((line for line in lines if isinstance(line, BadLine) or line.strip()), "")
    return isinstance(first, str) and first.lstrip().startswith("[")


def _bound(file: Path, origin: str, largest: int) -> int:
    """An array is parsed whole: no larger than its file, or than a document where only unpacking tells its size."""
    return max(largest, file.stat().st_size) if file_name(origin).endswith(".json") else largest


def _array(file: Path, origin: str, encoding: str, largest: int) -> Iterator[tuple[str, Any]]:
    bound = _bound(file, origin, largest)
    lines: list[str] = []
    size = 0
    for _, line in read_lines(file, origin, encoding, bound):
        if isinstance(line, BadLine):
            yield origin, line
            return
        lines.append(line)
        size += len(line) + 1
        if size > bound + 1:
            what = f"the array is over {largest:,} characters (data.max_document), and is parsed whole"
            fix = "write a larger data.max_document, or an object a line: jq -c '.[]'"
            raise InputError.at(origin, what, fix)
    entries = _parsed("\n".join(lines))
    if isinstance(entries, BadLine):
        yield origin, entries
        return
    for number, entry in enumerate(entries):
        yield f"{origin}[{number}]", entry


def _record(entry: object, where: str, set_name: str, source: SourceConfig) -> Record | Rejected:
    field = source.field
    if not isinstance(entry, dict):
        return Rejected(where, "bad_json", f"is {type(entry).__name__}, not an object with fields", set_name)
    if field not in entry:
        have = ", ".join(map(str, entry)) or "none"
        return Rejected(where, "no_field", f"has no field {field!r} (it has: {have}); write field: NAME", set_name)
    if not isinstance(entry[field], str):
        return Rejected(where, "no_text", f"field {field!r} is {type(entry[field]).__name__}, not text", set_name)
    found = set_of(entry, source, where, set_name)
    return Record(entry[field], where, found) if isinstance(found, str) else found
