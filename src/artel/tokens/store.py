"""The token store: shards of token ids on disk, memory-mapped, with sample ends, origins and checksums.

    STORE/manifest.json              what is here: parts, shards, counts, a checksum for every file
    STORE/ledger.json                every document: read, kept, dropped by reason
    STORE/tokenizer/                 the tokenizer that made it
    STORE/train/00000.tokens         uint16 (up to 65,536 ids) or uint32, little-endian, samples one after another
    STORE/train/00000.ends           uint64: for each sample the token position after its last token, in this shard
    STORE/train/00000.origins        a line for each sample: `file:line`
    STORE/train/00000.flags          where the objective has them: a number for each token, uint8 or uint64
    STORE/train/00000.numbers        and int64 numbers for each sample, (samples, columns)
    STORE/train/sources.jsonl        and a line of JSON for each document, for objectives that are judged on text
    STORE/validation/…               the same

A sample is what a document gives: usually one, of which blocks are cut; a long document of questions gives windows.

A store is written into a folder of another name and renamed when whole; what has no manifest is not a store.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import xxhash

from artel.errors import InputError, Problem
from artel.storage import checksum

FORMAT = 2
PARTS = ("train", "validation")
# 2**27 tokens: 256 MiB of uint16. Large enough that 400 billion tokens are 3,000 files, small enough to copy again.
SHARD_TOKENS = 2**27
SOURCES = "sources.jsonl"


@dataclass(frozen=True, slots=True)
class Sample:
    """What one document, or one window of it, becomes: ids int64 (tokens,), and what the objective keeps beside."""

    ids: np.ndarray
    flags: np.ndarray | None = None
    """A number for each token, uint8 or uint64 (tokens,)."""
    numbers: tuple[int, ...] = ()
    """Numbers of the sample as a whole, as many for every sample of a store."""


@dataclass(slots=True)
class _OpenShard:
    name: str
    tokens: BinaryIO
    origins: BinaryIO
    flags: BinaryIO | None
    ends: list[int]
    numbers: list[tuple[int, ...]]
    written: int = 0


class StoreWriter:
    """Writes samples into a folder that the caller makes whole (`storage.new_folder`)."""

    def __init__(self, folder: Path, vocabulary: int, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self.dtype = "uint16" if vocabulary <= 2**16 else "uint32"
        self._shard_tokens = shard_tokens
        self._open: dict[str, _OpenShard] = {}
        self._sources: dict[str, BinaryIO] = {}
        self._parts: dict[str, dict[str, Any]] = {
            part: {"tokens": 0, "samples": 0, "documents": 0, "bytes": 0, "flags": None, "numbers": 0, "files": {},
                   "shards": []}
            for part in PARTS
        }  # fmt: skip
        for part in PARTS:
            (folder / part).mkdir(parents=True)

    def add(
        self, part: str, samples: list[Sample], text_bytes: int, origin: str, source: dict[str, Any] | None = None
    ) -> None:
        """The samples of one document, the UTF-8 bytes of its text, its `file:line`, and what it is judged by."""
        for sample in samples:
            self._add(part, sample, origin)
        counts = self._parts[part]
        counts["documents"] += 1
        counts["bytes"] += text_bytes
        if source is not None:
            if part not in self._sources:
                self._sources[part] = (self.folder / part / SOURCES).open("wb")
            self._sources[part].write(orjson.dumps(source) + b"\n")

    def _add(self, part: str, sample: Sample, origin: str) -> None:
        shard = self._open.get(part) or self._start(part, sample)
        shard.tokens.write(np.ascontiguousarray(sample.ids, dtype=self.dtype).tobytes())
        shard.origins.write(origin.replace("\n", " ").encode("utf-8", "surrogateescape") + b"\n")
        if sample.flags is not None:
            assert shard.flags is not None
            shard.flags.write(sample.flags.tobytes())
        shard.numbers.append(sample.numbers)
        shard.written += len(sample.ids)
        shard.ends.append(shard.written)
        counts = self._parts[part]
        counts["tokens"] += len(sample.ids)
        counts["samples"] += 1
        if shard.written >= self._shard_tokens:
            self._finish(part)

    def close(self, about: dict[str, Any]) -> dict[str, Any]:
        """Finish the shards and write the manifest, `about` added to it; returned as written."""
        for part in list(self._open):
            self._finish(part)
        for part, stream in self._sources.items():
            stream.close()
            self._parts[part]["files"] = _facts([self.folder / part / SOURCES])
        manifest = {"format": FORMAT, "dtype": self.dtype, **about, "parts": self._parts}
        (self.folder / "manifest.json").write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
        return manifest

    def _start(self, part: str, sample: Sample) -> _OpenShard:
        counts = self._parts[part]
        name = f"{len(counts['shards']):05d}"
        base = self.folder / part / name
        flags = None
        if sample.flags is not None:
            counts["flags"] = str(sample.flags.dtype)
            flags = base.with_suffix(".flags").open("wb")
        counts["numbers"] = len(sample.numbers)
        shard = _OpenShard(
            name, base.with_suffix(".tokens").open("wb"), base.with_suffix(".origins").open("wb"), flags, [], []
        )
        self._open[part] = shard
        return shard

    def _finish(self, part: str) -> None:
        shard = self._open.pop(part)
        base = self.folder / part / shard.name
        files = [base.with_suffix(suffix) for suffix in (".tokens", ".ends", ".origins")]
        shard.tokens.close()
        shard.origins.close()
        files[1].write_bytes(np.array(shard.ends, dtype="<u8").tobytes())
        if shard.flags is not None:
            shard.flags.close()
            files.append(base.with_suffix(".flags"))
        if self._parts[part]["numbers"]:
            files.append(base.with_suffix(".numbers"))
            files[-1].write_bytes(np.array(shard.numbers, dtype="<i8").tobytes())
        self._parts[part]["shards"].append(
            {"name": shard.name, "tokens": shard.written, "samples": len(shard.ends), "files": _facts(files)}
        )


def _facts(files: list[Path]) -> dict[str, dict[str, Any]]:
    return {file.name: {"bytes": file.stat().st_size, "xxh3_128": checksum(file)} for file in files}


class StorePart:
    """The train or the validation part of a store: one stream of tokens, or samples that stand alone."""

    def __init__(self, folder: Path, counts: dict[str, Any], dtype: str) -> None:
        self.tokens: int = counts["tokens"]
        self.samples: int = counts["samples"]
        self.documents: int = counts["documents"]
        self.bytes: int = counts["bytes"]
        self._folder = folder
        self._shards = counts["shards"]
        self._columns: int = counts["numbers"]
        self._maps = self._map(".tokens", np.dtype(dtype).newbyteorder("<"))
        self._flags = self._map(".flags", np.dtype(counts["flags"])) if counts["flags"] else None
        self._starts = list(accumulate((shard["tokens"] for shard in self._shards), initial=0))
        self._firsts = list(accumulate((shard["samples"] for shard in self._shards), initial=0))
        self._sample_ends: dict[int, np.ndarray] = {}
        self._numbers: np.ndarray | None = None

    def _map(self, suffix: str, dtype: np.dtype) -> list[np.ndarray]:
        return [np.memmap(self._folder / f"{shard['name']}{suffix}", dtype=dtype, mode="r") for shard in self._shards]

    def sample(self, index: int) -> Sample:
        """The sample as it was written."""
        shard = bisect.bisect_right(self._firsts, index) - 1
        if shard not in self._sample_ends:
            self._sample_ends[shard] = self._ends(self._shards[shard]["name"])
        ends, number = self._sample_ends[shard], index - self._firsts[shard]
        start, end = int(ends[number - 1]) if number else 0, int(ends[number])
        flags = None if self._flags is None else np.array(self._flags[shard][start:end])
        numbers = tuple(self.numbers()[index].tolist()) if self._columns else ()
        return Sample(self._maps[shard][start:end].astype(np.int64), flags, numbers)

    def numbers(self) -> np.ndarray:
        """The numbers of all samples, int64 (samples, columns), memory-mapped where one shard holds them."""
        if self._numbers is None:
            maps = self._map(".numbers", np.dtype("<i8")) if self._columns else []
            joined = maps[0] if len(maps) == 1 else np.concatenate([np.empty(0, "<i8"), *maps])
            self._numbers = joined.reshape(self.samples, self._columns)
        return self._numbers

    def sources(self) -> Iterator[dict[str, Any]]:
        """What each document is judged by, in the order of the store."""
        file = self._folder / SOURCES
        if file.is_file():
            with file.open("rb") as stream:
                yield from map(orjson.loads, stream)

    def read(self, start: int, count: int) -> np.ndarray:
        """Token ids, int64 (count,), from position `start` of the stream."""
        result = np.empty(count, dtype=np.int64)
        filled = 0
        shard = bisect.bisect_right(self._starts, start) - 1
        while filled < count:
            offset = start + filled - self._starts[shard]
            piece = self._maps[shard][offset : offset + count - filled]
            result[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
        return result

    def each_sample(self) -> Iterator[tuple[str, np.ndarray]]:
        """(`file:line`, ids) of every sample, in the order of the store."""
        for number, shard in enumerate(self._shards):
            origins = self._origins(shard["name"])
            start = 0
            for origin, end in zip(origins, self._ends(shard["name"]), strict=True):
                yield origin, self._maps[number][start : int(end)].astype(np.int64)
                start = int(end)

    def origins(self, start: int, stop: int) -> list[str]:
        """The `file:line` of each sample with tokens in [start, stop)."""
        found: list[str] = []
        for number, shard in enumerate(self._shards):
            low, high = start - self._starts[number], stop - self._starts[number]
            if high <= 0 or low >= shard["tokens"]:
                continue
            ends = self._ends(shard["name"])
            first = int(np.searchsorted(ends, max(low, 0), side="right"))
            last = int(np.searchsorted(ends, min(high, shard["tokens"]), side="left"))
            found += self._origins(shard["name"])[first : last + 1]
        return found

    def origin(self, index: int) -> str:
        """The `file:line` of a sample."""
        shard = bisect.bisect_right(self._firsts, index) - 1
        return self._origins(self._shards[shard]["name"])[index - self._firsts[shard]]

    def _ends(self, name: str) -> np.ndarray:
        return np.fromfile(self._folder / f"{name}.ends", dtype="<u8")

    def _origins(self, name: str) -> list[str]:
        text = (self._folder / f"{name}.origins").read_bytes().decode("utf-8", "surrogateescape")
        return text.split("\n")[:-1]


class TokenStore:
    """An opened store. Opening checks that every file is there in its size; `verify` reads all checksums."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.manifest: dict[str, Any] = orjson.loads((folder / "manifest.json").read_bytes())
        except FileNotFoundError:
            raise InputError([Problem(str(folder), "is not a token store: it has no manifest.json")]) from None
        except orjson.JSONDecodeError as error:
            raise self._damaged("manifest.json", f"is not JSON ({error})") from None
        if self.manifest.get("format") != FORMAT:
            raise self._damaged("manifest.json", f"has format {self.manifest.get('format')}, this artel reads {FORMAT}")
        for file, facts in self._files():
            if not file.is_file() or file.stat().st_size != facts["bytes"]:
                raise self._damaged(str(file.relative_to(folder)), "is missing or has another size than was written")
        parts = self.manifest["parts"]
        self.train = StorePart(folder / "train", parts["train"], self.manifest["dtype"])
        self.validation = StorePart(folder / "validation", parts["validation"], self.manifest["dtype"])

    @property
    def digest(self) -> str:
        """What the store holds, as one short text: equal digests mean equal tokens in equal order."""
        digest = xxhash.xxh3_128()
        for file, facts in self._files():
            if file.suffix != ".origins":  # where a document stood on this machine does not change what is learned
                digest.update(f"{file.relative_to(self.folder)} {facts['xxh3_128']}\n".encode())
        return digest.hexdigest()

    def verify(self) -> None:
        """Read every file and compare its checksum. Raises InputError that names a damaged file."""
        for file, facts in self._files():
            if checksum(file) != facts["xxh3_128"]:
                raise self._damaged(
                    str(file.relative_to(self.folder)), "does not have the checksum it was written with"
                )

    def _files(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        for part in PARTS:
            counts = self.manifest["parts"][part]
            for files in [*(shard["files"] for shard in counts["shards"]), counts["files"]]:
                for name, facts in files.items():
                    yield self.folder / part / name, facts

    def _damaged(self, name: str, what: str) -> InputError:
        return InputError(
            [Problem(str(self.folder / name), what, "delete the store's folder; the next run makes it anew")]
        )
