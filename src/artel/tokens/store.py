"""The token store: shards of token ids on disk, memory-mapped, with sample ends, origins and checksums.

    STORE/manifest.json              splits, shards, counts, checksums of every file and of itself
    STORE/ledger.json                the number of documents read, kept, and dropped by reason
    STORE/tokenizer/                 the tokenizer that was used
    STORE/train/00000.tokens         uint16 (up to 65,536 ids) or uint32, little-endian, samples in order
    STORE/train/00000.ends           uint64: end of each sample in this shard, exclusive
    STORE/train/00000.origins        one line per sample: `file:line`
    STORE/train/00000.flags          optional: a number per token, uint8 or uint64
    STORE/train/00000.numbers        optional: int64 numbers per sample, (samples, columns)
    STORE/train/sources.jsonl        optional: references for evaluation, a line of JSON per document
    STORE/validation/…               the same

Usually a document is one sample, and blocks are cut from the stream of samples. A long document with questions becomes
several windows.

A store is written to a temporary folder, which is renamed when it is complete. A folder without a manifest is not a
store.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from artel.errors import InputError, Problem
from artel.storage import check_regular, checksum, report_bus_errors
from artel.tokens.manifest import (
    SPLITS,
    StoredFile,
    file_entry,
    read_manifest,
    sample_files,
    stored_files,
    write_manifest,
)

REFERENCES_FILE = "sources.jsonl"
# 2**27 tokens are 256 MiB of uint16. So 400 billion tokens are 3,000 files, and a single one is quick to copy again.
SHARD_TOKENS = 2**27


@dataclass(frozen=True, slots=True)
class Sample:
    """One document, or one window of it: ids (tokens,) and data of the objective."""

    ids: np.ndarray
    flags: np.ndarray | None = None
    """A number per token, uint8 or uint64 (tokens,)."""
    numbers: tuple[int, ...] = ()
    """Numbers of the sample. All samples of a store have equally many."""


class StoreSplit:
    """The train or validation split of a store, read as a stream of tokens or as samples."""

    def __init__(self, folder: Path, counts: dict[str, Any], dtype: str) -> None:
        self.tokens: int = counts["tokens"]
        self.samples: int = counts["samples"]
        self.documents: int = counts["documents"]
        self.bytes: int = counts["bytes"]
        self._folder = folder
        self._shards = counts["shards"]
        self._columns: int = counts["numbers"]
        self._token_maps = self._map_files(".tokens", np.dtype(dtype).newbyteorder("<"))
        self._flags = self._map_files(".flags", np.dtype(counts["flags"])) if counts["flags"] else None
        self._token_starts = list(accumulate((shard["tokens"] for shard in self._shards), initial=0))
        self._sample_starts = list(accumulate((shard["samples"] for shard in self._shards), initial=0))
        self._sample_ends: dict[int, np.ndarray] = {}
        self._numbers: np.ndarray | None = None
        self._references: tuple[np.ndarray, np.ndarray] | None = None

    def _map_files(self, suffix: str, dtype: np.dtype) -> list[np.ndarray]:
        # As plain arrays, since slicing a memmap runs Python code for each block.
        files = (self._folder / f"{shard['name']}{suffix}" for shard in self._shards)
        return [np.memmap(file, dtype=dtype, mode="r").view(np.ndarray) for file in files]

    def sample(self, index: int) -> Sample:
        """Return the sample at `index`."""
        shard = bisect.bisect_right(self._sample_starts, index) - 1
        if shard not in self._sample_ends:
            self._sample_ends[shard] = self._read_ends(self._shards[shard]["name"])
        ends = self._sample_ends[shard]
        index_in_shard = index - self._sample_starts[shard]
        start, end = int(ends[index_in_shard - 1]) if index_in_shard else 0, int(ends[index_in_shard])
        flags = None if self._flags is None else np.array(self._flags[shard][start:end])
        numbers = tuple(self.numbers()[index].tolist()) if self._columns else ()
        return Sample(self._token_maps[shard][start:end].astype(np.int64), flags, numbers)

    def numbers(self) -> np.ndarray:
        """Return the numbers of all samples, int64 (samples, columns), memory-mapped if there is one shard."""
        if self._numbers is None:
            maps = self._map_files(".numbers", np.dtype("<i8")) if self._columns else []
            all_numbers = maps[0] if len(maps) == 1 else np.concatenate([np.empty(0, "<i8"), *maps])
            self._numbers = all_numbers.reshape(self.samples, self._columns)
        return self._numbers

    def references(self) -> Iterator[dict[str, Any]]:
        """Yield the reference of each document that has one, in the order of the store."""
        file = self._folder / REFERENCES_FILE
        if file.is_file():
            with file.open("rb") as stream:
                yield from map(orjson.loads, stream)

    def reference(self, index: int) -> dict[str, Any]:
        """Return the reference of the document at `index`.

        Raise IndexError if there is no such document, and ValueError if not every document has a reference.
        """
        if self._references is None:
            self._references = self._map_references()
        lines, ends = self._references
        if not 0 <= index < len(ends):
            raise IndexError(f"there is no document {index:,}: {self._folder} has {len(ends):,}")
        start = int(ends[index - 1]) if index else 0
        reference: dict[str, Any] = orjson.loads(lines[start : int(ends[index])].data)
        return reference

    def _map_references(self) -> tuple[np.ndarray, np.ndarray]:
        """Map the references into memory: bytes of all lines, and the end of each, int64 (documents,)."""
        file = self._folder / REFERENCES_FILE
        lines = np.memmap(file, np.uint8, mode="r").view(np.ndarray) if file.is_file() else np.empty(0, np.uint8)
        ends = find_line_ends(lines)
        if len(ends) != self.documents:
            what = f"{len(ends):,} of the {self.documents:,} documents in {self._folder} have a reference"
            raise ValueError(f"{what}; to find one by its number, all must have one")
        return lines, ends

    def read(self, start: int, num_tokens: int) -> np.ndarray:
        """Return ids (num_tokens,) from `start` of the stream on, in the stored dtype; a view if in a single shard."""
        shard = bisect.bisect_right(self._token_starts, start) - 1
        offset = start - self._token_starts[shard]
        if offset + num_tokens <= self._shards[shard]["tokens"]:
            return self._token_maps[shard][offset : offset + num_tokens]
        result = np.empty(num_tokens, dtype=self._token_maps[0].dtype)
        num_filled = 0
        while num_filled < num_tokens:
            offset = start + num_filled - self._token_starts[shard]
            chunk = self._token_maps[shard][offset : offset + num_tokens - num_filled]
            result[num_filled : num_filled + len(chunk)] = chunk
            num_filled += len(chunk)
            shard += 1
        return result

    def ends(self) -> np.ndarray:
        """Return the end of each sample in the stream of the split, exclusive, uint64 (samples,)."""
        ends = [
            self._read_ends(shard["name"]) + np.uint64(self._token_starts[shard_index])
            for shard_index, shard in enumerate(self._shards)
        ]
        return np.concatenate([np.empty(0, dtype=np.uint64), *ends])

    def iter_samples(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (`file:line`, ids) of every sample, in the order of the store."""
        for shard_index, shard in enumerate(self._shards):
            origins = self._read_origins(shard["name"])
            start = 0
            for origin, end in zip(origins, self._read_ends(shard["name"]), strict=True):
                yield origin, self._token_maps[shard_index][start : int(end)].astype(np.int64)
                start = int(end)

    def origins(self, start: int, end: int) -> list[str]:
        """Return the `file:line` of each sample with tokens in [start, end)."""
        origins: list[str] = []
        for shard_index, shard in enumerate(self._shards):
            low, high = start - self._token_starts[shard_index], end - self._token_starts[shard_index]
            if high <= 0 or low >= shard["tokens"]:
                continue
            ends = self._read_ends(shard["name"])
            first = int(np.searchsorted(ends, max(low, 0), side="right"))
            last = int(np.searchsorted(ends, min(high, shard["tokens"]), side="left"))
            origins += self._read_origins(shard["name"])[first : last + 1]
        return origins

    def origin(self, index: int) -> str:
        """Return the `file:line` of a sample."""
        shard = bisect.bisect_right(self._sample_starts, index) - 1
        return self._read_origins(self._shards[shard]["name"])[index - self._sample_starts[shard]]

    def _read_ends(self, name: str) -> np.ndarray:
        return np.fromfile(self._folder / f"{name}.ends", dtype="<u8")

    def _read_origins(self, name: str) -> list[str]:
        text = (self._folder / f"{name}.origins").read_bytes().decode("utf-8", "surrogateescape")
        return text.split("\n")[:-1]


