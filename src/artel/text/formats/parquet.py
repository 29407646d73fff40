"""Parquet: the text stands in a named column; pages are read as they are needed, never the whole file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError, Problem, missing_extra
from artel.text.reading.encodings import NotText, decode
from artel.text.reading.lines import BadLine
from artel.text.reading.sets import column_of_sets, set_of
from artel.text.records import Record, Rejected

# Rows taken at once: with more of them documents of 5 KB come no faster.
_ROWS = 128
# Bytes of rows taken at once, by what the file says of its columns: rows of 1 MB come 32 at a time.
_ROWS_BYTES = 1 << 25
# Bytes of rows taken at once, where all of them repeat the largest value there is.
_REPEATED_BYTES = 1 << 27
# Bytes of a column read ahead. A row group of 300 MB of text (226 in the file) then takes 34 MB of memory; without,
# pyarrow loads the group's whole column: 253 MB.
_BUFFER = 1 << 20
_FIX_COLUMN = "write field: NAME of the column that holds the text"


def read_parquet(
    file: Path, origin: str, set_name: str, source: SourceConfig, data: DataConfig
) -> Iterator[Record | Rejected]:
    """A record a row, its origin `file[row]` from 0.

    Raises InputError for a file that is damaged, a column that is not there or holds no text, and a text of more than
    data.max_document bytes.
    """
    columns = [source.field]
    with _opened(file, origin) as table:
        wrong = _wrong_column(table, source)
        if wrong:
            raise InputError.at(origin, wrong, _FIX_COLUMN)
        encoding = _encoding(table.schema_arrow.field(source.field).type, source)
        of_sets = column_of_sets(source)
        if of_sets in table.schema_arrow.names and of_sets not in columns:
            columns.append(of_sets)
        row = 0
        for batch in table.iter_batches(_rows_at_once(file, table, columns), columns=columns):
            fields = _rows(batch.drop_columns([source.field])) if len(columns) > 1 else None
            for value in _bytes(batch.column(source.field)):
                where = f"{origin}[{row}]"
                row += 1
                entry = next(fields) if fields else {}
                if value is None:
                    yield Rejected(where, "no_text", f"column {source.field!r} is empty (null)", set_name)
                    continue
                if len(value) > data.max_document:
                    what = f"the text is over {data.max_document:,} bytes (data.max_document)"
                    raise InputError.at(where, what, "write a larger data.max_document")
                found = set_of(entry if isinstance(entry, dict) else {}, source, where, set_name)
                if not isinstance(found, str):
                    yield found
                    continue
                try:
                    text = decode(value, encoding)
                except NotText as error:
                    yield Rejected(where, error.reason, error.detail, found)
                    continue
                del value  # may be large, and what is made of the text takes memory too
                yield Record(text, where, found)
                del text
            del batch  # before the next one is read
        if row != table.metadata.num_rows:
            raise _damaged(origin, f"it ends after {row:,} of {table.metadata.num_rows:,} rows")


def parquet_rows(file: Path, origin: str) -> Iterator[tuple[str, Any]]:
    """(`file[row]`, the row as a dict of its columns), or a BadLine where a row holds text that is none."""
    with _opened(file, origin) as table:
        row = 0
        for batch in table.iter_batches(_rows_at_once(file, table, table.schema_arrow.names)):
            for entry in _rows(batch):
                yield f"{origin}[{row}]", entry
                row += 1
        if row != table.metadata.num_rows:
            raise _damaged(origin, f"it ends after {row:,} of {table.metadata.num_rows:,} rows")


def check_parquet(file: Path, source: SourceConfig, where: str) -> list[Problem]:
    """What is wrong with a parquet file before any of its rows is read; `where` is the source's key in the run file."""
    try:
        with _opened(file, str(file)) as table:
            wrong = _wrong_column(table, source) if source.format in ("auto", "parquet") else _twice(table)
            return [Problem(f"{where}.field", f"{file} {wrong}", _FIX_COLUMN)] if wrong else []
    except InputError as error:
        return list(error.problems)


