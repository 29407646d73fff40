"""A prepared shard: the samples of an input shard, made by one worker without access to other shards.

documents        a row (DOCUMENT) for each document that passed the rules, in reading order
notes.jsonl      notes on some documents: {"document": 3, "changed": {…}, "observed": […]}, or why it has no sample
train.tokens …   samples, in the files of a store shard for each split
train.references references for evaluation, one line per document that has one
near/            shingles and signatures, if near-duplicates are searched
rejected.jsonl   the records that could not be used
contaminated.jsonl  documents that share n-grams with benchmarks
summary.json     counts
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import orjson
from numpy.typing import NDArray

from artel.config import RunConfig
from artel.errors import WorkError
from artel.objectives import DocumentSamples, Objective, splits_by_label
from artel.preparing.unknown_tokens import UnknownTokens
from artel.preparing.workspace import Workspace
from artel.storage import new_folder
from artel.text import (
    BenchmarkIndex,
    CleanedRecord,
    ContaminatedDocument,
    DroppedRecord,
    InputShard,
    LabeledText,
    Ledger,
    Rejected,
    clean_shard,
    count_lines,
)
from artel.text.dedup.exact import RepeatedUnits
from artel.text.dedup.near import SignatureWriter
from artel.tokens.manifest import SPLITS
from artel.tokens.store import ShardWriter, id_dtype

# Documents encoded at a time: enough for all cores of `tokenizers`, few enough for less than 100 MB.
_CHUNK_DOCUMENTS = 256
_CHUNK_CHARACTERS = 4_000_000
_BUFFERED_ROWS = 1024

DOCUMENT_DTYPE = np.dtype(
    [
        ("digest", [("high", ">u8"), ("low", ">u8")]),  # of the cleaned text
        ("bytes", "<u8"),
        ("characters", "<u8"),
        ("tokens", "<u8"),
        ("samples", "<u4"),
        ("set", "<u4"),  # index into the sets of summary.json
        ("split_hash", "<u8"),
        ("split", "u1"),  # 0 train, 1 validation: by its hash, and where its samples are
        ("labels", "<u4"),  # index into the labels of summary.json
        ("has_new_text", "u1"),  # 0 if all its text occurs in earlier documents
        ("has_reference", "u1"),  # 1 if it has a line in `references`
    ]
)
"""A row of the file `documents`."""


def write_lines(config: RunConfig, shard: InputShard, folder: Path, benchmarks: BenchmarkIndex | None = None) -> None:
    """Write the digests (16 bytes each) of a shard's distinct lines or paragraphs, in order, into `folder/digests`."""
    assert config.data.dedup.lines != "none"
    units = RepeatedUnits(config.data.dedup.lines)
    with new_folder(folder) as partial:
        for _ in clean_shard(shard, config.data, Ledger(), units, benchmarks):
            pass
        (partial / "digests").write_bytes(b"".join(units.seen))


def write_prepared_shard(
    config: RunConfig,
    shard: InputShard,
    objective: Objective,
    folder: Path,
    repeated_lines: Path,
    benchmarks: BenchmarkIndex | None = None,
) -> None:
    """Write the documents of an input shard into `folder`. `repeated_lines`: digests of lines to drop."""
    units = None
    if config.data.dedup.lines != "none":
        digests = repeated_lines.read_bytes()
        units = RepeatedUnits(
            config.data.dedup.lines, (digests[start : start + 16] for start in range(0, len(digests), 16))
        )
    tokenizer = objective.tokenizer
    with new_folder(folder) as partial, _PreparedShardWriter(partial, config, objective) as writer:
        for chunk in _group_documents(clean_shard(shard, config.data, writer.ledger, units, benchmarks)):
            samples = objective.samples([cleaned.document for cleaned in chunk if cleaned.has_new_text])
            for cleaned in chunk:
                writer.add(cleaned, next(samples) if cleaned.has_new_text else None)
        if tokenizer.suspect_texts:
            fix = f"{tokenizer.encoder_remedy}, delete {folder.parents[1]}, and start again"
            raise WorkError.at("tokenizer", tokenizer.encoder_note, fix)
        writer.close(_count_lines(shard), tokenizer.encoder_note)


