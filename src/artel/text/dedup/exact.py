"""Exact duplicates by 128 bits of each text (xxh3-128): the first of equal ones is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DIGEST = np.dtype([("high", ">u8"), ("low", ">u8")])
"""How 16 bytes of a digest lie in an array."""
# Digests sorted at a time: 4 million are 250 MB with what sorting them takes.
_AT_ONCE = 4_000_000


class Unique:
    """Remembers what came before: about 100 bytes of memory a digest."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def is_new(self, digest: bytes) -> bool:
        """Whether it is the first of its kind; it is remembered."""
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True


def repeated(parts: Sequence[NDArray], at_once: int = _AT_ONCE) -> NDArray[np.bool_]:
    """bool (all,): whether an equal digest stands before, in the digests (DIGEST) of all parts in their order.

    Memory is bounded: the digests are gone through once for every 4 million of them, a range of values at a time.
    """
    count = sum(map(len, parts))
    found = np.zeros(count, dtype=np.bool_)
    ranges = -(-count // at_once) if count else 0
    for number in range(ranges):
        low, high = number * 2**64 // ranges, (number + 1) * 2**64 // ranges - 1
        places, digests = [], []
        start = 0
        for part in parts:
            values = part["high"]
            inside = np.flatnonzero((values >= np.uint64(low)) & (values <= np.uint64(high)))
            places.append(inside + start)
            digests.append(part[inside])
            start += len(part)
        place, digest = np.concatenate(places), np.concatenate(digests)
        order = np.lexsort((place, digest["low"], digest["high"]))  # equal digests stay in the order of their places
        digest = digest[order]
        again = (digest["high"][1:] == digest["high"][:-1]) & (digest["low"][1:] == digest["low"][:-1])
        found[place[order[1:]][again]] = True
    return found
