"""Texts with labels: columns of a table, fields of JSON lines, columns of parquet, or folders named by labels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from artel.config import DataConfig, SourceConfig
from artel.errors import Problem
from artel.printable import shorten
from artel.text.formats.format import Format
from artel.text.formats.jsonl import SUFFIXES as JSON_SUFFIXES
from artel.text.formats.jsonl import describe_fields, get_text_field, read_rows, require_object
from artel.text.formats.parquet import SUFFIX as PARQUET_SUFFIX
from artel.text.formats.parquet import check_parquet_columns, read_class_names
from artel.text.formats.table import check_columns, read_csv_rows
from artel.text.formats.text import read_text
from artel.text.reading.files import file_name, is_url, with_compressed
from artel.text.reading.source_file import SourceFile, column_fix
from artel.text.records import BadRecord, LabeledText, Record, Rejected

_TABLE_SUFFIXES = with_compressed(".csv", ".tsv")
_LIST_AS_TEXT = re.compile(r"""\[\s*(['"\d].*)?\]""", re.DOTALL)  # lists in csv as pandas and `datasets` write them
_MARK_VALUES = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}


def read_labels(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield a labeled text per row; for a text file, its documents, labeled by the name of its folder."""
    if _is_text(file.origin):
        yield from _read_text_file(file)
        return
    for origin, row in _read_rows(file):
        try:
            if isinstance(row, BadRecord):
                raise row
            text, second, *values = row
            yield _build_record(file, origin, text, second, _parse_labels(values, file.source))
        except BadRecord as error:
            yield file.reject(origin, error)


def _build_record(file: SourceFile, origin: str, text: str, second: str, labels: tuple[str, ...]) -> Record:
    texts = (text, second) if file.source.second else (text,)
    if not all(map(str.strip, texts)):
        role = "second text" if text.strip() else "text"
        raise BadRecord("empty", f"the {role} is empty; fill it in, or remove the row")
    fields = LabeledText(text, second, labels, _parse_number(labels))
    return Record("\n".join(texts), origin, file.set_name, fields, group=text if second else "")


def _read_text_file(file: SourceFile) -> Iterator[Record | Rejected]:
    path = urlsplit(file.origin).path if is_url(file.origin) else Path(file.origin).as_posix()
    label = PurePosixPath(path).parent.name or file.path.resolve().parent.name
    for item in read_text(file):
        if isinstance(item, Rejected):
            yield item
            continue
        try:
            yield _build_record(file, item.origin, item.text, "", (label,))
        except BadRecord as error:
            yield file.reject(item.origin, error)


def _read_rows(file: SourceFile) -> Iterator[tuple[str, Sequence[Any] | BadRecord]]:
    """Yield (origin, (text, second text or "", values of the label columns)) of each row."""
    source = file.source
    if file_name(file.origin).endswith(_TABLE_SUFFIXES):
        for origin, values in read_csv_rows(file, _list_columns(source)):
            if isinstance(values, BadRecord) or source.second:
                yield origin, values
            else:
                yield origin, (values[0], "", *values[1:])
        return
    names = read_class_names(file.path, file.origin, source.label) if _is_parquet(file.origin) else {}
    for origin, row in read_rows(file):
        try:
            entry = require_object(row)
            second = get_text_field(entry, source.second, file.key, "second") if source.second else ""
            labels = [_get_field(entry, name, names, file.key) for name in source.label]
            yield origin, (get_text_field(entry, source.field, file.key), second, *labels)
        except BadRecord as error:
            yield origin, error


def _get_field(entry: dict[str, Any], name: str, names: dict[str, list[str]], source_key: str) -> Any:
    if name not in entry:
        what = f"has no field {name!r} (it has: {describe_fields(entry)})"
        raise BadRecord("no_field", f"{what}; write {column_fix('label', source_key)}")
    value = entry[name]
    return _get_class_name(value, name, names[name]) if name in names else value


def _get_class_name(value: Any, column: str, names: list[str]) -> Any:
    """Return the name of a class number, as stored by `datasets`. -1 is a row without a label."""
    if isinstance(value, list):
        return [_get_class_name(item, column, names) for item in value]
    if not isinstance(value, int) or value == -1:
        return None
    if not 0 <= value < len(names):
        detail = f"column {column!r} has class {value}, but the file names {len(names)}; fix it, or remove the row"
        raise BadRecord("unknown_label", detail)
    return names[value]


def _parse_labels(values: Sequence[Any], source: SourceConfig) -> tuple[str, ...]:
    """Return the labels of a row from the values of its label columns. Raise BadRecord for other values."""
    if len(source.label) > 1:
        return tuple(name for name, value in zip(source.label, values, strict=True) if _parse_mark(name, value))
    (value,) = values
    if isinstance(value, str) and source.separator:
        items: list[Any] = [item for item in value.split(source.separator) if item.strip()]
    else:
        items = value if isinstance(value, list) else [value]
        _check_items(value, source.label[0])
    return tuple(dict.fromkeys(_parse_label(item, source.label[0]) for item in items))


def _check_items(value: Any, column: str) -> None:
    """Raise BadRecord for a list of 0 and 1, and for a list written as text in a cell: neither names its labels."""
    if isinstance(value, list) and len(value) > 1 and all(item in (0, 1) for item in value):
        if len(set(value)) < len(value) or any(isinstance(item, float) for item in value):
            what = f"the label in {column!r} is a list of {len(value)} marks, 0 or 1"
            raise BadRecord("no_label", f"{what}; write the names of its labels, or a column for each label")
    elif isinstance(value, str) and _LIST_AS_TEXT.fullmatch(value.strip()):
        what = f"the label in {column!r} is the text of a list, {shorten(value)!r}"
        raise BadRecord("no_label", f"{what}; write x,y with separator: ',' in the source, or JSON lines")


def _parse_mark(name: str, value: Any) -> bool:
    mark = _MARK_VALUES.get(str(value).strip().lower())
    if mark is None:
        what = f"column {name!r} is {value!r}; several columns of labels hold 0 or 1"
        raise BadRecord("no_label", f"{what}; fix it, or name one column: label: NAME")
    return mark


def _parse_label(value: Any, column: str) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str) and value is not None:
        what = f"the label in {column!r} is {type(value).__name__}"
        raise BadRecord("no_label", f"{what}; write a text, a number, or a list of them")
    if value is None or not value.strip():
        raise BadRecord("no_label", f"the label in {column!r} is empty; fill it in, or remove the row")
    return value.strip()


def _parse_number(labels: tuple[str, ...]) -> float | None:
    """Return the only label as a finite number; None if it is not one."""
    if len(labels) != 1:
        return None
    try:
        number = float(labels[0])
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _list_columns(source: SourceConfig) -> list[tuple[str, str]]:
    """Return (key of the source, name in the header) of each column to read."""
    second = [("second", source.second)] if source.second else []
    return [("field", source.field), *second, *(("label", name) for name in source.label)]


def _is_text(origin: str) -> bool:
    """True for files other than tables, JSON and parquet."""
    return not file_name(origin).endswith((*_TABLE_SUFFIXES, *JSON_SUFFIXES, PARQUET_SUFFIX))


def _is_parquet(origin: str) -> bool:
    return file_name(origin).endswith(PARQUET_SUFFIX)


def _has_lines(file: SourceFile) -> bool:
    if _is_text(file.origin):
        return file.source.document in ("line", "paragraph")
    return not _is_parquet(file.origin)


def _check(path: Path, source: SourceConfig, key: str, data: DataConfig) -> list[Problem]:
    """Return a problem for each column that a table or parquet file lacks."""
    if file_name(str(path)).endswith(_TABLE_SUFFIXES):
        return check_columns(path, source, key, data, _list_columns(source))
    return check_parquet_columns(path, key, _list_columns(source)) if _is_parquet(str(path)) else []


LABELS = Format(
    read=read_labels,
    yields=("labels",),
    suffixes=(*_TABLE_SUFFIXES, *JSON_SUFFIXES, PARQUET_SUFFIX, *with_compressed(".txt")),
    is_by_folder=True,
    has_lines=_has_lines,
    check=_check,
)
