"""Writing the files of a token store, one shard of samples at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
from numpy.typing import NDArray

from artel.tokens.store.manifest import SPLITS, facts, write_manifest
from artel.tokens.store.store import SOURCES, Sample

# 2**27 tokens: 256 MiB of uint16. So 400 billion tokens are 3,000 files, and one is quickly copied again.
SHARD_TOKENS = 2**27


def token_type(vocabulary: int) -> str:
    """The dtype of stored ids below `vocabulary`."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


class ShardWriter:
    """Writes samples to BASE.tokens, .ends, .origins and, if samples have them, .flags and .numbers."""

    def __init__(self, base: Path, dtype: str) -> None:
        self._base = base
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._tokens = base.with_suffix(".tokens").open("wb")
        self._origins = base.with_suffix(".origins").open("wb")
        self._ends = base.with_suffix(".ends").open("wb")
        self._optional: dict[str, BinaryIO] = {}
        self.flags: str | None = None
        """The dtype of the samples' flags."""
        self.columns = 0
        """The number of numbers of a sample."""
        self.written = 0
        self.samples = 0

    def add(self, sample: Sample, origin: str) -> None:
        self._tokens.write(np.ascontiguousarray(sample.ids, dtype=self._dtype).data)
        self._origins.write(origin_line(origin))
        if sample.flags is not None:
            self._write_flags(np.ascontiguousarray(sample.flags))
        if sample.numbers:
            self._write_numbers(np.array([sample.numbers], dtype="<i8"))
        self.written += len(sample.ids)
        self.samples += 1
        self._ends.write(self.written.to_bytes(8, "little"))

    def add_many(
        self,
        tokens: NDArray,
        lengths: NDArray,
        origins: bytes,
        flags: NDArray | None,
        numbers: NDArray | None,
    ) -> None:
        """Add samples in one go: their tokens and flags (tokens,), lengths (samples,), lines of origins, and numbers
        (samples, columns)."""
        self._tokens.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        self._origins.write(origins)
        if flags is not None:
            self._write_flags(np.ascontiguousarray(flags))
        if numbers is not None:
            self._write_numbers(np.ascontiguousarray(numbers, dtype="<i8"))
        self._ends.write((self.written + np.cumsum(lengths)).astype("<u8").data)
        self.written += int(lengths.sum())
        self.samples += len(lengths)

    def close(self) -> dict[str, Any]:
        """Returns the shard's entry in the manifest: name, tokens, samples, and each file's size and checksum."""
        files = [self._base.with_suffix(suffix) for suffix in (".tokens", ".ends", ".origins", *self._optional)]
        for stream in (self._tokens, self._ends, self._origins, *self._optional.values()):
            stream.close()
        return {"name": self._base.name, "tokens": self.written, "samples": self.samples, "files": facts_by_name(files)}

    def _write_flags(self, flags: NDArray) -> None:
        self.flags = str(flags.dtype)
        self._open(".flags").write(flags.data)

    def _write_numbers(self, numbers: NDArray) -> None:
        self.columns = numbers.shape[1]
        self._open(".numbers").write(numbers.data)

    def _open(self, suffix: str) -> BinaryIO:
        if suffix not in self._optional:
            self._optional[suffix] = self._base.with_suffix(suffix).open("wb")
        return self._optional[suffix]


class StoreWriter:
    """Writes samples into a folder of the caller's, which appears when it is complete (`storage.new_folder`)."""

    def __init__(self, folder: Path, vocabulary: int, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self.dtype = token_type(vocabulary)
        self._shard_tokens = shard_tokens
        self._open: dict[str, ShardWriter] = {}
        self._sources: dict[str, BinaryIO] = {}
        self._splits = {split: no_samples() for split in SPLITS}
        for split in SPLITS:
            (folder / split).mkdir(parents=True)

    def add(
        self, split: str, samples: Iterable[Sample], text_bytes: int, origin: str, source: dict[str, Any] | None = None
    ) -> None:
        """Add a document: its samples, the UTF-8 bytes of its text, its `file:line`, and its source for evaluation."""
        counts = self._splits[split]
        for sample in samples:
            if split not in self._open:
                name = f"{len(counts['shards']):05d}"
                self._open[split] = ShardWriter(self.folder / split / name, self.dtype)
            shard = self._open[split]
            shard.add(sample, origin)
            if shard.written >= self._shard_tokens:
                self._finish(split)
        counts["documents"] += 1
        counts["bytes"] += text_bytes
        if source is not None:
            if split not in self._sources:
                self._sources[split] = (self.folder / split / SOURCES).open("wb")
            self._sources[split].write(orjson.dumps(source) + b"\n")

    def close(self, about: dict[str, Any]) -> dict[str, Any]:
        """Finish the shards and write the manifest with the entries in `about`. Returns the manifest."""
        for split in list(self._open):
            self._finish(split)
        for split, stream in self._sources.items():
            stream.close()
            self._splits[split]["files"] = facts_by_name([self.folder / split / SOURCES])
        return write_manifest(self.folder, self.dtype, about, self._splits)

    def _finish(self, split: str) -> None:
        shard = self._open.pop(split)
        counts = self._splits[split]
        counts["shards"].append(shard.close())
        counts["tokens"] += shard.written
        counts["samples"] += shard.samples
        counts["flags"], counts["numbers"] = shard.flags, shard.columns


def no_samples() -> dict[str, Any]:
    """The manifest's entry of a split without samples."""
    return {
        "tokens": 0,
        "samples": 0,
        "documents": 0,
        "bytes": 0,
        "flags": None,
        "numbers": 0,
        "files": {},
        "shards": [],
    }


def origin_line(origin: str) -> bytes:
    """A `file:line` as a line of an .origins file."""
    return origin.replace("\n", " ").encode("utf-8", "surrogateescape") + b"\n"


def facts_by_name(files: list[Path]) -> dict[str, dict[str, Any]]:
    """The size and checksum of each file, by name."""
    return {file.name: facts(file) for file in files}
