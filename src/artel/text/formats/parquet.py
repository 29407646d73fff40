"""Parquet: the text is in a named column. Pages are read when needed, never the entire file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import orjson

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError, Problem, missing_extra
from artel.text.formats.format import Format
from artel.text.reading.encodings import decode
from artel.text.reading.files import file_name
from artel.text.reading.source_file import SourceFile
from artel.text.reading.subsets import read_set_name, set_column
from artel.text.records import BadRecord, Record, Rejected

# Rows of a batch. More rows do not make documents of 5 KB faster.
_MAX_BATCH_ROWS = 128
# Bytes of a batch, by the column sizes in the metadata: 32 rows of 1 MB.
_BATCH_BYTES = 1 << 25
# Bytes of a batch if each row repeats the largest value.
_MAX_REPEATED_BYTES = 1 << 27
# Bytes of a column read ahead. A row group of 300 MB of text (226 in the file) then takes 34 MB of memory. Without this
# buffer pyarrow loads the full column of the group: 253 MB.
_BUFFER_BYTES = 1 << 20
SUFFIX = ".parquet"
_FIX_COLUMN = "set field: to the name of the text column"


def read_parquet(file: SourceFile) -> Iterator[Record | Rejected]:
    """Yield a record per row; its origin is `file[row]`, from 0. Raise InputError for a damaged file."""
    source = file.source
    columns = [source.field]
    with _open(file.path, file.origin) as table:
        problem = _find_column_problem(table, source)
        if problem:
            raise InputError.at(file.origin, problem, _FIX_COLUMN)
        encoding = _choose_encoding(table.schema_arrow.field(source.field).type, source)
        if set_column(source) in table.schema_arrow.names and set_column(source) not in columns:
            columns.append(set_column(source))
        row_index = 0
        for batch in table.iter_batches(_choose_batch_rows(file.path, table, columns), columns=columns):
            fields = _split_batch(batch.drop_columns([source.field])) if len(columns) > 1 else None
            for value in _read_bytes(batch.column(source.field)):
                origin = f"{file.origin}[{row_index}]"
                row_index += 1
                entry = next(fields) if fields else {}
                set_name = file.set_name
                try:
                    set_name = read_set_name(entry if isinstance(entry, dict) else {}, source, file.set_name)
                    text = _decode_value(value, encoding, origin, file)
                except BadRecord as error:
                    yield Rejected(origin, error.reason, error.detail, set_name)
                    continue
                del value  # may be large, and processing the text takes memory too
                yield Record(text, origin, set_name)
                del text
            del batch  # before the next one is read
        _check_count(row_index, table, file.origin)


def _decode_value(value: bytes | None, encoding: str, origin: str, file: SourceFile) -> str:
    if value is None:
        raise BadRecord("no_text", f"column {file.source.field!r} is empty (null)")
    if len(value) > file.max_bytes:
        what = f"the text is over {file.max_bytes:,} bytes (data.max_document)"
        raise InputError.at(origin, what, "write a larger data.max_document")
    return decode(value, encoding)


def parquet_rows(file: SourceFile) -> Iterator[tuple[str, Any]]:
    """Yield (`file[row]`, the row as a dictionary of all its columns, or a BadRecord if a value cannot be read)."""
    with _open(file.path, file.origin) as table:
        row_index = 0
        for batch in table.iter_batches(_choose_batch_rows(file.path, table, table.schema_arrow.names)):
            for entry in _split_batch(batch):
                yield f"{file.origin}[{row_index}]", entry
                row_index += 1
        _check_count(row_index, table, file.origin)


def read_class_names(path: Path, origin: str, columns: Sequence[str]) -> dict[str, list[str]]:
    """Return {column: names of its classes} if Hugging Face `datasets` wrote the file and stores class numbers."""
    with _open(path, origin) as table:
        metadata_json = (table.schema_arrow.metadata or {}).get(b"huggingface")
    try:
        features = orjson.loads(metadata_json)["info"]["features"] if metadata_json else {}
    except (orjson.JSONDecodeError, KeyError, TypeError):  # written by another tool
        return {}
    names = {}
    for column in columns:
        feature = features.get(column) or {}
        feature = feature.get("feature", feature)  # for a list
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
            names[column] = list(map(str, feature["names"]))
    return names


def check_parquet(path: Path, source: SourceConfig, key: str, data: DataConfig) -> list[Problem]:
    """Return the problems of a parquet file, without reading rows. `key`: key of the source in the run file."""
    return _check(path, key, lambda table: _find_column_problem(table, source))


def check_parquet_rows(path: Path, source: SourceConfig, key: str, data: DataConfig) -> list[Problem]:
    """Return the problems of a file whose rows are read with all their columns; none if it is not parquet."""
    return _check(path, key, _find_duplicate_column) if file_name(str(path)).endswith(SUFFIX) else []


def check_parquet_columns(path: Path, key: str, columns: Sequence[tuple[str, str]]) -> list[Problem]:
    """Return the problems of a file, with one for each (key of the source, name) of `columns` that it lacks."""
    if problems := _check(path, key, _find_duplicate_column):
        return problems
    with _open(path, str(path)) as table:
        names = table.schema_arrow.names
    existing = ", ".join(names) or "none"
    return [
        Problem(f"{key}.{column}", f"{path} has no column {name!r} (it has: {existing})", f"write {column}: NAME")
        for column, name in columns
        if name not in names
    ]


def _check(path: Path, key: str, problem_of: Callable[[Any], str]) -> list[Problem]:
    try:
        with _open(path, str(path)) as table:
            problem = problem_of(table)
            return [Problem(f"{key}.field", f"{path} {problem}", _FIX_COLUMN)] if problem else []
    except InputError as error:
        return list(error.problems)


@contextmanager
def _open(path: Path, origin: str) -> Iterator[Any]:
    """Open a pyarrow ParquetFile. Errors of pyarrow inside the block are reported as damage to the file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_extra("pyarrow", "parquet", origin) from None
    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table:
            yield table
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last for names that are not UTF-8
        raise _damage_error(origin, " ".join(str(error).split())[:200] or type(error).__name__) from error


