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
from artel.text.reading.subsets import read_set_name, set_column
from artel.text.records import BadRecord, Record, Rejected

_ARRAY_SUFFIXES = with_compressed(".json")
SUFFIXES = (".ndjson", *with_compressed(".jsonl", ".json"))


def read_jsonl(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield a record per row. Lines of a span are numbered from its beginning."""
    source = file.source
    for origin, row in read_rows(file, line_parser(source.field, set_column(source))):
        try:
            entry = require_object(row)
            yield Record(
                get_text_field(entry, source.field, file.key), origin, read_set_name(entry, source, file.set_name)
            )
        except BadRecord as error:
            yield file.reject(origin, error)


def read_rows(file: SourceFile, parse: Callable[[bytes], Any] = orjson.loads) -> Iterator[tuple[str, Any]]:
    """Yield (origin, value) of each row; the value is a BadRecord if the row cannot be read.

    The origin is `file:line` for JSON lines, and `file[index]` for an array or parquet. A row of parquet is a
    dictionary of all columns. `parse` parses lines in UTF-8. Raise BadRecord for binary data; InputError for a line or
    compressed array of over data.max_document bytes, an array that is not JSON, and a damaged parquet file.
    """
    if file_name(file.origin).endswith(".parquet"):
        yield from parquet_rows(file)
    elif file.span is None and _is_array(file):
        fix = "write a larger data.max_document, or write one object per line: jq -c '.[]'"
        for index, entry in enumerate(parse_full(file.text(_max_array_bytes(file), fix), file.origin)):
            yield f"{file.origin}[{index}]", entry
    else:
        encoding = line_encoding(file.path, file.origin, file.source.encoding)
        is_utf_8 = codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")
        for line_number, row in _read_utf_8_rows(file, parse) if is_utf_8 else _read_decoded_rows(file):
            yield f"{file.origin}:{line_number}", row


def _read_utf_8_rows(file: SourceFile, parse: Callable[[bytes], Any]) -> Iterator[tuple[int, Any]]:
    """Let the parser decode UTF-8, almost twice as fast. Only lines that it refuses are decoded first."""
    for line_number, line in read_byte_lines(file.path, file.origin, file.max_bytes, file.span):
        if isinstance(line, BadRecord):
            yield line_number, line
            continue
        try:
            yield line_number, parse(line)
        except orjson.JSONDecodeError:
            try:
                text = decode(line, "utf-8")
                if text.strip():
                    yield line_number, _parse_line(text)
            except BadRecord as error:
                yield line_number, error


def _read_decoded_rows(file: SourceFile) -> Iterator[tuple[int, Any]]:
    for line_number, line in file.lines():
        if isinstance(line, BadRecord):
            yield line_number, line
        elif line.strip():
            try:
                yield line_number, _parse_line(line)
            except BadRecord as error:
                yield line_number, error


def _parse_line(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BadRecord("bad_json", f"is not JSON: {error}; write one object per line") from None


def parse_full(text: str, origin: str) -> Any:
    """Parse a file that is one JSON value. Raise InputError, with line and column, if it is not JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        where = f"{origin}:{error.lineno}:{error.colno}"
        if not text[error.pos :].strip():
            raise InputError.at(where, "the JSON is cut off here", "export or download the file again") from None
        fix = "fix it there, or write one object per line (.jsonl), so that a bad line costs only its row"
        excerpt = text[error.pos :].split("\n", 1)[0][:40]
        raise InputError.at(where, f"is not JSON: {error.msg}, at {excerpt!r}", fix) from None


def _is_array(file: SourceFile) -> bool:
    if not file_name(file.origin).endswith(_ARRAY_SUFFIXES):
        return False
    lines = read_lines(file.path, file.origin, file.source.encoding, _max_array_bytes(file))
    first = next((line for _, line in lines if isinstance(line, BadRecord) or line.strip()), "")
    return isinstance(first, str) and first.lstrip().startswith("[")


def _max_array_bytes(file: SourceFile) -> int:
    """Return the limit of an array, which is parsed as a whole: the file size, or data.max_document if compressed."""
    file_bytes = file.path.stat().st_size if file_name(file.origin).endswith(".json") else 0
    return max(file.max_bytes, file_bytes)


def require_object(row: Any) -> dict[str, Any]:
    """Return the row as a dictionary. Raise BadRecord if it is one, or if it is not an object."""
    if isinstance(row, BadRecord):
        raise row
    if not isinstance(row, dict):
        raise BadRecord("bad_json", f"is {type(row).__name__}; write an object with fields")
    return row


def get_nested_field(row: dict[str, Any], name: str) -> Any:
    """Return the value of a field; None if it is missing. A dot in `name` reaches into an object."""
    value: Any = row
    for step in [name] if name in row else name.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return value


def describe_fields(fields: dict[Any, Any]) -> str:
    """Return the names of fields, for error messages. Rows of user functions may have names that are not strings.

    Bytes of a table that cannot be decoded, and lone surrogates of JSON, are written as escapes.
    """
    return ", ".join(map(str, fields)).encode("utf-8", "backslashreplace").decode() or "none"


def get_text_field(entry: dict[str, Any], name: str, source_key: str, key: str = "field") -> str:
    """Return the text in the field that `key` of the source at `source_key` names. Raise BadRecord if it has none."""
    if name not in entry:
        what = f"has no field {name!r} (it has: {describe_fields(entry)})"
        raise BadRecord("no_field", f"{what}; write {column_fix(key, source_key)}")
    if entry[name] is None:
        raise BadRecord("no_text", f"field {name!r} is empty (null); fill it in, or remove the row")
    if not isinstance(entry[name], str):
        raise BadRecord("no_text", f"field {name!r} is {type(entry[name]).__name__}, not text; write it in quotes")
    return entry[name]


def has_lines(file: SourceFile) -> bool:
    """False for parquet files."""
    return not file_name(file.origin).endswith(SUFFIX)


def line_parser(text: str, column: str) -> Callable[[bytes], Any]:
    """Return a parser that, for most lines, creates only the fields `text` and `column`, if simdjson is installed."""
    if find_spec("simdjson") is None:
        return orjson.loads
    import simdjson

    parser, Object = simdjson.Parser(), simdjson.Object

    def parse(line: bytes) -> Any:
        # Without all() and suppress(): they took as long as the rest of a short line.
        try:
            entry = parser.parse(line)
            if isinstance(entry, Object):
                names = list(entry)
                # If a name occurs twice, simdjson returns the first field, orjson the last.
                is_unique = names.count(text) == 1 and names.count(column) <= 1
                if is_unique and isinstance(content := entry[text], str):
                    if column not in names:
                        return {text: content}
                    value = entry[column]
                    if isinstance(value, Object):
                        return {text: content, column: value.as_dict()}
                    if isinstance(value, str):
                        return {text: content, column: value}
        except (ValueError, RuntimeError):  # simdjson cannot turn large integers into floats; orjson reports errors
            pass
        return orjson.loads(line)

    return parse


JSONL = Format(
    read=read_jsonl,
    suffixes=SUFFIXES,
    is_detected=True,
    names_sets=True,
    has_lines=has_lines,
    can_be_divided=lambda source: True,
)