class _PreparedShardWriter:
    def __init__(self, folder: Path, config: RunConfig, objective: Objective) -> None:
        vocabulary = objective.tokenizer.vocabulary
        self._unknown_tokens = UnknownTokens(objective)
        self._folder = folder
        self._rejected = (folder / "rejected.jsonl").open("wb")
        self._contaminated = (folder / "contaminated.jsonl").open("wb")
        self.ledger = Ledger(on_reject=self._write_rejected, on_contaminated=self._write_contaminated)
        self._documents = (folder / "documents").open("wb")
        self._notes = (folder / "notes.jsonl").open("wb")
        self._samples = [ShardWriter(folder / split, id_dtype(vocabulary)) for split in SPLITS]
        self._references: list[BinaryIO] = [(folder / f"{split}.references").open("wb") for split in SPLITS]
        self._rows: list[tuple[Any, ...]] = []
        self._sets: dict[str, int] = {}
        self._labels: dict[tuple[str, ...], int] = {}
        self._num_documents = 0
        self._splits_by_label = splits_by_label(config)
        near = config.data.dedup.near
        self._signatures = SignatureWriter(folder / "near", near) if near is not None else None

    def __enter__(self) -> _PreparedShardWriter:
        if self._signatures is not None:
            self._signatures.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._signatures is not None:
            self._signatures.__exit__(kind, error, trace)

    def add(self, cleaned: CleanedRecord, result: DocumentSamples | Rejected | DroppedRecord | None) -> None:
        """Write a document and its `result` from the objective; None for a document without new text."""
        record = cleaned.document.record
        split_index = SPLITS.index(cleaned.document.split)
        notes: dict[str, Any] = {}
        num_tokens = num_samples = 0
        reference = None
        if isinstance(result, DocumentSamples):
            reference = result.reference
            for sample in result.samples:
                self._samples[split_index].add(sample, record.origin)
                num_tokens += len(sample.ids)
            num_samples = len(result.samples)
            self._unknown_tokens.add(record, result.samples)
            if reference is not None:
                self._references[split_index].write(orjson.dumps(reference) + b"\n")
            cleaned.changes.update(result.counts)
            if result.observed:
                notes["observed"] = [record.origin, result.observed]
        elif isinstance(result, Rejected):
            notes["rejected"] = [result.origin, result.reason, result.detail]
        elif isinstance(result, DroppedRecord):
            notes["dropped"] = result.reason
        if cleaned.changes:
            notes["changed"] = cleaned.changes
        if notes:
            self._notes.write(orjson.dumps({"document": self._num_documents, **notes}) + b"\n")
        digest = tuple(int.from_bytes(cleaned.digest[start : start + 8]) for start in (0, 8))
        sizes = (len(record.text.encode()), len(record.text), num_tokens, num_samples)
        set_index = self._sets.setdefault(record.set_name, len(self._sets))
        labels = record.fields.labels if self._splits_by_label and isinstance(record.fields, LabeledText) else ()
        labels_index = self._labels.setdefault(labels, len(self._labels))
        flags = (split_index, labels_index, cleaned.has_new_text, reference is not None)
        self._rows.append((digest, *sizes, set_index, cleaned.split_hash, *flags))
        if len(self._rows) == _BUFFERED_ROWS:
            self._write_rows()
        if self._signatures is not None and cleaned.has_new_text:
            self._signatures.add(self._num_documents, record.text)
        self._num_documents += 1

    def _write_rows(self) -> None:
        self._documents.write(np.array(self._rows, DOCUMENT_DTYPE).tobytes())
        self._rows.clear()

    def close(self, num_lines: int | None, encoder_note: str) -> None:
        """Write the remaining rows and summary.json."""
        self._write_rows()
        for stream in (self._documents, self._notes, self._rejected, self._contaminated, *self._references):
            stream.close()
        columns = {}
        for split, samples in zip(SPLITS, self._samples, strict=True):
            samples.close()
            columns[split] = {"flags": samples.flags, "numbers": samples.columns}
        summary = {
            "sets": list(self._sets),
            "labels": list(self._labels),
            "ledger": {
                name: {"read": counts.read, "dropped": counts.dropped} for name, counts in self.ledger.sets.items()
            },
            "rejected": self.ledger.num_rejected,
            "encodings": self.ledger.encodings,
            **columns,
            "unknown": self._unknown_tokens.to_json(),
            "lines": num_lines,
            "encoder": encoder_note,
        }
        (self._folder / "summary.json").write_bytes(orjson.dumps(summary))

    def _write_contaminated(self, contaminated: ContaminatedDocument) -> None:
        row = [contaminated.origin, contaminated.set_name, contaminated.benchmark_rows, contaminated.words]
        self._contaminated.write(orjson.dumps(row) + b"\n")

    def _write_rejected(self, rejected: Rejected) -> None:
        row = [rejected.origin, rejected.reason, rejected.detail, rejected.set_name]
        self._rejected.write(orjson.dumps(row) + b"\n")


