"""Python objects as sources of text. They are written to a JSONL file once, which is then read like any other file.

The file is in the folder `rows` of the cache, and its name is a digest of its content. config.yaml of the run refers to
it as `{rows}/DIGEST.jsonl`, so the run can be resumed and repeated without the objects.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import orjson
import xxhash

from artel.errors import InputError
from artel.messages import logger
from artel.registry import FORMATS
from artel.storage import disk_errors, rows_folder, scratch_folder

_SUFFIX = ".jsonl"
_LOG_ROWS = 100_000  # this many take about a second to write
_CHUNK_ROWS = 10_000
_ROWS_FIX = "give a list of texts, a list of dicts, a dict of lists, a pandas DataFrame or a datasets.Dataset"


def is_table(value: object) -> bool:
    """True for pandas and datasets objects, which only a source accepts."""
    return isinstance(
        value,
        (
            *_loaded_types("pandas", "DataFrame", "Series"),
            *_loaded_types("datasets", "Dataset", *_UNSUPPORTED_DATASETS),
        ),
    )


def write_source(rows: Any, source: dict[str, Any], key: str) -> dict[str, Any]:
    """Write `rows` to a file and return `source`, which is at `key` of the run, with the file's path.

    Raise InputError if the rows cannot be stored, or the source also has a path or a format that cannot read them.
    """
    if source.get("path"):
        raise InputError.at(key, "has both rows and path", "split them into two sources")
    name = source.get("format", "auto")
    if name in FORMATS.names and not (FORMATS[name].goes_by_suffix or _SUFFIX in FORMATS[name].suffixes):
        fits = ", ".join(format for format in FORMATS.names if _SUFFIX in FORMATS[format].suffixes)
        raise InputError.at(f"{key}.format", f"{name} reads files, not rows", f"remove it, or use one of: {fits}")
    file = _write_rows(_iterate_rows(rows, str(source.get("field", "text")), f"{key}.rows"), f"{key}.rows")
    index = key.rpartition(".")[2]
    default = "rows" if index in ("sources", "0") else f"rows {index}"
    return {"name": default, **source, "path": [f"{{rows}}/{file.name}"]}


def _write_rows(rows: Iterable[dict[str, Any]], key: str) -> Path:
    folder = rows_folder()
    digest = xxhash.xxh3_128()
    row_count = 0
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with disk_errors(folder), scratch_folder(folder / "rows") as scratch:
        partial = scratch / "rows"
        with partial.open("wb") as stream:
            for row_count, row in enumerate(rows, 1):
                line = _to_json_line(row, f"{key}[{row_count - 1}]")
                digest.update(line)
                stream.write(line)
                if row_count == _LOG_ROWS:
                    logger.info("%s: writing the rows to %s", key, folder)
        if not row_count:
            raise InputError.at(key, "there are no rows", _ROWS_FIX)
        file = folder / f"{digest.hexdigest()}{_SUFFIX}"
        if not file.is_file() or file.stat().st_size != partial.stat().st_size:
            with partial.open("rb+") as stream:
                os.fsync(stream.fileno())
            # A token store detects changed texts by this time. Equal rows are the same text.
            os.utime(partial, ns=(0, 0))
            partial.replace(file)
    return file


def _to_json_line(row: dict[str, Any], location: str) -> bytes:
    for name in row:
        if not isinstance(name, str):
            raise InputError.at(location, f"has the field {name!r}, {type(name).__name__}", "write names as text")
    try:
        return orjson.dumps(row, default=_plain_cell, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
    except TypeError as error:
        fix = "remove the field, or convert it to text, a number, a list or a dict"
        raise InputError.at(location, f"has a value that JSON cannot store: {error}", fix) from None


def _plain_cell(value: Any) -> Any:
    """Convert a cell that orjson does not support: a missing value of pandas, a date, a numpy scalar."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and (value is pandas.NA or value is pandas.NaT):
        return None
    if isinstance(value, date):
        return value.isoformat()
    if type(value).__module__ == "numpy":
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")


def _iterate_rows(rows: Any, field: str, key: str) -> Iterator[dict[str, Any]]:
    if isinstance(rows, _loaded_types("datasets", *_UNSUPPORTED_DATASETS)):
        fix = 'choose its split: rows["train"]' if isinstance(rows, Mapping) else "give a list: list(rows.take(1000))"
        raise InputError.at(key, f"is {type_name(rows)}, not a Dataset", fix)
    if isinstance(rows, _loaded_types("datasets", "Dataset")):
        yield from _iterate_dataset(rows)
    elif isinstance(rows, _loaded_types("pandas", "DataFrame")):
        for start in range(0, len(rows), _CHUNK_ROWS):
            yield from rows.iloc[start : start + _CHUNK_ROWS].to_dict("records")
    elif isinstance(rows, Mapping):
        yield from _iterate_columns(rows, key)
    elif isinstance(rows, _column_types()):
        for index, row in enumerate(rows):
            if isinstance(row, str):
                yield {field: row}
            elif isinstance(row, Mapping):
                yield dict(row)
            else:
                fix = "give texts, or dicts of fields"
                raise InputError.at(f"{key}[{index}]", f"is {type_name(row)}, neither text nor dict", fix)
    else:
        raise InputError.at(key, f"is {type_name(rows)}", _ROWS_FIX)


def _iterate_columns(columns: Mapping[Any, Any], key: str) -> Iterator[dict[str, Any]]:
    for name, values in columns.items():
        if not isinstance(values, _column_types()):
            message = f"is {type_name(values)}, not a column"
            fix = 'give a dict of lists, {"text": ["…", "…"]}, or a list of dicts'
            raise InputError.at(f"{key}.{name}", message, fix)
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name}: {length:,}" for name, length in lengths.items())
        raise InputError.at(key, f"has columns of unequal lengths ({counts})", "give each row every field")
    for row in zip(*columns.values(), strict=True):
        yield dict(zip(columns, row, strict=True))


def _iterate_dataset(rows: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `datasets.Dataset`, with class names in place of class numbers (-1: no class)."""
    for row in rows.with_format(None):
        for name, feature in rows.features.items():
            names = getattr(getattr(feature, "feature", feature), "names", None)  # the inner feature of a list
            if names is not None:
                row[name] = _class_name(row[name], names)
        yield row


def _class_name(value: Any, names: list[str]) -> Any:
    if isinstance(value, list):
        return [_class_name(item, names) for item in value]
    return names[value] if value is not None and value >= 0 else None


_UNSUPPORTED_DATASETS = ("DatasetDict", "IterableDataset", "IterableDatasetDict")


def _column_types() -> tuple[type[Any], ...]:
    """Types accepted as a column of values."""
    return (list, tuple, *_loaded_types("pandas", "Series"), *_loaded_types("numpy", "ndarray"))


def _loaded_types(module: str, *names: str) -> tuple[type[Any], ...]:
    """Return types of a library, if it is imported. Otherwise no object of it can exist."""
    loaded = sys.modules.get(module)
    values = (getattr(loaded, name, None) for name in names)
    return tuple(value for value in values if isinstance(value, type))


def type_name(value: object) -> str:
    """Return the name of a value's type with its article, for messages."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
