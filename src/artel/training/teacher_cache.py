"""A teacher's outputs for every sample of a store, cached on disk before the student trains.

    STORE.teachers/KEY/manifest.json               inputs of KEY, shards and checksums, and a checksum of the manifest
    STORE.teachers/KEY/train/00000.safetensors     the outputs of consecutive samples
    STORE.teachers/KEY/validation/…                the same for the validation split

A shard holds `counts`, uint32 (samples,): the number of targets of each sample; and arrays (targets, …), concatenated
over samples. A sample is one of the objective's dataset: a block or a conversation.

`write_file` never leaves an incomplete shard. The folder is called `KEY.parts` until all shards exist. Then it gets a
manifest and is renamed. After a kill, only missing shards are computed.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from artel.errors import InputError
from artel.integers import ceil_div
from artel.storage import checksum, write_file
from artel.tokens.manifest import manifest_checksum

_SHARD_BYTES = 64 * 2**20
_MIN_SHARDS = 32
"""Minimum number of shards of a split with enough samples: all ranks get work, and a kill loses little of it."""
_COUNTS_NAME = "counts"


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive samples of a split."""

    split: str
    index: int
    start: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.split}/{self.index:05d}.safetensors"

    @property
    def samples(self) -> np.ndarray:
        return np.arange(self.start, self.end)


def split_into_shards(split: str, samples: int, sample_bytes: int) -> list[Shard]:
    """Return the shards of a split, the same for any number of ranks. `sample_bytes`: bytes of the largest sample."""
    shard_samples = max(1, min(_SHARD_BYTES // max(1, sample_bytes), ceil_div(samples, _MIN_SHARDS)))
    starts = range(0, samples, shard_samples)
    return [Shard(split, index, start, min(start + shard_samples, samples)) for index, start in enumerate(starts)]


def write_shard(
    folder: Path, shard: Shard, counts: np.ndarray, arrays: dict[str, np.ndarray], metadata: dict[str, Any]
) -> None:
    """Write a shard as a whole. `metadata`: JSON-compatible values stored with the shard."""
    content = {
        _COUNTS_NAME: counts.astype(np.uint32),
        **{name: np.ascontiguousarray(array) for name, array in arrays.items()},
    }
    write_file(folder / shard.name, save(content, metadata={"about": orjson.dumps(metadata).decode()}))


def read_metadata(folder: Path, shard: Shard) -> dict[str, Any]:
    """Return the metadata passed to `write_shard`, and the number of `targets`."""
    with safe_open(folder / shard.name, framework="np") as file:
        return {**orjson.loads((file.metadata() or {})["about"]), "targets": int(file.get_tensor(_COUNTS_NAME).sum())}


def write_manifest(folder: Path, metadata: dict[str, Any], shards: list[Shard]) -> None:
    """Write the manifest of a folder that has all of its shards."""
    entries = {
        shard.name: {
            "samples": shard.end - shard.start,
            "bytes": (folder / shard.name).stat().st_size,
            "xxh3_128": checksum(folder / shard.name),
        }
        for shard in shards
    }
    manifest = {**metadata, "shards": entries}
    manifest["checksum"] = manifest_checksum(manifest)
    write_file(folder / "manifest.json", orjson.dumps(manifest, option=orjson.OPT_INDENT_2))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a folder's manifest. Raise ValueError or OSError if it is damaged."""
    manifest = orjson.loads((folder / "manifest.json").read_bytes())
    if not isinstance(manifest, dict) or manifest.get("checksum") != manifest_checksum(manifest):
        raise ValueError("does not match its checksum")
    return manifest


def damaged_shards(folder: Path) -> list[str]:
    """Return the names of missing or changed shards. Reads all of them."""
    entries = read_manifest(folder)["shards"]
    return [name for name, entry in entries.items() if not _is_unchanged(folder / name, entry)]


def _is_unchanged(file: Path, entry: dict[str, Any]) -> bool:
    try:
        return file.stat().st_size == entry["bytes"] and checksum(file) == entry["xxh3_128"]
    except OSError:
        return False


class CachedOutputs:
    """The teacher's outputs for the samples of one split, memory-mapped."""

    def __init__(self, folder: Path, split: str) -> None:
        self.folder = folder
        self._files = [
            (name, entry) for name, entry in read_manifest(folder)["shards"].items() if name.startswith(f"{split}/")
        ]
        shard_samples = [entry["samples"] for _, entry in self._files]
        self._first_samples = np.concatenate([[0], np.cumsum(shard_samples)]).astype(int).tolist()
        self._open_shards: dict[int, tuple[Any, np.ndarray]] = {}
        for name, entry in self._files:
            if not (folder / name).is_file() or (folder / name).stat().st_size != entry["bytes"]:
                raise _damaged_error(folder / name, "is missing or has a different size than when it was written")

    def __len__(self) -> int:
        return int(self._first_samples[-1])

    def read(self, sample: int) -> dict[str, np.ndarray]:
        """Return the arrays of a sample, (targets of the sample, …) each."""
        shard = bisect.bisect_right(self._first_samples, sample) - 1
        try:
            if shard not in self._open_shards:
                opened = safe_open(self.folder / self._files[shard][0], framework="np")
                ends = np.cumsum(opened.get_tensor(_COUNTS_NAME).astype(np.int64))
                self._open_shards[shard] = opened, np.concatenate([[0], ends])
            file, starts = self._open_shards[shard]  # starts: first target of each sample, int64 (samples + 1,)
            start, end = starts[sample - self._first_samples[shard] :][:2]
            names = (name for name in file.keys() if name != _COUNTS_NAME)  # noqa: SIM118  # not a mapping
            return {name: file.get_slice(name)[int(start) : int(end)] for name in names}
        except (OSError, SafetensorError) as error:
            raise _damaged_error(self.folder / self._files[shard][0], str(error)) from None


def _damaged_error(file: Path, reason: str) -> InputError:
    fix = f"remove {file.parent.parent}: the teacher will run again, if it still exists"
    return InputError.at(str(file), reason, fix)