def _group_documents(records: Iterable[CleanedRecord]) -> Iterator[list[CleanedRecord]]:
    """Group documents for encoding. Groups of long documents are smaller."""
    records = iter(records)
    while True:
        chunk: list[CleanedRecord] = []
        num_characters = 0
        for record in islice(records, _CHUNK_DOCUMENTS):
            chunk.append(record)
            num_characters += len(record.document.record.text)
            if num_characters >= _CHUNK_CHARACTERS:
                break
        if not chunk:
            return
        yield chunk


def _count_lines(shard: InputShard) -> int | None:
    """Return the number of lines of a span, to number the lines of later spans; None for full files."""
    span = shard.inputs[0].span if shard.inputs else None
    return None if span is None else count_lines(Path(shard.inputs[0].address), span)


@dataclass(frozen=True)
class PreparedShard:
    """A prepared shard, opened for later stages."""

    folder: Path
    rows: NDArray
    """DOCUMENT (documents,), memory-mapped."""
    summary: dict[str, Any]
    """Content of summary.json."""
    lines_before: int
    """Number of lines of its file in earlier shards; 0 for full files."""

    @property
    def notes(self) -> Iterator[dict[str, Any]]:
        with (self.folder / "notes.jsonl").open("rb") as stream:
            yield from map(orjson.loads, stream)

    @property
    def rejected(self) -> Iterator[Rejected]:
        with (self.folder / "rejected.jsonl").open("rb") as stream:
            for origin, reason, detail, set_name in map(orjson.loads, stream):
                yield Rejected(self.origin(origin), reason, detail, set_name)

    @property
    def contaminated(self) -> Iterator[ContaminatedDocument]:
        with (self.folder / "contaminated.jsonl").open("rb") as stream:
            for origin, set_name, rows, words in map(orjson.loads, stream):
                yield ContaminatedDocument(self.origin(origin), set_name, rows, words)

    def origin(self, origin: str) -> str:
        """Return an origin `file:line` with the line number in the full file."""
        file, _, line = origin.rpartition(":")
        return f"{file}:{int(line) + self.lines_before}" if self.lines_before and line.isdigit() else origin


def prepared_shards(workspace: Workspace) -> list[PreparedShard]:
    """Return the prepared shards of a workspace, in order."""
    shards: list[PreparedShard] = []
    lines_before = 0
    for shard_index, input_shard in enumerate(workspace.input_shards):
        folder = workspace.text_path(shard_index)
        summary = orjson.loads((folder / "summary.json").read_bytes())
        span = input_shard.inputs[0].span if input_shard.inputs else None
        if span is None or span.start == 0:
            lines_before = 0
        is_empty = (folder / "documents").stat().st_size == 0
        rows = np.empty(0, DOCUMENT_DTYPE) if is_empty else np.memmap(folder / "documents", DOCUMENT_DTYPE, "r")
        shards.append(PreparedShard(folder, rows, summary, lines_before))
        lines_before += summary["lines"] or 0
    return shards


def encoder_notes(workspace: Workspace) -> list[str]:
    """Return notes for the user about encoders, except for shards too small for more than one encoder."""
    notes = {shard.summary["encoder"] for shard in prepared_shards(workspace)}
    return sorted(note for note in notes if note and not note.startswith("Tokenizing the first"))
