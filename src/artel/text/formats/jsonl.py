"""JSON lines (plain or compressed), or one JSON array of objects; the text is in a named field.

simdjson parses the lines if it is installed (the extra `fast`), else orjson.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import orjson

from artel.errors import InputError
from artel.text.formats.format import Format
from artel.text.formats.parquet import SUFFIX, parquet_rows
from artel.text.reading.encodings import decode
from artel.text.reading.files import file_name, with_compressed
from artel.text.reading.lines import line_encoding, read_byte_lines, read_lines
from artel.text.reading.source_file import SourceFile, column_fix
from artel.text.reading.subsets import set_column, set_name_of
from artel.text.records import BadRecord, Record, Rejected

_ARRAY_SUFFIXES = with_compressed(".json")


SUFFIXES = (".ndjson", *with_compressed(".jsonl", ".json"))


def read_jsonl(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield a record per row. Lines of a span are numbered from its beginning."""
    source = file.source
    for place, row in read_rows(file, line_parser(source.field, set_column(source))):
        try:
            entry = object_of(row)
            yield Record(text_field(entry, source.field, file.key), place, set_name_of(entry, source, file.set_name))
        except BadRecord as error:
            yield file.reject(place, error)


def read_rows(file: SourceFile, parse: Callable[[bytes], Any] = orjson.loads) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of each row; the value is a BadRecord if the row cannot be read.

    The place is `file:line` for JSON lines and `file[number]` for an array or parquet, of which a row is a dictionary
    of all columns. `parse` parses lines in UTF-8. Raises BadRecord for binary data; InputError for a line, or a
    compressed array, of over data.max_document bytes, for an array that is not JSON, and for a damaged parquet file.
    """
    if file_name(file.origin).endswith(".parquet"):
        yield from parquet_rows(file)
    elif file.span is None and _is_array(file):
        fix = "write a larger data.max_document, or write one object per line: jq -c '.[]'"
        for number, entry in enumerate(parse_whole(file.text(_max_array_bytes(file), fix), file.origin)):
            yield f"{file.origin}[{number}]", entry
    else:
        encoding = line_encoding(file.path, file.origin, file.source.encoding)
        is_utf_8 = codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")
        for number, row in _utf_8_rows(file, parse) if is_utf_8 else _decoded_rows(file):
            yield f"{file.origin}:{number}", row


def _utf_8_rows(file: SourceFile, parse: Callable[[bytes], Any]) -> Iterator[tuple[int, Any]]:
    """The parser reads UTF-8 itself, almost twice as fast; only lines that it refuses are decoded here."""
    for number, line in read_byte_lines(file.path, file.origin, file.max_bytes, file.span):
        if isinstance(line, BadRecord):
            yield number, line
            continue
        try:
            yield number, parse(line)
        except orjson.JSONDecodeError:
            try:
                text = decode(line, "utf-8")
                if text.strip():
                    yield number, _parsed(text)
            except BadRecord as error:
                yield number, error


def _decoded_rows(file: SourceFile) -> Iterator[tuple[int, Any]]:
    for number, line in file.lines():
        if isinstance(line, BadRecord):
            yield number, line
        elif line.strip():
            try:
                yield number, _parsed(line)
            except BadRecord as error:
                yield number, error


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRecord("bad_json", f"is not JSON: {error}; write one object per line") from None


def parse_whole(text: str, origin: str) -> Any:
    """Parse a file that is one JSON value. Raises InputError, with line and column, where it is not JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        place = f"{origin}:{error.lineno}:{error.colno}"
        if not text[error.pos :].strip():
            raise InputError.at(place, "the JSON is cut off here", "export or download the file again") from None
        fix = "correct it there, or write one object per line (.jsonl), where a bad line costs only its own row"
        shown = text[error.pos :].split("\n", 1)[0][:40]
        raise InputError.at(place, f"is not JSON: {error.msg}, at {shown!r}", fix) from None


def _is_array(file: SourceFile) -> bool:
    if not file_name(file.origin).endswith(_ARRAY_SUFFIXES):
        return False
    lines = read_lines(file.path, file.origin, file.source.encoding, _max_array_bytes(file))
    first = next((line for _, line in lines if isinstance(line, BadRecord) or line.strip()), "")
    return isinstance(first, str) and first.lstrip().startswith("[")


def _max_array_bytes(file: SourceFile) -> int:
    """An array is parsed as a whole: its file's size is the limit, or data.max_document if only unpacking tells it."""
    size = file.path.stat().st_size if file_name(file.origin).endswith(".json") else 0
    return max(file.max_bytes, size)


def object_of(row: Any) -> dict[str, Any]:
    """The row as a dictionary of its fields. Raises BadRecord: the row's own, or because it is no object."""
    if isinstance(row, BadRecord):
        raise row
    if not isinstance(row, dict):
        raise BadRecord("bad_json", f"is {type(row).__name__}; write an object with fields")
    return row


def text_field(entry: dict[str, Any], name: str, source: str, key: str = "field") -> str:
    """The text in a field that the source, at the key `source`, names by `key`. Raises BadRecord."""
    if name not in entry:
        have = ", ".join(map(str, entry)) or "none"
        raise BadRecord("no_field", f"has no field {name!r} (it has: {have}); write {column_fix(key, source)}")
    if entry[name] is None:
        raise BadRecord("no_text", f"field {name!r} is empty (null); fill it in, or leave the row out")
    if not isinstance(entry[name], str):
        raise BadRecord("no_text", f"field {name!r} is {type(entry[name]).__name__}, not text; write it in quotes")
    return entry[name]


def has_lines(file: SourceFile) -> bool:
    """False for a file of parquet, which is read by row as JSON is."""
    return not file_name(file.origin).endswith(SUFFIX)


JSONL = Format(
    read=read_jsonl,
    suffixes=SUFFIXES,
    is_detected=True,
    names_sets=True,
    has_lines=has_lines,
    can_be_divided=lambda source: True,
)


def line_parser(text: str, column: str) -> Callable[[bytes], Any]:
    """A parser of lines with a string in the field `text` and an object, a string or nothing in the field `column`.

    For such a line it returns a dictionary of these two fields; for any other line everything in it. simdjson creates
    Python objects for these fields only, and parses the rest faster. Raises orjson.JSONDecodeError.
    """
    if find_spec("simdjson") is None:
        return orjson.loads
    import simdjson

    parser, Object = simdjson.Parser(), simdjson.Object

    def parse(line: bytes) -> Any:
        # No all() over the values and no suppress(): they took as long as the rest of a short line.
        try:
            entry = parser.parse(line)
            if isinstance(entry, Object):
                names = list(entry)
                # Of two fields with one name simdjson returns the first, orjson the last.
                is_unique = names.count(text) == 1 and names.count(column) <= 1
                if is_unique and isinstance(content := entry[text], str):
                    if column not in names:
                        return {text: content}
                    value = entry[column]
                    if isinstance(value, Object):
                        return {text: content, column: value.as_dict()}
                    if isinstance(value, str):
                        return {text: content, column: value}
        except (ValueError, RuntimeError):  # simdjson has no floats for large integers; orjson reports what is wrong
            pass
        return orjson.loads(line)

    return parse
