"""Reading an input shard: file after file, each by its format."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from artel.config import DataConfig, SourceConfig
from artel.secrets import hide_secrets
from artel.storage import RemoteFile, cache_folder, fetch, fetch_remote, is_remote
from artel.text.formats.chat import read_chat, read_preferences
from artel.text.formats.dummy import read_dummy
from artel.text.formats.dummy_questions import read_dummy_questions
from artel.text.formats.html import read_html
from artel.text.formats.jsonl import read_jsonl
from artel.text.formats.pairs import read_pairs
from artel.text.formats.parquet import read_parquet
from artel.text.formats.questions import read_nq, read_squad
from artel.text.formats.table import read_table
from artel.text.formats.text import read_text
from artel.text.formats.warc import read_warc
from artel.text.reading.file_names import file_name, is_url
from artel.text.reading.lines import line_encoding
from artel.text.reading.rows import slice_rows
from artel.text.reading.sets import filter_sets
from artel.text.reading.source_file import Items, SourceFile
from artel.text.reading.unchanged import unchanged
from artel.text.records import BadRecord
from artel.text.sources.find import format_of
from artel.text.sources.inputs import Input, InputShard, source_at

OnEncoding = Callable[[str, str], object]

_READERS: dict[str, Callable[[SourceFile], Items]] = {
    "text": read_text,
    "html": read_html,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "warc": read_warc,
    "csv": read_table,
    "pairs": read_pairs,
    "nq": read_nq,
    "squad": read_squad,
    "chat": read_chat,
    "preference": read_preferences,
}


def read_shard(shard: InputShard, data: DataConfig, on_encoding: OnEncoding = lambda *_: None) -> Items:
    """The records of an input shard, of the sets that its source includes. Lines of a span are numbered within it.

    `on_encoding` is called with the set's name and the encoding of each file whose encoding is detected; of a file in
    several spans, by the first of them.
    """
    source = source_at(data, shard.key)

    def read(on_encoding: OnEncoding = lambda *_: None) -> Items:
        if source.format == "dummy":
            items: Items = read_dummy(source) if source.kind == "text" else read_dummy_questions(source)
        else:
            items = _read_inputs(shard.inputs, source, data, on_encoding)
        return filter_sets(items, source) if source.include or source.exclude else items

    yield from slice_rows(source, shard.key, read, lambda: read(on_encoding)) if source.rows else read(on_encoding)


def read_with(reader: Callable[[SourceFile], Items], file: SourceFile) -> Items:
    """The records of a file. A file that cannot be read at all is one rejected record."""
    try:
        yield from reader(file)
    except BadRecord as error:
        yield file.reject(file.origin, error)


def _read_inputs(inputs: Iterable[Input], source: SourceConfig, data: DataConfig, on_encoding: OnEncoding) -> Items:
    for entry in inputs:
        origin = hide_secrets(entry.address)  # it is written into the ledger, the store and messages
        set_name = source.name or hide_secrets(entry.path)
        file = SourceFile(
            Path(entry.address), origin, set_name, source, data, "", entry.span, entry.is_cut, on_encoding
        )
        if is_url(entry.address):
            download = fetch(entry.address, cache_folder() / "downloads", max_bytes=data.max_document)
            yield from _read_file(replace(file, path=download.path, content_type=download.content_type))
        elif is_remote(entry.address):
            remote = RemoteFile(entry.address, entry.size, entry.version)
            yield from _read_file(replace(file, path=fetch_remote(remote, cache_folder() / "remote")))
        else:
            with unchanged(file.path, entry.version):
                yield from _read_file(file)


def _read_file(file: SourceFile) -> Items:
    kind = format_of(file.source, file.origin, file.content_type)
    if _has_encoding_of_lines(kind, file):
        with suppress(BadRecord):  # binary data: the reader reports where
            encoding = line_encoding(file.path, file.origin, "auto")
            if file.span is None or file.span.start == 0:
                file.on_encoding(file.set_name, encoding)
            file = replace(file, source=file.source.model_copy(update={"encoding": encoding}))
    yield from read_with(_READERS[kind], file)


def _has_encoding_of_lines(kind: str, file: SourceFile) -> bool:
    """True if the encoding is to be detected in the file's first megabyte, as for files of lines."""
    if file.source.encoding != "auto":
        return False
    if kind == "text":
        return file.is_cut or file.source.document in ("line", "paragraph")
    if kind == "pairs":
        return not file.source.outputs  # a file of outputs has its own encoding
    return kind in ("jsonl", "csv", "nq", "chat", "preference") and not file_name(file.origin).endswith(".parquet")
