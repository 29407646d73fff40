"""Pairs of texts: two columns of csv or parquet, two fields of JSON lines, or the rows of two files in parallel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError, Problem
from artel.storage import user_path
from artel.text.formats.format import Format
from artel.text.formats.jsonl import get_text_field, read_rows, require_object
from artel.text.formats.parquet import SUFFIX as PARQUET_SUFFIX
from artel.text.formats.parquet import check_parquet_columns
from artel.text.formats.table import Row, check_columns, read_csv_rows
from artel.text.reading.files import COMPRESSED_SUFFIXES, file_name, require_unchanged, with_compressed
from artel.text.reading.source_file import SourceFile
from artel.text.records import BadRecord, Pair, Record, Rejected

# JSON, and files that are read like JSON.
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json", *COMPRESSED_SUFFIXES, PARQUET_SUFFIX)
_TABLE_SUFFIXES = (".csv", ".tsv")
_COMPRESSED_TABLE_SUFFIXES = with_compressed(*_TABLE_SUFFIXES)[len(_TABLE_SUFFIXES) :]


def read_pairs(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield a record per row. The output is learned. Pairs with the same input go into the same split."""
    source = file.source
    outputs = user_path(source.outputs, "outputs") if source.outputs else file.path
    if outputs.resolve() != file.path.resolve():
        with require_unchanged(outputs):
            yield from _read_two_files(file, replace(file, path=outputs, origin=source.outputs))
        return
    for origin, row in _read_rows(file, [("input", source.input), ("output", source.output)]):
        yield file.reject(origin, row) if isinstance(row, BadRecord) else _build_pair(file, origin, *row)


def _read_two_files(inputs_file: SourceFile, outputs_file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield pairs of the rows of two files. A row that cannot be read rejects only its pair."""
    if not outputs_file.path.is_file():
        fix = "name the file of outputs: outputs: FILE"
        raise InputError.at(outputs_file.origin, "there is no such file", fix)
    inputs = _read_rows(inputs_file, [("input", inputs_file.source.input)])
    outputs = _read_outputs(outputs_file)
    for num_pairs, (input_row, output_row) in enumerate(zip_longest(inputs, outputs)):
        if input_row is None or output_row is None:
            longer_count = num_pairs + 1 + sum(1 for _ in (outputs if input_row is None else inputs))
            counts = (num_pairs, longer_count) if input_row is None else (longer_count, num_pairs)
            what = f"has {counts[0]:,} rows and {outputs_file.origin} has {counts[1]:,}: they do not match row for row"
            fix = "put the output of each input into the same row of the other file"
            raise InputError.at(inputs_file.origin, what, fix)
        (origin, input_values), (output_origin, output_values) = input_row, output_row
        if isinstance(input_values, BadRecord):
            yield inputs_file.reject(origin, input_values)
        elif isinstance(output_values, BadRecord):
            yield inputs_file.reject(output_origin, output_values)
        else:
            yield _build_pair(inputs_file, origin, input_values[0], output_values[0])


def _read_outputs(file: SourceFile) -> Iterator[Row]:
    try:
        yield from _read_rows(file, [("output", file.source.output)])
    except BadRecord as error:  # binary data
        what = f"{error.detail}; its inputs have no outputs"
        raise InputError.at(file.origin, what, "name the file of outputs: outputs: FILE") from None


def _build_pair(file: SourceFile, origin: str, input_text: str, output_text: str) -> Record | Rejected:
    for name, text in (("input", input_text), ("output", output_text)):
        if not text.strip():
            detail = f"the {name} is empty; fill it in, or remove the row"
            return file.reject(origin, BadRecord("empty_side", detail))
    return Record(output_text, origin, file.set_name, Pair(input_text, output_text), group=input_text)


def _read_rows(file: SourceFile, columns: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """Yield the values of the columns, given as (key of the source, name of the column), row by row."""
    name = file_name(file.origin)
    if name.endswith(_COMPRESSED_TABLE_SUFFIXES):
        raise InputError.at(file.origin, "is a compressed csv, which cannot be read", "unpack it")
    if name.endswith(_JSON_SUFFIXES):
        for origin, row in read_rows(file):
            try:
                entry = require_object(row)
                yield origin, tuple(get_text_field(entry, column, file.key, key) for key, column in columns)
            except BadRecord as error:
                yield origin, error
    elif file.source.outputs and not name.endswith(_TABLE_SUFFIXES):  # parallel texts: empty lines are rows, too
        for line_number, line in file.lines():
            yield f"{file.origin}:{line_number}", line if isinstance(line, BadRecord) else (line,)
    else:
        yield from read_csv_rows(file, columns)


def _has_lines(file: SourceFile) -> bool:
    """False for parquet, and with separate files of outputs, which may have another encoding."""
    return not (file.source.outputs or file_name(file.origin).endswith(PARQUET_SUFFIX))


def _check(path: Path, source: SourceConfig, key: str, data: DataConfig) -> list[Problem]:
    """Return a problem for each column that a table or parquet file lacks."""
    outputs = user_path(source.outputs, f"{key}.outputs") if source.outputs else path
    if outputs.resolve() == path.resolve():
        return _check_columns(path, [("input", source.input), ("output", source.output)], source, key, data)
    problems = _check_columns(path, [("input", source.input)], source, key, data)
    if outputs.is_file():
        problems += _check_columns(outputs, [("output", source.output)], source, key, data)
    return problems


def _check_columns(
    path: Path, columns: list[tuple[str, str]], source: SourceConfig, key: str, data: DataConfig
) -> list[Problem]:
    name = file_name(str(path))
    if name.endswith(PARQUET_SUFFIX):
        return check_parquet_columns(path, key, columns)
    if name.endswith(_TABLE_SUFFIXES):
        return check_columns(path, source, key, data, columns)
    return []


PAIRS = Format(
    read=read_pairs,
    yields=("pairs",),
    suffixes=(".csv", ".tsv", *with_compressed(".jsonl"), PARQUET_SUFFIX),
    has_lines=_has_lines,
    check=_check,
)
