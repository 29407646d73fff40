"""The validation part: chosen by a hash of the text, so that it stays what it was when files are added."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

# Any constant would do; the run's seed does not enter, so that runs of all seeds are judged on the same texts.
_SEED = 20_261_121


def split_hash(text: str) -> int:
    """64 bits of a cleaned text: those below `data.validation` of all 64-bit numbers are held out."""
    return xxhash.xxh3_64_intdigest(text.encode(), seed=_SEED)


def is_held_out(hashed: int, fraction: float) -> bool:
    """Whether a document of that `split_hash` belongs to the validation part."""
    return hashed < fraction * 2**64


def least_fraction(hashes: NDArray[np.uint64], fraction: float) -> float | None:
    """The least fraction that holds out as many documents as `fraction` of them are, at least one, and never all.

    `hashes` (documents,) are those that `split_hash` gives. None where they are all the same, or fewer than two.
    """
    hashes = np.sort(hashes)
    if len(hashes) < 2 or hashes[0] == hashes[-1]:
        return None
    wanted = max(1, round(fraction * len(hashes)))
    below_the_last = hashes[hashes < hashes[-1]]
    highest = int(hashes[min(wanted, len(below_the_last)) - 1])
    return float(np.nextafter(highest / 2**64, 1.0))