class DamagedStore(InputError):
    """A store whose files have changed since they were written."""


class TokenStore:
    """An open store. Opening checks the size of every file; `verify` compares all checksums.

    Raise DamagedStore, or InputError without permission to read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        check_regular(folder / "manifest.json")
        try:
            self.manifest = read_manifest((folder / "manifest.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedStore([Problem(str(folder), "is not a token store: it has no manifest.json")]) from None
        except OSError as error:
            raise self._read_error(folder / "manifest.json", error) from None
        except ValueError as error:
            raise self._damage_error("manifest.json", str(error)) from None
        parts = self.manifest["parts"]
        report_bus_errors()
        try:
            for file, size, _ in self._with_paths(stored_files(self.manifest)):
                if not file.is_file() or file.stat().st_size != size:
                    what = "is missing or has another size than was written"
                    raise self._damage_error(str(file.relative_to(folder)), what)
            self.train = StoreSplit(folder / "train", parts["train"], self.manifest["dtype"])
            self.validation = StoreSplit(folder / "validation", parts["validation"], self.manifest["dtype"])
        except OSError as error:
            raise self._read_error(Path(error.filename or folder), error) from None

    @property
    def digest(self) -> str:
        """A hash of the contents: stores with equal digests have the same tokens in the same order."""
        digest = xxhash.xxh3_128()
        validation_references = self.folder / "validation" / REFERENCES_FILE
        for file, _, file_digest in self._with_paths(sample_files(self.manifest)):
            # Paths of documents, and the answers that a validation compares with, do not affect training.
            if file.suffix != ".origins" and file != validation_references:
                digest.update(f"{file.relative_to(self.folder)} {file_digest}\n".encode())
        return digest.hexdigest()

    def verify(self, vocabulary: int | None = None) -> None:
        """Compare the checksums of all files, and check that all ids are below `vocabulary`.

        Raise DamagedStore if a file fails.
        """
        dtype = np.dtype(self.manifest["dtype"]).newbyteorder("<")
        largest_id = -1

        def compare(chunk: memoryview) -> None:
            nonlocal largest_id
            num_whole_bytes = len(chunk) - len(chunk) % dtype.itemsize
            largest_id = max(largest_id, int(np.frombuffer(chunk[:num_whole_bytes], dtype).max(initial=0)))

        for file, _, expected in self._with_paths(stored_files(self.manifest)):
            limit = vocabulary if file.suffix == ".tokens" else None
            largest_id = -1
            try:
                actual = checksum(file) if limit is None else checksum(file, compare)
            except OSError as error:
                raise self._read_error(file, error) from None
            if actual != expected:
                what = "does not have the checksum it was written with"
                raise self._damage_error(str(file.relative_to(self.folder)), what)
            if limit is not None and largest_id >= limit:
                what = f"holds the token {largest_id:,}, but its tokenizer has {limit:,}"
                raise self._damage_error(str(file.relative_to(self.folder)), what)

    def _with_paths(self, files: Iterator[StoredFile]) -> Iterator[tuple[Path, int, str]]:
        return ((self.folder / name, size, digest) for name, size, digest in files)

    def _read_error(self, file: Path, error: OSError) -> InputError:
        """Return the error for a file that cannot be read: no permission, or damaged."""
        what = f"cannot be read: {error.strerror}"
        if isinstance(error, PermissionError):
            return InputError.at(str(file), what, f"make it readable: chmod -R u+rX {self.folder}")
        return self._damage_error(str(file.relative_to(self.folder)), what)

    def _damage_error(self, name: str, what: str) -> DamagedStore:
        fix = "artel prepare and artel train rebuild the store, if its texts still exist"
        return DamagedStore([Problem(str(self.folder / name), what, fix)])


def id_dtype(vocabulary: int) -> str:
    """Return the dtype for ids below `vocabulary`."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


