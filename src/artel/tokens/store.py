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
from typing import Any

import numpy as np
import orjson
import xxhash

from artel.errors import InputError, Problem
from artel.storage import checksum

FORMAT = 2
PARTS = ("train", "validation")
SOURCES = "sources.jsonl"


@dataclass(frozen=True, slots=True)
class Sample:
    """What one document, or one window of it, becomes: ids (tokens,), and what the objective keeps beside."""

    ids: np.ndarray
    flags: np.ndarray | None = None
    """A number for each token, uint8 or uint64 (tokens,)."""
    numbers: tuple[int, ...] = ()
    """Numbers of the sample as a whole, as many for every sample of a store."""


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
        # As plain arrays: slicing a memmap runs Python code, for each block that is read.
        files = (self._folder / f"{shard['name']}{suffix}" for shard in self._shards)
        return [np.memmap(file, dtype=dtype, mode="r").view(np.ndarray) for file in files]

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
        """Token ids (count,) from position `start` of the stream, as stored: a view where one shard holds them."""
        shard = bisect.bisect_right(self._starts, start) - 1
        offset = start - self._starts[shard]
        if offset + count <= self._shards[shard]["tokens"]:
            return self._maps[shard][offset : offset + count]
        result = np.empty(count, dtype=self._maps[0].dtype)
        filled = 0
        while filled < count:
            offset = start + filled - self._starts[shard]
            piece = self._maps[shard][offset : offset + count - filled]
            result[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
        return result

    def ends(self) -> np.ndarray:
        """The position after the last token of each sample in the stream of the whole part, uint64 (samples,)."""
        ends = [self._ends(shard["name"]) + np.uint64(self._starts[at]) for at, shard in enumerate(self._shards)]
        return np.concatenate([np.empty(0, dtype=np.uint64), *ends])

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


def stored_files(manifest: dict[str, Any]) -> Iterator[tuple[str, int, str]]:
    """(name within the store, bytes, xxh3-128) of each file with samples."""
    for part in PARTS:
        counts = manifest["parts"][part]
        for files in [*(shard["files"] for shard in counts["shards"]), counts["files"]]:
            for name, facts in files.items():
                yield f"{part}/{name}", facts["bytes"], facts["xxh3_128"]


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
        for file, size, _ in self._files():
            if not file.is_file() or file.stat().st_size != size:
                raise self._damaged(str(file.relative_to(folder)), "is missing or has another size than was written")
        parts = self.manifest["parts"]
        self.train = StorePart(folder / "train", parts["train"], self.manifest["dtype"])
        self.validation = StorePart(folder / "validation", parts["validation"], self.manifest["dtype"])

    @property
    def digest(self) -> str:
        """What the store holds, as one short text: equal digests mean equal tokens in equal order."""
        digest = xxhash.xxh3_128()
        for file, _, found in self._files():
            if file.suffix != ".origins":  # where a document stood on this machine does not change what is learned
                digest.update(f"{file.relative_to(self.folder)} {found}\n".encode())
        return digest.hexdigest()

    def verify(self) -> None:
        """Read every file and compare its checksum. Raises InputError that names a damaged file."""
        for file, _, found in self._files():
            if checksum(file) != found:
                raise self._damaged(
                    str(file.relative_to(self.folder)), "does not have the checksum it was written with"
                )

    def _files(self) -> Iterator[tuple[Path, int, str]]:
        return ((self.folder / name, size, found) for name, size, found in stored_files(self.manifest))

    def _damaged(self, name: str, what: str) -> InputError:
        return InputError(
            [Problem(str(self.folder / name), what, "delete the store's folder; the next run makes it anew")]
        )
