"""Writing the files of a token store: one shard of samples at a time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
from numpy.typing import NDArray

from artel.tokens.store.manifest import PARTS, facts, write_manifest
from artel.tokens.store.store import SOURCES, Sample

# 2**27 tokens: 256 MiB of uint16. Large enough that 400 billion tokens are 3,000 files, small enough to copy again.
SHARD_TOKENS = 2**27


def token_type(vocabulary: int) -> str:
    """The type that ids below `vocabulary` are kept in."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


class ShardWriter:
    """Writes samples to BASE.tokens, .ends, .origins and, where samples have them, .flags and .numbers."""

    def __init__(self, base: Path, dtype: str) -> None:
        self._base = base
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._tokens = base.with_suffix(".tokens").open("wb")
        self._origins = base.with_suffix(".origins").open("wb")
        self._ends = base.with_suffix(".ends").open("wb")
        self._beside: dict[str, BinaryIO] = {}
        self.flags: str | None = None
        """The type of the samples' flags."""
        self.columns = 0
        """How many numbers a sample has."""
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
        """Samples one after another: their tokens and flags (tokens,), lengths (samples,), lines of origins, numbers
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
        """What the manifest says of the shard: its name, tokens, samples, and each file's size and checksum."""
        files = [self._base.with_suffix(suffix) for suffix in (".tokens", ".ends", ".origins", *self._beside)]
        for stream in (self._tokens, self._ends, self._origins, *self._beside.values()):
            stream.close()
        return {"name": self._base.name, "tokens": self.written, "samples": self.samples, "files": facts_by_name(files)}

    def _write_flags(self, flags: NDArray) -> None:
        self.flags = str(flags.dtype)
        self._open(".flags").write(flags.data)

    def _write_numbers(self, numbers: NDArray) -> None:
        self.columns = numbers.shape[1]
        self._open(".numbers").write(numbers.data)

    def _open(self, suffix: str) -> BinaryIO:
        if suffix not in self._beside:
            self._beside[suffix] = self._base.with_suffix(suffix).open("wb")
        return self._beside[suffix]


class StoreWriter:
    """Writes samples into a folder that the caller makes whole (`storage.new_folder`)."""

    def __init__(self, folder: Path, vocabulary: int, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self.dtype = token_type(vocabulary)
        self._shard_tokens = shard_tokens
        self._open: dict[str, ShardWriter] = {}
        self._sources: dict[str, BinaryIO] = {}
        self._parts = {part: no_samples() for part in PARTS}
        for part in PARTS:
            (folder / part).mkdir(parents=True)

    def add(
        self, part: str, samples: Iterable[Sample], text_bytes: int, origin: str, source: dict[str, Any] | None = None
    ) -> None:
        """The samples of one document, the UTF-8 bytes of its text, its `file:line`, and what it is judged by."""
        counts = self._parts[part]
        for sample in samples:
            if part not in self._open:
                name = f"{len(counts['shards']):05d}"
                self._open[part] = ShardWriter(self.folder / part / name, self.dtype)
            shard = self._open[part]
            shard.add(sample, origin)
            if shard.written >= self._shard_tokens:
                self._finish(part)
        counts["documents"] += 1
        counts["bytes"] += text_bytes
        if source is not None:
            if part not in self._sources:
                self._sources[part] = (self.folder / part / SOURCES).open("wb")
            self._sources[part].write(orjson.dumps(source) + b"\n")

    def close(self, about: dict[str, Any]) -> dict[str, Any]:
        """Finish the shards and write the manifest, `about` added to it; returned as written."""
        for part in list(self._open):
            self._finish(part)
        for part, stream in self._sources.items():
            stream.close()
            self._parts[part]["files"] = facts_by_name([self.folder / part / SOURCES])
        return write_manifest(self.folder, self.dtype, about, self._parts)

    def _finish(self, part: str) -> None:
        shard = self._open.pop(part)
        counts = self._parts[part]
        counts["shards"].append(shard.close())
        counts["tokens"] += shard.written
        counts["samples"] += shard.samples
        counts["flags"], counts["numbers"] = shard.flags, shard.columns


def no_samples() -> dict[str, Any]:
    """What a manifest says of a part without samples."""
    return {"tokens": 0, "samples": 0, "documents": 0, "bytes": 0, "flags": None, "numbers": 0, "files": {},
            "shards": []}  # fmt: skip


def origin_line(origin: str) -> bytes:
    """A `file:line` as it stands in a file of origins."""
    return origin.replace("\n", " ").encode("utf-8", "surrogateescape") + b"\n"


def facts_by_name(files: list[Path]) -> dict[str, dict[str, Any]]:
    """Size and checksum of each file, by its name."""
    return {file.name: facts(file) for file in files}