class ShardWriter:
    """Writes samples to BASE.tokens, .ends, .origins and, if they have any, .flags and .numbers."""

    def __init__(self, base: Path, dtype: str) -> None:
        self._base = base
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._tokens = base.with_suffix(".tokens").open("wb")
        self._origins = base.with_suffix(".origins").open("wb")
        self._ends = base.with_suffix(".ends").open("wb")
        self._optional_files: dict[str, BinaryIO] = {}
        self.flags: str | None = None
        """The dtype of the samples' flags."""
        self.columns = 0
        """Numbers per sample."""
        self.num_tokens = 0
        self.num_samples = 0

    def add(self, sample: Sample, origin: str) -> None:
        self._tokens.write(np.ascontiguousarray(sample.ids, dtype=self._dtype).data)
        self._origins.write(origin_line(origin))
        if sample.flags is not None:
            self._write_flags(np.ascontiguousarray(sample.flags))
        if sample.numbers:
            self._write_numbers(np.array([sample.numbers], dtype="<i8"))
        self.num_tokens += len(sample.ids)
        self.num_samples += 1
        self._ends.write(self.num_tokens.to_bytes(8, "little"))

    def add_many(
        self, tokens: NDArray, lengths: NDArray, origins: bytes, flags: NDArray | None, numbers: NDArray | None
    ) -> None:
        """Add samples: tokens and flags (tokens,), lengths (samples,), lines of origins, numbers (samples, columns)."""
        self._tokens.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        self._origins.write(origins)
        if flags is not None:
            self._write_flags(np.ascontiguousarray(flags))
        if numbers is not None:
            self._write_numbers(np.ascontiguousarray(numbers, dtype="<i8"))
        self._ends.write((self.num_tokens + np.cumsum(lengths)).astype("<u8").data)
        self.num_tokens += int(lengths.sum())
        self.num_samples += len(lengths)

    def close(self) -> dict[str, Any]:
        """Return the shard's entry in the manifest: name, tokens, samples, and the size and checksum of each file."""
        files = [self._base.with_suffix(suffix) for suffix in (".tokens", ".ends", ".origins", *self._optional_files)]
        for stream in (self._tokens, self._ends, self._origins, *self._optional_files.values()):
            stream.close()
        return {
            "name": self._base.name,
            "tokens": self.num_tokens,
            "samples": self.num_samples,
            "files": file_entries(files),
        }

    def _write_flags(self, flags: NDArray) -> None:
        self.flags = str(flags.dtype)
        self._open_file(".flags").write(flags.data)

    def _write_numbers(self, numbers: NDArray) -> None:
        self.columns = numbers.shape[1]
        self._open_file(".numbers").write(numbers.data)

    def _open_file(self, suffix: str) -> BinaryIO:
        if suffix not in self._optional_files:
            self._optional_files[suffix] = self._base.with_suffix(suffix).open("wb")
        return self._optional_files[suffix]