def _choose_batch_rows(path: Path, table: Any, columns: list[str]) -> int:
    """Return the number of rows per batch: about _BATCH_BYTES if rows have equal sizes, and never far more."""
    batch_rows = _MAX_BATCH_ROWS
    with path.open("rb", buffering=0) as file:
        for group_index in range(table.num_row_groups):
            group = table.metadata.row_group(group_index)
            if group.num_rows == 0:
                continue
            chunks = [
                chunk
                for chunk in map(group.column, range(group.num_columns))
                if chunk.path_in_schema.partition(".")[0] in columns
            ]
            num_bytes = sum(chunk.total_uncompressed_size for chunk in chunks)
            dictionary_bytes = sum(_read_dictionary_size(file, chunk) for chunk in chunks)
            batch_rows = min(
                batch_rows,
                max(1, _BATCH_BYTES * group.num_rows // max(num_bytes, 1)),
                max(1, _MAX_REPEATED_BYTES // max(dictionary_bytes, 1)),
            )
    return batch_rows


def _read_dictionary_size(file: IO[bytes], chunk: Any) -> int:
    """Return the bytes of the dictionary page of a column chunk, whose values all rows may repeat; 0 if it has none.

    The page header is a Thrift struct in compact form; it begins with the fields type and uncompressed_page_size:
    https://parquet.apache.org/docs/file-format/metadata/
    """
    offset = chunk.dictionary_page_offset
    if offset is None:
        return 0
    file.seek(offset)
    header = file.read(16)
    num_bytes, shift = 0, 0
    if header[:1] == b"\x15" and header[2:3] == b"\x15":  # two fields, each an i32; the type takes one byte
        for byte in header[3:]:
            num_bytes |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
    return num_bytes // 2  # zigzag


def _check_count(num_rows: int, table: Any, origin: str) -> None:
    if num_rows != table.metadata.num_rows:
        raise _damage_error(origin, f"it ends after {num_rows:,} of {table.metadata.num_rows:,} rows")


def _damage_error(origin: str, what: str) -> InputError:
    fix = "download or write it again, or remove it; if it is not parquet, set its format"
    return InputError.at(origin, f"cannot be read as parquet: {what}", fix)


def _find_column_problem(table: Any, source: SourceConfig) -> str:
    """Return why the column of the source cannot be read as text; empty if it can."""
    schema = table.schema_arrow
    if schema.names.count(source.field) > 1:
        return _find_duplicate_column(table)
    if source.field not in schema.names:
        return f"has no column {source.field!r} (it has: {', '.join(schema.names) or 'none'})"
    kind = schema.field(source.field).type
    return "" if _choose_encoding(kind, source) else f"has {kind}, not text, in the column {source.field!r}"


def _find_duplicate_column(table: Any) -> str:
    """Return the problem of several columns with the same name; empty if there is none."""
    names = table.schema_arrow.names
    name = next((name for name in names if names.count(name) > 1), None)
    return "" if name is None else f"has {names.count(name)} columns {name!r}; rename them"


def _choose_encoding(kind: Any, source: SourceConfig) -> str:
    """Return the encoding of a column type: UTF-8 for text, that of the source for bytes; empty for other types.

    A column of nulls only (a shard without any text) has the null type. Its rows are rejected one by one.
    """
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_null(kind) or types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "utf-8"
    return source.encoding if types.is_binary(kind) or types.is_large_binary(kind) else ""


def _read_bytes(column: Any) -> Iterator[bytes | None]:
    """Yield the stored bytes of each value of a column."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for index in range(len(column)):
        value = column[index]
        yield value.as_buffer().to_pybytes() if value.is_valid else None


def _split_batch(batch: Any) -> Iterator[Any]:
    """Yield the rows of a batch one by one, so that a value that cannot be decoded rejects only its row."""
    for index in range(batch.num_rows):
        try:
            yield batch.slice(index, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield BadRecord("unreadable", f"holds text that is not utf-8: byte {error.object[error.start]:#04x}")
        except (ValueError, ArithmeticError, LookupError) as error:  # years over 9999, unknown time zones, a name twice
            detail = f"holds a value that cannot be read: {error}; fix it, or remove its column"
            yield BadRecord("unreadable", detail)


PARQUET = Format(read=read_parquet, suffixes=(SUFFIX,), is_detected=True, names_sets=True, check=check_parquet)
