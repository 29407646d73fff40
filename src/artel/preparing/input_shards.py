"""A part of the text, made into samples by one worker: everything that can be done without knowing the other parts.

documents        a row (DOCUMENT) for each document that passed the rules, in the order of reading
notes.jsonl      what is to be said of some of them: {"document": 3, "changed": {…}}, or why no sample was made
train.tokens …   their samples, each part of the split by itself, as in a shard of a store
train.sources    what they are judged by, a line for each document that has it
near/            their n-grams and signatures, where near-duplicates are looked for
rejected.jsonl   the records that could not be used
part.json        counts
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import orjson

from artel.config import RunConfig
from artel.errors import WorkError
from artel.objectives import Made, Objective
from artel.storage import new_folder
from artel.text import CleanedRecord, Dropped, InputShard, Ledger, Rejected, clean_shard, count_lines
from artel.text.dedup.near import SignatureWriter
from artel.text.dedup.repeats import RepeatedUnits
from artel.tokens.store.manifest import PARTS
from artel.tokens.store.shards import ShardWriter, token_type

# Documents encoded together: enough to keep all cores of `tokenizers` busy, little enough to stay under 100 MB.
_CHUNK_DOCUMENTS = 256
_CHUNK_CHARACTERS = 4_000_000
_ROWS_AT_ONCE = 1024

DOCUMENT = np.dtype([
    ("digest", [("high", ">u8"), ("low", ">u8")]), ("bytes", "<u8"), ("characters", "<u8"), ("tokens", "<u8"),
    ("samples", "<u4"), ("set", "<u4"), ("split_hash", "<u8"), ("split", "u1"), ("has_new_text", "u1"),
    ("has_source", "u1"),
])  # fmt: skip
"""A document's row: digest of its cleaned text, sizes, which of the part's sets it is of, what the split goes by,
0 train or 1 validation, whether more is left of it than what earlier documents hold, and whether it has a line of
`sources`."""


def write_lines(run: RunConfig, part: InputShard, folder: Path) -> None:
    """Into `folder/digests` (16 bytes each) the lines or paragraphs of a part, each but once, in their order."""
    assert run.data.dedup.lines != "none"
    units = RepeatedUnits(run.data.dedup.lines)
    with new_folder(folder) as partial:
        for _ in clean_shard(part, run.data, Ledger(), units):
            pass
        (partial / "digests").write_bytes(b"".join(units.seen))


def write_part(run: RunConfig, part: InputShard, objective: Objective, folder: Path, earlier: Path) -> None:
    """The documents of a part into `folder`; `earlier` has the digests of repeated lines, where there are any."""
    units = None
    if run.data.dedup.lines != "none":
        digests = earlier.read_bytes()
        units = RepeatedUnits(run.data.dedup.lines, (digests[at : at + 16] for at in range(0, len(digests), 16)))
    with new_folder(folder) as partial, _PartWriter(partial, run, objective.tokenizer.vocabulary) as writer:
        for chunk in _chunks(clean_shard(part, run.data, writer.ledger, units)):
            made = objective.samples([cleaned.document for cleaned in chunk if cleaned.has_new_text])
            for cleaned in chunk:
                writer.add(cleaned, next(made) if cleaned.has_new_text else None)
        if objective.tokenizer.doubtful_texts:
            fix = f"{objective.tokenizer.encoder_remedy}, delete {folder.parents[1]}, and start again"
            raise WorkError.at("tokenizer", objective.tokenizer.encoder_note, fix)
        writer.close(_lines(part), objective.tokenizer.encoder_note)


class _PartWriter:
    def __init__(self, folder: Path, run: RunConfig, vocabulary: int) -> None:
        self._folder = folder
        self._rejected = (folder / "rejected.jsonl").open("wb")
        self.ledger = Ledger(on_reject=self._reject)
        self._documents = (folder / "documents").open("wb")
        self._notes = (folder / "notes.jsonl").open("wb")
        self._shards = [ShardWriter(folder / part, token_type(vocabulary)) for part in PARTS]
        self._sources: list[BinaryIO] = [(folder / f"{part}.sources").open("wb") for part in PARTS]
        self._rows: list[tuple[Any, ...]] = []
        self._sets: dict[str, int] = {}
        self._count = 0
        near = run.data.dedup.near
        self._signer = SignatureWriter(folder / "near", near) if near is not None else None

    def __enter__(self) -> _PartWriter:
        if self._signer is not None:
            self._signer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._signer is not None:
            self._signer.__exit__(kind, error, trace)

    def add(self, cleaned: CleanedRecord, made: Made | Rejected | Dropped | None) -> None:
        record, split = cleaned.document.record, PARTS.index(cleaned.document.split)
        notes: dict[str, Any] = {}
        tokens = samples = 0
        source = None
        if isinstance(made, Made):
            source = made.source
            for sample in made.samples:
                self._shards[split].add(sample, record.origin)
                tokens += len(sample.ids)
            samples = len(made.samples)
            if source is not None:
                self._sources[split].write(orjson.dumps(source) + b"\n")
            cleaned.changed.update(made.counted)
        elif isinstance(made, Rejected):
            notes["rejected"] = [made.origin, made.reason, made.detail]
        elif isinstance(made, Dropped):
            notes["dropped"] = made.reason
        if cleaned.changed:
            notes["changed"] = cleaned.changed
        if notes:
            self._notes.write(orjson.dumps({"document": self._count, **notes}) + b"\n")
        set_number = self._sets.setdefault(record.set_name, len(self._sets))
        digest = tuple(int.from_bytes(cleaned.digest[at : at + 8]) for at in (0, 8))
        row = (digest, len(record.text.encode()), len(record.text), tokens, samples, set_number,
               cleaned.split_hash, split, cleaned.has_new_text, source is not None)  # fmt: skip
        self._rows.append(row)
        if len(self._rows) == _ROWS_AT_ONCE:
            self._write_rows()
        if self._signer is not None and cleaned.has_new_text:
            self._signer.add(self._count, record.text)
        self._count += 1

    def _write_rows(self) -> None:
        self._documents.write(np.array(self._rows, DOCUMENT).tobytes())
        self._rows.clear()

    def close(self, lines: int | None, encoder: str) -> None:
        self._write_rows()
        for stream in (self._documents, self._notes, self._rejected, *self._sources):
            stream.close()
        shards = {}
        for part, shard in zip(PARTS, self._shards, strict=True):
            shard.close()
            shards[part] = {"flags": shard.flags, "numbers": shard.columns}
        sets = {name: {"read": counts.read, "dropped": counts.dropped} for name, counts in self.ledger.sets.items()}
        counted = {"ledger": sets, "rejected": self.ledger.rejected, "encodings": self.ledger.encodings}
        told = {"sets": list(self._sets), **counted, **shards}
        (self._folder / "part.json").write_bytes(orjson.dumps({**told, "lines": lines, "encoder": encoder}))

    def _reject(self, rejected: Rejected) -> None:
        row = [rejected.origin, rejected.reason, rejected.detail, rejected.set_name]
        self._rejected.write(orjson.dumps(row) + b"\n")


def _chunks(cleaned: Iterable[CleanedRecord]) -> Iterator[list[CleanedRecord]]:
    """Documents in groups that are encoded together; a group ends early when it has many characters."""
    cleaned = iter(cleaned)
    while True:
        chunk: list[CleanedRecord] = []
        characters = 0
        for each in islice(cleaned, _CHUNK_DOCUMENTS):
            chunk.append(each)
            characters += len(each.document.record.text)
            if characters >= _CHUNK_CHARACTERS:
                break
        if not chunk:
            return
        yield chunk


def _lines(part: InputShard) -> int | None:
    """How many lines a span has: those of later spans are counted from there. None of whole files."""
    span = part.inputs[0].span if part.inputs else None
    return None if span is None else count_lines(Path(part.inputs[0].address), span)
