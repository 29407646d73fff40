"""The checksum of a file: xxh3-128, as fast as the disk, against damage and not against malice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import xxhash

_CHUNK = 1 << 20


def checksum(path: Path | str, look: Callable[[memoryview], object] = lambda piece: None) -> str:
    """32 hex digits: xxh3-128 of the file's bytes, read in pieces of 2**20 or so, each of which `look` is shown."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    with Path(path).open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            look(buffer[:count])
    return str(digest.hexdigest())
