"""Exact duplicates by 128 bits of each text (xxh3-128): of equal texts the first is kept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

DIGEST = np.dtype([("high", ">u8"), ("low", ">u8")])
"""The 16 bytes of a digest as an array element."""
# Digests sorted at a time: 4 million take 250 MB, with the temporary arrays.
_MAX_SORTED = 4_000_000


class SeenDigests:
    """A set of digests: about 100 bytes of memory each."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def add(self, digest: bytes) -> bool:
        """Add a digest; true if it is new."""
        count = len(self._seen)
        self._seen.add(digest)
        return len(self._seen) > count


def repeated(shards: Sequence[NDArray], max_sorted: int = _MAX_SORTED) -> NDArray[np.bool_]:
    """Find digests that occurred earlier.

    Args:
        shards: DIGEST arrays, whose concatenation is searched.
        max_sorted: bounds the memory: the digests are passed over once for each so many, a range of values at a time.

    Returns:
        bool (digests,): true if an equal digest stands before.
    """
    count = sum(map(len, shards))
    is_repeated = np.zeros(count, dtype=np.bool_)
    ranges = -(-count // max_sorted) if count else 0
    for number in range(ranges):
        low, high = number * 2**64 // ranges, (number + 1) * 2**64 // ranges - 1
        places, digests = [], []
        start = 0
        for shard in shards:
            values = shard["high"]
            inside = np.flatnonzero((values >= np.uint64(low)) & (values <= np.uint64(high)))
            places.append(inside + start)
            digests.append(shard[inside])
            start += len(shard)
        place, digest = np.concatenate(places), np.concatenate(digests)
        order = np.lexsort((place, digest["low"], digest["high"]))  # equal digests stay in the order of their places
        digest = digest[order]
        equal = (digest["high"][1:] == digest["high"][:-1]) & (digest["low"][1:] == digest["low"][:-1])
        is_repeated[place[order[1:]][equal]] = True
    return is_repeated
