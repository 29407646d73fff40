"""Read the files of an input shard in order, each in its format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from artel.config import DataConfig, SourceConfig
from artel.registry import FORMATS
from artel.secrets import hide_secrets
from artel.storage import RemoteFile, cache_folder, fetch, fetch_remote, is_remote
from artel.text.formats.format import Format, format_of
from artel.text.reading.files import is_url, unchanged
from artel.text.reading.lines import line_encoding
from artel.text.reading.source_file import Items, SourceFile, settings_key
from artel.text.reading.subsets import filter_sets, slice_rows
from artel.text.records import BadRecord
from artel.text.sources.inputs import Input, InputShard, source_at

OnEncoding = Callable[[str, str], object]
T = TypeVar("T")


def read_shard(shard: InputShard, data: DataConfig, on_encoding: OnEncoding = lambda *_: None) -> Items:
    """Yield the records of an input shard, of the sets that its source includes. A span numbers its lines from 1.

    `on_encoding` is called with the name of the set and the detected encoding of each file; if a file has several
    spans, only for the first.
    """
    source = source_at(data, shard.key)

    def read(on_encoding: OnEncoding = lambda *_: None) -> Items:
        format: Format = FORMATS[source.format]
        if format.has_files:
            items = read_inputs(shard.inputs, source, data, _read_file, on_encoding, settings_key(shard.key))
        else:
            items = format.read(SourceFile(Path(), source.format, source.name or source.format, source, data))
        return filter_sets(items, source) if source.include or source.exclude else items

    yield from slice_rows(source, shard.key, read, lambda: read(on_encoding)) if source.rows else read(on_encoding)


def read_with(reader: Callable[[SourceFile], Items], file: SourceFile) -> Items:
    """Yield the records of a file. An unreadable file is one rejected record, of its first span."""
    try:
        yield from reader(file)
    except BadRecord as error:
        if file.span is None or file.span.start == 0:
            yield file.reject(file.origin, error)


def read_inputs(
    inputs: Iterable[Input],
    source: SourceConfig,
    data: DataConfig,
    read: Callable[[SourceFile], Iterable[T]],
    on_encoding: OnEncoding = lambda *_: None,
    key: str = "data.sources.0",
) -> Iterator[T]:
    """Call `read` on each file, downloading remote ones, and yield its results. Raises if a file changes meanwhile."""
    for entry in inputs:
        origin = hide_secrets(entry.address)  # for the ledger, the store and messages
        set_name = source.name or hide_secrets(entry.path)
        file = SourceFile(
            Path(entry.address), origin, set_name, source, data, "", entry.span, entry.is_cut, on_encoding, key
        )
        if is_url(entry.address):
            download = fetch(entry.address, cache_folder() / "downloads", max_bytes=data.max_document)
            yield from read(replace(file, path=download.path, content_type=download.content_type))
        elif is_remote(entry.address):
            remote = RemoteFile(entry.address, entry.size, entry.version)
            yield from read(replace(file, path=fetch_remote(remote, cache_folder() / "remote")))
        else:
            with unchanged(file.path, entry.version):
                yield from read(file)


def _read_file(file: SourceFile) -> Items:
    format = format_of(file.source, file.origin, file.content_type)
    if file.source.encoding == "auto" and format.has_lines(file):
        with suppress(BadRecord):  # binary data: the reader reports it
            encoding = line_encoding(file.path, file.origin, "auto")
            if file.span is None or file.span.start == 0:
                file.on_encoding(file.set_name, encoding)
            file = replace(file, source=file.source.model_copy(update={"encoding": encoding}))
    yield from read_with(format.read, file)
