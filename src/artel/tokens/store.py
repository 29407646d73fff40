"""The token store: shards of token ids on disk, memory-mapped, with document ends, origins and checksums.

    STORE/manifest.json              what is here: parts, shards, counts, a checksum for every file
    STORE/ledger.json                every document: read, kept, dropped by reason
    STORE/tokenizer/                 the tokenizer that made it
    STORE/train/00000.tokens         uint16 (up to 65,536 ids) or uint32, little-endian, documents one after another
    STORE/train/00000.ends           uint64: for each document the token position after its last token, in this shard
    STORE/train/00000.origins        a line for each document: `file:line`
    STORE/validation/…               the same

A store is written into a folder of another name and renamed when whole; what has no manifest is not a store.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
import xxhash

from artel.errors import InputError, Problem
from artel.storage import checksum

FORMAT = 1
PARTS = ("train", "validation")
# 2**27 tokens: 256 MiB of uint16. Large enough that 400 billion tokens are 3,000 files, small enough to copy again.
SHARD_TOKENS = 2**27


@dataclass(slots=True)
class _OpenShard:
    name: str
    tokens: BinaryIO
    origins: BinaryIO
    ends: list[int]
    written: int = 0


class StoreWriter:
    """Writes documents into a folder that the caller makes whole (`storage.new_folder`)."""

    def __init__(self, folder: Path, vocabulary: int, shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder = folder
        self.dtype = "uint16" if vocabulary <= 2**16 else "uint32"
        self._shard_tokens = shard_tokens
        self._open: dict[str, _OpenShard] = {}
        self._parts: dict[str, dict[str, Any]] = {
            part: {"tokens": 0, "documents": 0, "bytes": 0, "shards": []} for part in PARTS
        }
        for part in PARTS:
            (folder / part).mkdir(parents=True)

    def add(self, part: str, ids: np.ndarray, text_bytes: int, origin: str) -> None:
        """One document: ids with its end token, the UTF-8 bytes of its text, its `file:line`."""
        shard = self._open.get(part) or self._start(part)
        shard.tokens.write(np.ascontiguousarray(ids, dtype=self.dtype).tobytes())
        shard.origins.write(origin.replace("\n", " ").encode("utf-8", "surrogateescape") + b"\n")
        shard.written += len(ids)
        shard.ends.append(shard.written)
        counts = self._parts[part]
        counts["tokens"] += len(ids)
        counts["documents"] += 1
        counts["bytes"] += text_bytes
        if shard.written >= self._shard_tokens:
            self._finish(part)

    def close(self, about: dict[str, Any]) -> dict[str, Any]:
        """Finish the shards and write the manifest, `about` added to it; returned as written."""
        for part in list(self._open):
            self._finish(part)
        manifest = {"format": FORMAT, "dtype": self.dtype, **about, "parts": self._parts}
        (self.folder / "manifest.json").write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
        return manifest

    def _start(self, part: str) -> _OpenShard:
        name = f"{len(self._parts[part]['shards']):05d}"
        base = self.folder / part / name
        shard = _OpenShard(name, base.with_suffix(".tokens").open("wb"), base.with_suffix(".origins").open("wb"), [])
        self._open[part] = shard
        return shard

    def _finish(self, part: str) -> None:
        shard = self._open.pop(part)
        shard.tokens.close()
        shard.origins.close()
        base = self.folder / part / shard.name
        base.with_suffix(".ends").write_bytes(np.array(shard.ends, dtype="<u8").tobytes())
        files = [base.with_suffix(suffix) for suffix in (".tokens", ".ends", ".origins")]
        self._parts[part]["shards"].append(
            {
                "name": shard.name,
                "tokens": shard.written,
                "documents": len(shard.ends),
                "files": {file.name: {"bytes": file.stat().st_size, "xxh3_128": checksum(file)} for file in files},
            }
        )


class StorePart:
    """The train or the validation part of a store, read as one stream of tokens."""

    def __init__(self, folder: Path, counts: dict[str, Any], dtype: str) -> None:
        self.tokens: int = counts["tokens"]
        self.documents: int = counts["documents"]
        self.bytes: int = counts["bytes"]
        self._folder = folder
        self._shards = counts["shards"]
        self._maps = [
            np.memmap(folder / f"{shard['name']}.tokens", dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
            for shard in self._shards
        ]
        self._starts = [0]
        for shard in self._shards:
            self._starts.append(self._starts[-1] + shard["tokens"])

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

    def each_document(self) -> Iterator[tuple[str, np.ndarray]]:
        """(`file:line`, ids with the end token) of every document, in the order of the store."""
        for number, shard in enumerate(self._shards):
            origins = self._origins(shard["name"])
            start = 0
            for origin, end in zip(origins, self._ends(shard["name"]), strict=True):
                yield origin, self._maps[number][start : int(end)].astype(np.int64)
                start = int(end)

    def origins(self, start: int, stop: int) -> list[str]:
        """The `file:line` of each document with tokens in [start, stop)."""
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
            for shard in self.manifest["parts"][part]["shards"]:
                for name, facts in shard["files"].items():
                    yield self.folder / part / name, facts

    def _damaged(self, name: str, what: str) -> InputError:
        return InputError(
            [Problem(str(self.folder / name), what, "delete the store's folder; the next run makes it anew")]
        )
