"""STORE/manifest.json: the contents of a token store, with a checksum of every file and of the manifest.

It is validated strictly, because it may be damaged or from another program: file names cannot point outside the store's
folder, and file sizes must match the number of samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
import orjson
import xxhash
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from artel.storage import checksum

FORMAT = 2
SPLITS = ("train", "validation")

StoredFile = tuple[str, int, str]
"""A file's name in the store, its size in bytes and its xxh3-128."""


def _check_file_name(name: str) -> str:
    parts = name.split("/")
    if not name or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r} is not the name of a file in the store")
    return name


def _check_plain_name(name: str) -> str:
    if "/" in name:
        raise ValueError(f"{name!r} is not a plain name")
    return _check_file_name(name)


Count = Annotated[int, Field(ge=0, lt=2**63)]
OneOrMore = Annotated[int, Field(ge=1, lt=2**63)]
Name = Annotated[str, AfterValidator(_check_plain_name)]


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _File(_StrictModel):
    bytes: Count
    xxh3_128: str = Field(pattern=r"^[0-9a-f]{32}$")


class _Shard(_StrictModel):
    name: Name
    tokens: OneOrMore
    samples: OneOrMore
    files: dict[Name, _File]


class _Split(_StrictModel):
    tokens: Count
    samples: Count
    documents: Count
    bytes: Count
    flags: Literal["uint8", "uint64"] | None
    numbers: Count
    files: dict[Name, _File]
    shards: list[_Shard]

    @model_validator(mode="after")
    def _check_sums(self) -> _Split:
        for name in ("tokens", "samples"):
            total = sum(getattr(shard, name) for shard in self.shards)
            if total != getattr(self, name):
                raise ValueError(f"has {getattr(self, name):,} {name}, its shards {total:,}")
        return self


class _Splits(_StrictModel):
    train: _Split
    validation: _Split


class _Manifest(BaseModel):
    """The fields of every manifest. The writer of a store adds more."""

    model_config = ConfigDict(strict=True)

    format: int
    dtype: Literal["uint16", "uint32"]
    parts: _Splits
    files: dict[Annotated[str, AfterValidator(_check_file_name)], _File] = {}

    @model_validator(mode="after")
    def _check_sizes(self) -> _Manifest:
        for split in (self.parts.train, self.parts.validation):
            token_bytes = {".tokens": np.dtype(self.dtype).itemsize}
            sample_bytes = {".ends": 8}
            if split.flags is not None:
                token_bytes[".flags"] = np.dtype(split.flags).itemsize
            if split.numbers:
                sample_bytes[".numbers"] = 8 * split.numbers
            for shard in split.shards:
                expected = {suffix: shard.tokens * size for suffix, size in token_bytes.items()}
                expected |= {suffix: shard.samples * size for suffix, size in sample_bytes.items()}
                for suffix, size in expected.items():
                    file = shard.files.get(f"{shard.name}{suffix}")
                    if file is None or file.bytes != size:
                        raise ValueError(f"shard {shard.name} needs {suffix} of {size:,} bytes")
                if f"{shard.name}.origins" not in shard.files:
                    raise ValueError(f"shard {shard.name} has no .origins")
        return self


def read_manifest(content: bytes) -> dict[str, Any]:
    """Read and validate a manifest. Raise ValueError with the problem."""
    try:
        manifest = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(manifest, dict):
        raise ValueError("is not the manifest of a token store")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"has format {str(manifest.get('format'))[:20]}, this artel reads {FORMAT}")
    # Older stores have no checksum. Those that list all files have one.
    if ("checksum" in manifest or "files" in manifest) and manifest.get("checksum") != manifest_checksum(manifest):
        raise ValueError("does not have the checksum it was written with")
    try:
        _Manifest.model_validate(manifest)
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(map(str, first["loc"]))
        raise ValueError(f"is invalid at {location or 'the top level'}: {first['msg']}") from None
    return manifest


def write_manifest(folder: Path, dtype: str, extra_entries: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """Write STORE/manifest.json, the last file of a store. Return the manifest.

    `parts` describes the files with samples. Other files in the folder (tokenizer, ledger) are added.
    """
    other_files = [
        file for file in folder.rglob("*") if file.is_file() and file.relative_to(folder).parts[0] not in SPLITS
    ]
    files = {file.relative_to(folder).as_posix(): file_entry(file) for file in sorted(other_files)}
    manifest = {"format": FORMAT, "dtype": dtype, **extra_entries, "parts": parts, "files": files}
    manifest["checksum"] = manifest_checksum(manifest)
    (folder / "manifest.json").write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2))
    return manifest


def file_entry(file: Path) -> dict[str, Any]:
    """Return a file's size and checksum, as in a manifest."""
    return {"bytes": file.stat().st_size, "xxh3_128": checksum(file)}


def sample_files(manifest: dict[str, Any]) -> Iterator[StoredFile]:
    """Yield the files with samples."""
    for split in SPLITS:
        counts = manifest["parts"][split]
        for files in [*(shard["files"] for shard in counts["shards"]), counts["files"]]:
            for name, entry in files.items():
                yield str(PurePosixPath(split, name)), entry["bytes"], entry["xxh3_128"]


def stored_files(manifest: dict[str, Any]) -> Iterator[StoredFile]:
    """Yield all files with a checksum in the manifest."""
    yield from sample_files(manifest)
    for name, entry in manifest.get("files", {}).items():
        yield name, entry["bytes"], entry["xxh3_128"]


def manifest_checksum(manifest: dict[str, Any]) -> str:
    """Return the xxh3-128 of the other keys, sorted. Raise ValueError for values that no manifest has."""
    entries = {name: value for name, value in manifest.items() if name != "checksum"}
    try:
        return xxhash.xxh3_128_hexdigest(orjson.dumps(entries, option=orjson.OPT_SORT_KEYS))
    except orjson.JSONEncodeError as error:  # orjson reads deeper nesting than it writes
        raise ValueError(f"is not the manifest of a token store ({error})") from None
