"""Exact deduplication by 128-bit hashes (xxh3-128). The first of equal documents, lines or paragraphs is kept."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from artel.integers import ceil_div

DIGEST = np.dtype([("high", ">u8"), ("low", ">u8")])
"""A digest of 16 bytes as an array element."""
# Digests sorted at a time: 4 million take 250 MB, temporary arrays included.
_MAX_SORTED = 4_000_000
# Shorter units are always kept: a closing brace, "Yes." or a heading is not a duplicate.
_MIN_CHARACTERS = 30
_SEPARATORS = {"line": re.compile(r"(\n)"), "paragraph": re.compile(r"(\n(?:[^\S\n]*\n)+)")}


def find_repeated(shards: Sequence[NDArray], max_sorted: int = _MAX_SORTED) -> NDArray[np.bool_]:
    """Return bool (digests,): true if an equal digest comes before, in the concatenation of `shards` (DIGEST arrays).

    Each pass sorts about `max_sorted` digests, those in one range of values, which bounds the memory.
    """
    num_digests = sum(map(len, shards))
    is_repeated = np.zeros(num_digests, dtype=np.bool_)
    num_ranges = ceil_div(num_digests, max_sorted) if num_digests else 0
    for range_index in range(num_ranges):
        first, last = range_index * 2**64 // num_ranges, (range_index + 1) * 2**64 // num_ranges - 1
        positions, digests = [], []
        start = 0
        for shard in shards:
            values = shard["high"]
            in_range = np.flatnonzero((values >= np.uint64(first)) & (values <= np.uint64(last)))
            positions.append(in_range + start)
            digests.append(shard[in_range])
            start += len(shard)
        all_positions, all_digests = np.concatenate(positions), np.concatenate(digests)
        # Equal digests stay in the order of their positions.
        order = np.lexsort((all_positions, all_digests["low"], all_digests["high"]))
        high, low = all_digests["high"][order], all_digests["low"][order]
        is_equal = (high[1:] == high[:-1]) & (low[1:] == low[:-1])
        is_repeated[all_positions[order[1:]][is_equal]] = True
    return is_repeated


class RepeatedUnits:
    """Remembers a 128-bit hash of each line or paragraph of at least 30 characters, in about 100 bytes each.

    `earlier_digests`: digests of units that occurred before all texts passed to `remove_repeats`.
    """

    def __init__(self, unit: Literal["line", "paragraph"], earlier_digests: Iterable[bytes] = ()) -> None:
        self._unit = unit
        self._earlier_digests = set(earlier_digests)
        self.seen: dict[bytes, None] = {}
        """Digests of the units in the texts, in order of first occurrence."""

    def remove_repeats(self, text: str, changes: Counter[str]) -> str:
        """Remove the units that occurred before, with the break before each. Count them in `changes`."""
        chunks = _SEPARATORS[self._unit].split(text)  # units at even indices, breaks between them
        kept_chunks: list[str] = []
        removed = 0
        for index in range(0, len(chunks), 2):
            unit = chunks[index].strip()
            if len(unit) >= _MIN_CHARACTERS and not self._is_new(unit):
                removed += 1
            else:
                kept_chunks += [chunks[index - 1] if index else "", chunks[index]]
        if not removed:
            return text
        changes[f"{self._unit}s_repeated"] += removed
        text = "".join(kept_chunks).rstrip()
        return text.lstrip("\n") if kept_chunks and kept_chunks[0] else text

    def _is_new(self, unit: str) -> bool:
        digest = xxhash.xxh3_128_digest(unit.encode())
        if digest in self.seen or digest in self._earlier_digests:
            return False
        self.seen[digest] = None
        return True
