"""What a run's sources consist of: their files, and the parts in which workers read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from artel.config import DataConfig, SourceConfig
from artel.secrets import hide_secrets
from artel.storage import cache_folder, fetch, is_remote, list_remote, own_path
from artel.text.formats.conversations import converter_file
from artel.text.formats.text import CUT_CHARACTERS
from artel.text.reading.file_names import is_url
from artel.text.reading.lines import Span, can_be_divided
from artel.text.sources.find import all_sources, files_of, format_of

LONG = 5 * CUT_CHARACTERS
"""Bytes: a shorter text is one document in any case (`document: auto`)."""


@dataclass(frozen=True, slots=True)
class Input:
    """A file of a source, or a span of it."""

    path: str
    """As the run file gives it; without a name of the source it names the set."""
    address: str
    """The file, the URL, or the address on S3 or the hub."""
    size: int
    """Bytes to be read of it."""
    version: str
    """What changes with its content: the time of change of a file (nanoseconds), ETag or digest of a remote one."""
    span: Span | None = None
    is_cut: bool = False
    """Whether a text is read as several documents (`document: auto`)."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker reads at a time: files of one source, in their order, or one span of a large file."""

    where: str
    """The source's key in the run file."""
    inputs: tuple[Input, ...]
    """None of a source without files, which is made up."""
    of_rows: bool = False

    @property
    def size(self) -> int:
        """Bytes; 0 where only records of it are taken, as many as nobody knows yet (`rows`)."""
        return 0 if self.of_rows else sum(each.size for each in self.inputs)

    def to_json(self) -> dict[str, Any]:
        rows = [[each.path, each.address, each.size, each.version, each.span and [each.span.start, each.span.stop],
                 each.is_cut] for each in self.inputs]  # fmt: skip
        return {"where": self.where, "inputs": rows, "of_rows": self.of_rows}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Part:
        inputs = []
        for path, address, size, version, span, is_cut in told["inputs"]:
            inputs.append(Input(path, address, size, version, Span(*span) if span else None, is_cut))
        return cls(told["where"], tuple(inputs), told["of_rows"])


def source_of(data: DataConfig, where: str) -> SourceConfig:
    return next(source for key, source in all_sources(data) if key == where)


def inputs_of(source: SourceConfig, where: str, data: DataConfig) -> Iterator[Input]:
    """The files of a source in the order they are read: as given, and sorted within a glob or folder.

    What is given by http(s) is fetched by this; what is on S3 or the hub is listed.
    """
    if source.format == "dummy":
        return
    for path in source.path:
        if is_url(path):
            fetched = fetch(path, cache_folder() / "downloads", max_bytes=data.max_document)
            yield Input(path, path, fetched.path.stat().st_size, fetched.digest)
        elif is_remote(path):
            yield from (Input(path, file.address, file.size, file.version) for file in list_remote(path))
        else:
            for file in files_of(source, path, where):
                status = file.stat()
                yield Input(path, str(file), status.st_size, str(status.st_mtime_ns))


def all_inputs(data: DataConfig) -> Iterator[tuple[str, SourceConfig, list[Input]]]:
    """(key in the run file, source, its files) of all sources, with the texts marked that are cut into documents."""
    found = [(where, source, list(inputs_of(source, where, data))) for where, source in all_sources(data)]
    total = sum(each.size for _, _, inputs in found for each in inputs)
    share = data.validation if isinstance(data.validation, float) else 0.0
    shortest = max(LONG, share * total) if share else math.inf
    for where, source, inputs in found:
        yield (
            where,
            source,
            [
                replace(each, is_cut=True)
                if source.document == "auto" and each.size >= shortest and format_of(source, each.address) == "text"
                else each
                for each in inputs
            ],
        )


def cut_notes(inputs: Iterable[Input]) -> list[str]:
    """What is said of each text that is read as several documents."""
    return [
        f"{hide_secrets(each.address)} is more than data.validation of all the text: it is read as documents of about "
        f"{CUT_CHARACTERS:,} characters (document: auto), so that a share of it can be held out"
        for each in inputs if each.is_cut
    ]  # fmt: skip


def parts_of(data: DataConfig, size: int | None = None) -> list[Part]:
    """The sources cut into parts of about `size` bytes, in their order; each file is one where `size` is not given.

    Small files go together, large ones of lines are divided; packed files, tables and pages are not. A source of which
    `rows` takes a slice is one part: which records those are is known only by counting.
    """
    parts: list[Part] = []
    for where, source, inputs in all_inputs(data):
        if source.rows or source.format == "dummy":
            parts.append(Part(where, tuple(inputs), bool(source.rows)))
            continue
        together: list[Input] = []
        held = 0
        for each in inputs:
            spans = _spans(each, source, size) if size is not None else []
            if together and (spans or size is None or held + each.size > size):
                parts.append(Part(where, tuple(together)))
                together, held = [], 0
            if spans:
                parts += [Part(where, (span,)) for span in spans]
            else:
                together.append(each)
                held += each.size
        if together:
            parts.append(Part(where, tuple(together)))
    return parts


def source_fingerprint(data: DataConfig) -> list[Any]:
    """What the sources are, without reading them: the path, size and version of each file.

    The file of a converter of the user's own, and that of the outputs of pairs, are among them.
    """
    found: list[Any] = []
    for where, source in all_sources(data):
        for each in inputs_of(source, where, data):
            is_here = not (is_url(each.address) or is_remote(each.address))
            found.append([str(Path(each.address).resolve()) if is_here else each.address, each.size, each.version])
        outputs = own_path(source.outputs, f"{where}.outputs")
        for file in (*converter_file(source, where), *([outputs] if source.outputs and outputs.is_file() else [])):
            found.append([str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns])
    return found


def _spans(whole: Input, source: SourceConfig, size: int) -> list[Input]:
    """The file in spans of about `size` bytes; none where it is read as a whole."""
    kind = format_of(source, whole.address)
    if whole.size <= size or not (kind == "jsonl" or (kind == "text" and source.document == "line")):
        return []
    if is_url(whole.address) or is_remote(whole.address):
        return []
    if not can_be_divided(Path(whole.address), whole.address, source.encoding):
        return []
    count = -(-whole.size // size)
    cuts = [whole.size * number // count for number in range(count + 1)]
    return [
        Input(whole.path, whole.address, stop - start, whole.version, Span(start, stop))
        for start, stop in pairwise(cuts)
    ]
