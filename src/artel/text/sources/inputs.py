"""The files of a run's sources, and the input shards in which workers read them, each file in its format."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from artel.config import DataConfig, SourceConfig
from artel.errors import InputError
from artel.integers import ceil_div
from artel.messages import Phrase
from artel.registry import FORMATS
from artel.secrets import hide_secrets
from artel.storage import RemoteFile, cache_folder, fetch, fetch_remote, is_remote, list_remote, user_path
from artel.text.formats.chat import converter_file
from artel.text.formats.format import Format, choose_format
from artel.text.formats.text import CUT_CHARACTERS
from artel.text.reading.files import file_name, is_url, require_unchanged
from artel.text.reading.lines import Span, can_be_divided, line_encoding
from artel.text.reading.source_file import Items, SourceFile, settings_key
from artel.text.reading.subsets import filter_sets, slice_rows
from artel.text.records import BadRecord
from artel.text.sources.find import list_files, list_sources, resolve_local_path
from artel.text.sources.walk import may_match_inside

OnEncoding = Callable[[str, str], object]
T = TypeVar("T")

MIN_CUT_BYTES = 5 * CUT_CHARACTERS
"""Shorter texts are always one document (`document: auto`)."""


@dataclass(frozen=True, slots=True)
class Input:
    """A file of a source, or a span of a file."""

    path: str
    """The path in the run file. It is the name of the set, unless the source has a name."""
    address: str
    """The file, the URL, or the address on S3 or the hub."""
    size: int
    """Bytes to read."""
    version: str
    """A value that changes with the content: mtime in nanoseconds, an ETag, or a digest."""
    span: Span | None = None
    is_cut: bool = False
    """True if the text is read as several documents (`document: auto`)."""


@dataclass(frozen=True, slots=True)
class InputShard:
    """The unit of work of a reader: files of one source, in order, or one span of a large file."""

    key: str
    """The key of the source in the run file."""
    inputs: tuple[Input, ...]
    """Empty for a source without files, whose records are synthetic."""
    has_rows: bool = False
    """True if `rows` selects some of the records."""

    @property
    def size(self) -> int:
        """Bytes; 0 with `rows`, since the size of the selected records is unknown."""
        return 0 if self.has_rows else sum(entry.size for entry in self.inputs)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> InputShard:
        inputs = (Input(**{**entry, "span": entry["span"] and Span(**entry["span"])}) for entry in content["inputs"])
        return cls(content["key"], tuple(inputs), content["has_rows"])


def find_source(data: DataConfig, key: str) -> SourceConfig:
    """Return the source at a key of the run file."""
    return next(source for source_key, source in list_sources(data) if source_key == key)


def list_inputs(source: SourceConfig, key: str, data: DataConfig) -> Iterator[Input]:
    """Yield the files of a source in reading order (sorted within a glob or folder). Downloads http(s) addresses."""
    if not FORMATS[source.format].has_files:
        return
    for path in source.path:
        if is_url(path):
            download = fetch(path, cache_folder() / "downloads", max_bytes=data.max_document)
            yield Input(path, path, download.path.stat().st_size, download.digest)
        elif is_remote(path):
            yield from (Input(path, file.address, file.size, file.version) for file in list_remote(path))
        else:
            for local in list_files(source, path, key):
                status = local.stat()
                yield Input(path, str(local), status.st_size, str(status.st_mtime_ns))


def list_all_inputs(data: DataConfig) -> Iterator[tuple[str, SourceConfig, list[Input]]]:
    """Yield (key in the run file, source, its files) for all sources. Sets `is_cut` of texts to cut into documents."""
    sources = [(key, source, list(list_inputs(source, key, data))) for key, source in list_sources(data)]
    total_bytes = sum(entry.size for _, _, inputs in sources for entry in inputs)
    min_bytes = max(MIN_CUT_BYTES, data.held_out * total_bytes) if data.held_out else math.inf
    for key, source, inputs in sources:
        if source.document == "auto":
            inputs = [
                replace(entry, is_cut=entry.size >= min_bytes and choose_format(source, entry.address).is_plain_text)
                for entry in inputs
            ]
        yield key, source, inputs


def cut_notes(inputs: Iterable[Input], held_out: float | None) -> list[str]:
    """Return a note for each text that is cut into several documents. `held_out`: fraction kept for validation."""
    what = (
        "{text} is cut into pieces of about {count:,} characters, so that {percent:.3g}% of the text can be kept for "
        "validation (document: auto)"
    )
    percent = 100 * (held_out or 0.0)
    return [
        Phrase(what, text=hide_secrets(entry.address), count=CUT_CHARACTERS, percent=percent)
        for entry in inputs
        if entry.is_cut
    ]


def input_shards(data: DataConfig, shard_bytes: int | None = None) -> list[InputShard]:
    """Divide the sources into shards of about `shard_bytes` bytes, in order; None for one shard per file.

    Small files are grouped, and large files of lines are divided; compressed files, tables and pages are not. A source
    with `rows` is one shard, since its records must be counted.
    """
    shards: list[InputShard] = []
    for key, source, inputs in list_all_inputs(data):
        if source.rows or not FORMATS[source.format].has_files:
            shards.append(InputShard(key, tuple(inputs), bool(source.rows)))
            continue
        group: list[Input] = []
        group_bytes = 0
        for entry in inputs:
            is_one_span = shard_bytes is None or (
                data.splits_by_chapter and choose_format(source, entry.address).is_plain_text
            )
            spans = [] if shard_bytes is None or is_one_span else _divide_file(entry, source, shard_bytes)
            if group and (spans or shard_bytes is None or group_bytes + entry.size > shard_bytes):
                shards.append(InputShard(key, tuple(group)))
                group, group_bytes = [], 0
            if spans:
                shards += [InputShard(key, (span,)) for span in spans]
            else:
                group.append(entry)
                group_bytes += entry.size
        if group:
            shards.append(InputShard(key, tuple(group)))
    return shards


def source_fingerprint(data: DataConfig) -> list[Any]:
    """Return path, size and version of each file of the sources, with modules of converters and outputs of pairs.

    For a source without files: the version of the package that generates its records.
    """
    facts: list[Any] = []
    for key, source in list_sources(data):
        if version := FORMATS[source.format].version():
            facts.append([source.format, version])
        for entry in list_inputs(source, key, data):
            is_local = not (is_url(entry.address) or is_remote(entry.address))
            facts.append([str(Path(entry.address).resolve()) if is_local else entry.address, entry.size, entry.version])
        outputs = user_path(source.outputs, f"{key}.outputs")
        for file in (*converter_file(source, key), *([outputs] if source.outputs and outputs.is_file() else [])):
            facts.append([str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns])
    return facts


def _divide_file(entry: Input, source: SourceConfig, span_bytes: int) -> list[Input]:
    """Divide a file into spans of about `span_bytes` bytes; empty if it cannot be divided."""
    if entry.size <= span_bytes or not choose_format(source, entry.address).can_be_divided(source):
        return []
    address = entry.address
    if is_url(address) or is_remote(address) or file_name(address).endswith(".parquet"):  # jsonl reads parquet too
        return []
    if not can_be_divided(Path(entry.address), entry.address, source.encoding):
        return []
    num_spans = ceil_div(entry.size, span_bytes)
    bounds = pairwise(entry.size * index // num_spans for index in range(num_spans + 1))
    return [replace(entry, size=stop - start, span=Span(start, stop)) for start, stop in bounds]


@dataclass(frozen=True, slots=True)
class SourcePath:
    """A file, folder or glob of a source."""

    key: str
    """The key in the run file."""
    path: str
    files: tuple[Path, ...]
    """The files that exist now."""

    def would_read(self, folder: Path) -> bool:
        """True if the source would read files in `folder`, a real path that need not exist."""
        path = resolve_local_path(self.path, self.key)
        parts = path.parts
        num_fixed_parts = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts))
        if path.is_dir():
            num_fixed_parts = len(parts)
        elif path.exists() or num_fixed_parts == len(parts):
            return False
        base = Path(os.path.realpath(Path(*parts[:num_fixed_parts])))
        if not folder.is_relative_to(base):
            return False
        return num_fixed_parts == len(parts) or may_match_inside(
            folder.relative_to(base).parts, parts[num_fixed_parts:]
        )


def source_paths(data: DataConfig) -> Iterator[SourcePath]:
    """Yield the local paths of all sources, except missing ones, which other checks report."""
    for source_key, source in list_sources(data):
        key = source_key if source_key == "data.validation" else f"{source_key}.path"
        for path in source.path if FORMATS[source.format].has_files else []:
            if not is_url(path) and not is_remote(path):
                with suppress(InputError):
                    yield SourcePath(key, path, tuple(list_files(source, path, key)))
        if source.outputs and source_key != "data.validation":
            key = f"{source_key}.outputs"
            with suppress(InputError):
                yield SourcePath(key, source.outputs, (user_path(source.outputs, key),))


def read_shard(shard: InputShard, data: DataConfig, on_encoding: OnEncoding = lambda *_: None) -> Items:
    """Yield the records of an input shard that are in included sets. Report each file's encoding once."""
    source = find_source(data, shard.key)

    def read(on_encoding: OnEncoding = lambda *_: None) -> Items:
        format: Format = FORMATS[source.format]
        if format.has_files:
            items = read_inputs(shard.inputs, source, data, _read_file, on_encoding, settings_key(shard.key))
        else:
            key = settings_key(shard.key)
            items = format.read(SourceFile(Path(), source.format, source.name or source.format, source, data, key=key))
        return filter_sets(items, source) if source.include or source.exclude else items

    yield from slice_rows(source, shard.key, read, lambda: read(on_encoding)) if source.rows else read(on_encoding)