class StoreWriter:
    """Writes samples into the caller's folder, usually a temporary one that is renamed at the end (`new_folder`)."""

    def __init__(self, folder: Path, vocabulary: int, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self.dtype = id_dtype(vocabulary)
        self._shard_tokens = shard_tokens
        self._open_shards: dict[str, ShardWriter] = {}
        self._references: dict[str, BinaryIO] = {}
        self._splits = {split: empty_split() for split in SPLITS}
        for split in SPLITS:
            (folder / split).mkdir(parents=True)

    def add(
        self,
        split: str,
        samples: Iterable[Sample],
        text_bytes: int,
        origin: str,
        reference: dict[str, Any] | None = None,
    ) -> None:
        """Add a document: samples, size of its text in UTF-8 bytes, `file:line`, and its reference for evaluation."""
        counts = self._splits[split]
        for sample in samples:
            if split not in self._open_shards:
                name = f"{len(counts['shards']):05d}"
                self._open_shards[split] = ShardWriter(self.folder / split / name, self.dtype)
            shard = self._open_shards[split]
            shard.add(sample, origin)
            if shard.num_tokens >= self._shard_tokens:
                self._finish_shard(split)
        counts["documents"] += 1
        counts["bytes"] += text_bytes
        if reference is not None:
            if split not in self._references:
                self._references[split] = (self.folder / split / REFERENCES_FILE).open("wb")
            self._references[split].write(orjson.dumps(reference) + b"\n")

    def close(self, extra_entries: dict[str, Any]) -> dict[str, Any]:
        """Finish the shards and write the manifest with `extra_entries`. Return the manifest."""
        for split in list(self._open_shards):
            self._finish_shard(split)
        for split, stream in self._references.items():
            stream.close()
            self._splits[split]["files"] = file_entries([self.folder / split / REFERENCES_FILE])
        return write_manifest(self.folder, self.dtype, extra_entries, self._splits)

    def _finish_shard(self, split: str) -> None:
        shard = self._open_shards.pop(split)
        counts = self._splits[split]
        counts["shards"].append(shard.close())
        counts["tokens"] += shard.num_tokens
        counts["samples"] += shard.num_samples
        counts["flags"], counts["numbers"] = shard.flags, shard.columns


def find_line_ends(lines: np.ndarray, chunk_bytes: int = 1 << 24) -> np.ndarray:
    """Return the end offset of each line, exclusive, int64 (lines,). `lines`: uint8 (bytes,), read in chunks."""
    starts = range(0, len(lines), chunk_bytes)
    ends = [np.flatnonzero(lines[start : start + chunk_bytes] == ord("\n")) + start + 1 for start in starts]
    return np.concatenate([np.empty(0, np.int64), *ends])


def empty_split() -> dict[str, Any]:
    """Return the manifest's entry of a split without samples."""
    counts = dict.fromkeys(("tokens", "samples", "documents", "bytes"), 0)
    return {**counts, "flags": None, "numbers": 0, "files": {}, "shards": []}


def origin_line(origin: str) -> bytes:
    """Format a `file:line` as a line of an .origins file."""
    return origin.replace("\n", " ").encode("utf-8", "surrogateescape") + b"\n"


def file_entries(files: list[Path]) -> dict[str, dict[str, Any]]:
    """Return the size and checksum of each file, by name."""
    return {file.name: file_entry(file) for file in files}
