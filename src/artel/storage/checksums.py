"""The checksum of a file: xxh3-128, as fast as the disk, against damage and not against malice."""

from __future__ import annotations

from pathlib import Path

import xxhash

_CHUNK = 1 << 20


def checksum(path: Path | str) -> str:
    """32 hex digits: xxh3-128 of the file's bytes, read in pieces."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    with Path(path).open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return str(digest.hexdigest())
