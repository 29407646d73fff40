"""Exact duplicates: the first of equal cleaned texts is kept."""

from __future__ import annotations

import xxhash


class Unique:
    """Remembers 128 bits of each text: about 100 bytes of memory a document."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def is_new(self, text: str) -> bool:
        """Whether no equal text came before; it is remembered."""
        digest = xxhash.xxh3_128_digest(text.encode())
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True
