"""JSON lines (plain, .gz, .zst), or one JSON array of objects: the text stands in a named field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson

from artel.config import DataConfig, SourceConfig
from artel.text.encodings import NotText
from artel.text.records import Record, Rejected
from artel.text.sources.find import file_name
from artel.text.sources.lines import BadLine, read_lines


def read_jsonl(
    file: Path, origin: str, set_name: str, source: SourceConfig, data: DataConfig
) -> Iterator[Record | Rejected]:
    if file_name(origin).endswith(".json") and _is_array(file):
        yield from _read_array(file, origin, set_name, source)
        return
    try:
        for number, line in read_lines(file, origin, source.encoding, data.max_document):
            where = f"{origin}:{number}"
            if isinstance(line, BadLine):
                yield Rejected(where, line.reason, line.detail, set_name)
            elif line.strip():
                try:
                    yield _record(orjson.loads(line), where, set_name, source.field)
                except orjson.JSONDecodeError as error:
                    yield Rejected(where, "bad_json", f"is not JSON: {error}", set_name)
    except NotText as error:
        yield Rejected(origin, error.reason, error.detail, set_name)


def _is_array(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _read_array(file: Path, origin: str, set_name: str, source: SourceConfig) -> Iterator[Record | Rejected]:
    try:
        entries = orjson.loads(file.read_bytes().removeprefix(b"\xef\xbb\xbf"))
    except orjson.JSONDecodeError as error:
        yield Rejected(origin, "bad_json", f"is not JSON: {error}", set_name)
        return
    for number, entry in enumerate(entries):
        yield _record(entry, f"{origin}[{number}]", set_name, source.field)


def _record(entry: object, where: str, set_name: str, field: str) -> Record | Rejected:
    if not isinstance(entry, dict):
        return Rejected(where, "bad_json", f"is {type(entry).__name__}, not an object with fields", set_name)
    if field not in entry:
        have = ", ".join(map(str, entry)) or "none"
        return Rejected(where, "no_field", f"has no field {field!r} (it has: {have}); write field: NAME", set_name)
    if not isinstance(entry[field], str):
        return Rejected(where, "no_text", f"field {field!r} is {type(entry[field]).__name__}, not text", set_name)
    return Record(entry[field], where, set_name)