def read_or_reject(reader: Callable[[SourceFile], Items], file: SourceFile) -> Items:
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
    """Call `read` on each file, downloading remote ones, and yield its results. Raise if a file changes meanwhile."""
    for entry in inputs:
        origin = hide_secrets(entry.address)  # for the ledger, the store and messages
        set_name = source.name or hide_secrets(entry.path)
        path = Path(entry.address)
        file = SourceFile(path, origin, set_name, source, data, "", entry.span, entry.is_cut, on_encoding, key)
        if is_url(entry.address):
            download = fetch(entry.address, cache_folder() / "downloads", max_bytes=data.max_document)
            yield from read(replace(file, path=download.path, content_type=download.content_type))
        elif is_remote(entry.address):
            remote = RemoteFile(entry.address, entry.size, entry.version)
            yield from read(replace(file, path=fetch_remote(remote, cache_folder() / "remote")))
        else:
            with require_unchanged(file.path, entry.version):
                yield from read(file)


def _read_file(file: SourceFile) -> Items:
    format = choose_format(file.source, file.origin, file.content_type)
    if file.source.encoding == "auto" and format.has_lines(file):
        with suppress(BadRecord):  # binary data: the reader reports it
            encoding = line_encoding(file.path, file.origin, "auto")
            if file.span is None or file.span.start == 0:
                file.on_encoding(file.set_name, encoding)
            file = replace(file, source=file.source.model_copy(update={"encoding": encoding}))
    yield from read_or_reject(format.read, file)