@contextmanager
def _opened(file: Path, origin: str) -> Iterator[Any]:
    """The file as pyarrow's ParquetFile; what pyarrow raises inside is told as damage to the file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise missing_extra("pyarrow", "parquet", origin) from None
    try:
        with pyarrow.parquet.ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False) as table:
            yield table
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of names that are no text
        raise _damaged(origin, " ".join(str(error).split())[:200] or type(error).__name__) from error


def _rows_at_once(path: Path, table: Any, columns: list[str]) -> int:
    """So many that they take about `_ROWS_BYTES` where the rows of a group are of one size, and never far more."""
    rows = _ROWS
    with path.open("rb", buffering=0) as file:
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            if group.num_rows == 0:
                continue
            chunks = [group.column(column) for column in range(group.num_columns)]
            of_columns = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
            size = sum(chunk.total_uncompressed_size for chunk in of_columns)
            rows = min(rows, max(1, _ROWS_BYTES * group.num_rows // max(size, 1)))
            repeated = sum(_dictionary_size(file, chunk) for chunk in of_columns)
            rows = min(rows, max(1, _REPEATED_BYTES // max(repeated, 1)))
    return rows


def _dictionary_size(file: IO[bytes], chunk: Any) -> int:
    """Bytes of the values that a chunk of a column has once and its rows may all repeat; 0 where it has no such page.

    They are in the page's header, a Thrift struct in its compact form that begins with the fields type and
    uncompressed_page_size: https://parquet.apache.org/docs/file-format/metadata/
    """
    at = chunk.dictionary_page_offset
    if at is None:
        return 0
    file.seek(at)
    head = file.read(16)
    size, shift = 0, 0
    if head[:1] == b"\x15" and head[2:3] == b"\x15":  # two fields, each an i32, the type of one byte
        for byte in head[3:]:
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
    return size // 2  # zigzag


def _damaged(origin: str, what: str) -> InputError:
    fix = "fetch or write it anew, or leave it out; if it is not parquet, give its format"
    return InputError.at(origin, f"cannot be read as parquet: {what}", fix)


def _wrong_column(table: Any, source: SourceConfig) -> str:
    """Why the texts cannot be taken from the column that the source names; empty when they can."""
    schema = table.schema_arrow
    if schema.names.count(source.field) > 1:
        return _twice(table)
    if source.field not in schema.names:
        return f"has no column {source.field!r} (it has: {', '.join(schema.names) or 'none'})"
    kind = schema.field(source.field).type
    return "" if _encoding(kind, source) else f"has {kind}, not text, in the column {source.field!r}"


def _twice(table: Any) -> str:
    """What is said of columns of one name: which of them is meant is known to nobody."""
    names = table.schema_arrow.names
    twice = next((name for name in names if names.count(name) > 1), None)
    return "" if twice is None else f"has {names.count(twice)} columns {twice!r}; rename them"


def _encoding(kind: Any, source: SourceConfig) -> str:
    """The encoding of a column's values: text is always UTF-8, bytes are what the source says; empty for others."""
    from pyarrow import types

    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "utf-8"
    return source.encoding if types.is_binary(kind) or types.is_large_binary(kind) else ""


def _bytes(column: Any) -> Iterator[bytes | None]:
    """The texts of a column as the bytes they are stored as."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for number in range(len(column)):
        buffer = column[number].as_buffer()
        yield None if buffer is None else buffer.to_pybytes()


def _rows(batch: Any) -> Iterator[Any]:
    """Row for row; not a batch at once, so that bytes that are no UTF-8 cost their row only."""
    for number in range(batch.num_rows):
        try:
            yield batch.slice(number, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield BadLine("unreadable", f"holds text that is not utf-8: byte {error.object[error.start]:#04x}")
        except (ValueError, ArithmeticError, LookupError) as error:  # years over 9999, unknown time zones, a name twice
            yield BadLine("unreadable", f"holds a value that cannot be read: {error}; mend it, or leave its column out")
