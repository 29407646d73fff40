"""The token store: shards of token ids on disk, memory-mapped, with sample ends, origins and checksums.

    STORE/manifest.json              splits, shards, counts, a checksum of every file and its own
    STORE/ledger.json                the number of documents read, kept, and dropped by reason
    STORE/tokenizer/                 the tokenizer that made it
    STORE/train/00000.tokens         uint16 (up to 65,536 ids) or uint32, little-endian, the samples in order
    STORE/train/00000.ends           uint64: the position after the last token of each sample, in this shard
    STORE/train/00000.origins        a line for each sample: `file:line`
    STORE/train/00000.flags          if the objective has them: a number for each token, uint8 or uint64
    STORE/train/00000.numbers        and int64 numbers for each sample, (samples, columns)
    STORE/train/sources.jsonl        and a line of JSON for each document, for objectives evaluated on text
    STORE/validation/…               the same

A document usually is one sample, of which blocks are cut. A long document with questions gives several windows.

A store is written into a folder of another name, which is renamed when it is complete. A folder without a manifest is
no store.
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
from artel.storage import check_regular, checksum, report_bus_errors
from artel.tokens.store.manifest import Facts, read_manifest, sample_files, stored_files

SOURCES = "sources.jsonl"


@dataclass(frozen=True, slots=True)
class Sample:
    """One document, or one window of it, as ids (tokens,) and what the objective adds."""

    ids: np.ndarray
    flags: np.ndarray | None = None
    """A number for each token, uint8 or uint64 (tokens,)."""
    numbers: tuple[int, ...] = ()
    """Numbers of the sample as a whole; every sample of a store has as many."""


class StoreSplit:
    """The train or validation split of a store, as one stream of tokens or as samples."""

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
        # As plain arrays: slicing a memmap runs Python code for each block.
        files = (self._folder / f"{shard['name']}{suffix}" for shard in self._shards)
        return [np.memmap(file, dtype=dtype, mode="r").view(np.ndarray) for file in files]

    def sample(self, index: int) -> Sample:
        """The sample at `index`, as it was written."""
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
        """The source of each document for evaluation, in the order of the store."""
        file = self._folder / SOURCES
        if file.is_file():
            with file.open("rb") as stream:
                yield from map(orjson.loads, stream)

    def read(self, start: int, count: int) -> np.ndarray:
        """Token ids (count,) from position `start` of the stream, in the stored dtype: a view if in one shard."""
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
        """The position after the last token of each sample in the stream of the split, uint64 (samples,)."""
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
        origins: list[str] = []
        for number, shard in enumerate(self._shards):
            low, high = start - self._starts[number], stop - self._starts[number]
            if high <= 0 or low >= shard["tokens"]:
                continue
            ends = self._ends(shard["name"])
            first = int(np.searchsorted(ends, max(low, 0), side="right"))
            last = int(np.searchsorted(ends, min(high, shard["tokens"]), side="left"))
            origins += self._origins(shard["name"])[first : last + 1]
        return origins

    def origin(self, index: int) -> str:
        """The `file:line` of a sample."""
        shard = bisect.bisect_right(self._firsts, index) - 1
        return self._origins(self._shards[shard]["name"])[index - self._firsts[shard]]

    def _ends(self, name: str) -> np.ndarray:
        return np.fromfile(self._folder / f"{name}.ends", dtype="<u8")

    def _origins(self, name: str) -> list[str]:
        text = (self._folder / f"{name}.origins").read_bytes().decode("utf-8", "surrogateescape")
        return text.split("\n")[:-1]


class DamagedStore(InputError):
    """A store whose files are not as they were written."""


class _Largest:
    """The largest number in a file that is read in chunks."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self.number = -1

    def __call__(self, chunk: memoryview) -> None:
        whole = len(chunk) - len(chunk) % self._dtype.itemsize
        self.number = max(self.number, int(np.frombuffer(chunk[:whole], self._dtype).max(initial=0)))


class TokenStore:
    """An open store. Opening checks that every file exists in its size; `verify` compares all checksums.

    Raises DamagedStore, and InputError without permission to read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        check_regular(folder / "manifest.json")
        try:
            self.manifest = read_manifest((folder / "manifest.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedStore([Problem(str(folder), "is not a token store: it has no manifest.json")]) from None
        except OSError as error:
            raise self._refused(folder / "manifest.json", error) from None
        except ValueError as error:
            raise self._damaged("manifest.json", str(error)) from None
        parts = self.manifest["parts"]
        report_bus_errors()
        try:
            for file, size, _ in self._files(stored_files(self.manifest)):
                if not file.is_file() or file.stat().st_size != size:
                    what = "is missing or has another size than was written"
                    raise self._damaged(str(file.relative_to(folder)), what)
            self.train = StoreSplit(folder / "train", parts["train"], self.manifest["dtype"])
            self.validation = StoreSplit(folder / "validation", parts["validation"], self.manifest["dtype"])
        except OSError as error:
            raise self._refused(Path(error.filename or folder), error) from None

    @property
    def digest(self) -> str:
        """A hash of the contents: equal digests mean equal tokens in equal order."""
        digest = xxhash.xxh3_128()
        for file, _, file_digest in self._files(sample_files(self.manifest)):
            if file.suffix != ".origins":  # the paths of documents do not change training
                digest.update(f"{file.relative_to(self.folder)} {file_digest}\n".encode())
        return digest.hexdigest()

    def verify(self, vocabulary: int | None = None) -> None:
        """Read every file and compare its checksum, and check that all ids are below `vocabulary`.

        Raises DamagedStore, which names a file.
        """
        for file, _, expected in self._files(stored_files(self.manifest)):
            limit = vocabulary if file.suffix == ".tokens" else None
            largest = _Largest(np.dtype(self.manifest["dtype"]).newbyteorder("<"))
            try:
                actual = checksum(file) if limit is None else checksum(file, largest)
            except OSError as error:
                raise self._refused(file, error) from None
            if actual != expected:
                raise self._damaged(
                    str(file.relative_to(self.folder)), "does not have the checksum it was written with"
                )
            if limit is not None and largest.number >= limit:
                what = f"holds the token {largest.number:,}, and its tokenizer has {limit:,}"
                raise self._damaged(str(file.relative_to(self.folder)), what)

    def _files(self, facts: Iterator[Facts]) -> Iterator[tuple[Path, int, str]]:
        return ((self.folder / name, size, digest) for name, size, digest in facts)

    def _refused(self, file: Path, error: OSError) -> InputError:
        """The error for a file that cannot be read: without permission, or because it is damaged."""
        what = f"cannot be read: {error.strerror}"
        if isinstance(error, PermissionError):
            return InputError.at(str(file), what, f"give yourself the right to: chmod -R u+rX {self.folder}")
        return self._damaged(str(file.relative_to(self.folder)), what)

    def _damaged(self, name: str, what: str) -> DamagedStore:
        fix = "artel prepare and artel train make the store again, if its texts still exist"
        return DamagedStore([Problem(str(self.folder / name), what, fix)])
