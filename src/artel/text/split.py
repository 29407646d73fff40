"""The validation split: chosen by a hash of the text, so that it stays the same when files are added."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

# Any constant would do. The run's seed is not used, so that runs of all seeds are evaluated on the same texts.
_SEED = 20_261_121


def split_hash(text: str) -> int:
    """64 bits of a cleaned text. A document is held out if they are below `data.validation` * 2**64."""
    return xxhash.xxh3_64_intdigest(text.encode(), seed=_SEED)


def is_held_out(hashed: int, fraction: float) -> bool:
    """True if a document with this `split_hash` belongs to the validation split."""
    return hashed < fraction * 2**64


def least_fraction(hashes: NDArray[np.uint64], fraction: float) -> float | None:
    """The least fraction that holds out `fraction` of the documents, at least one and never all of them.

    Args:
        hashes: (documents,) `split_hash` of each.

    Returns None if there are fewer than two documents or all hashes are equal.
    """
    hashes = np.sort(hashes)
    if len(hashes) < 2 or hashes[0] == hashes[-1]:
        return None
    count = max(1, round(fraction * len(hashes)))
    below_the_last = hashes[hashes < hashes[-1]]
    highest = int(hashes[min(count, len(below_the_last)) - 1])
    return float(np.nextafter(highest / 2**64, 1.0))
