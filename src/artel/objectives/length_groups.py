"""Rows of a micro-batch in groups of similar length, each computed by itself without the padding of the longest row.

Of texts of unequal length most of a micro-batch is padding: of paragraphs of novels two thirds of 32 rows. The loss is
that of the micro-batch, whatever the groups (law 2). Their number follows from the number of rows and the block alone,
so that all ranks run equally many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Tokens of a group of the longest rows: enough to keep the device busy.
_GROUP_TOKENS = {"cpu": 1024, "cuda": 16384}
_FEWEST_ROWS = 4
_MULTIPLE = 16  # few different shapes, and kernels prefer multiples of 8


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Rows of a micro-batch, from `first` to before `last`, and the tokens that the longest of them has."""

    first: int
    last: int
    length: int

    @property
    def positions(self) -> int:
        return (self.last - self.first) * self.length


def by_length(lengths: np.ndarray, block: int, device: str) -> tuple[np.ndarray, tuple[LengthGroup, ...]]:
    """(the order of rows by length, int64 (rows,); the groups of rows in that order).

    `lengths` (rows,) are in tokens; no row has over `block`. `device` is its type: cpu, cuda.
    """
    order = np.argsort(lengths, kind="stable")
    size = max(_FEWEST_ROWS, _GROUP_TOKENS.get(device, _GROUP_TOKENS["cuda"]) // block)
    groups = []
    for first in range(0, len(order), size):
        last = min(first + size, len(order))
        longest = -(-int(lengths[order[last - 1]]) // _MULTIPLE) * _MULTIPLE
        groups.append(LengthGroup(first, last, min(longest, int(lengths.max()))))
    return order, tuple(groups)
