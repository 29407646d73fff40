"""The two ways to see a store's part as samples: joined and cut into blocks of equal length, or each as it stands."""

from __future__ import annotations

import numpy as np

from artel.tokens.store.store import Sample, StorePart

# The flags of a block's tokens, where it has them: twice the number of the token's document in the block, from 1, and
# this bit where the token may be predicted from the one before it in the block. 0 is filler.
PREDICTED = 1


def document_numbers(flags: np.ndarray) -> np.ndarray:
    """Of a block's flags, in any shape: the number of each token's document in its block, from 1; 0 is filler."""
    return (flags >> 1).astype(np.int64)


def may_be_predicted(flags: np.ndarray) -> np.ndarray:
    """Of a block's flags, in any shape: bool, whether a token may be predicted from the one before it in the block."""
    return (flags & PREDICTED) > 0


class TokenBlocks:
    """The joined blocks of a store's part.

    With `lookahead` 1 a block carries the token after its end, so that each token of the stream but the first is
    predicted exactly once an epoch. The tokens after the last whole block are `left_over`. With `documents` a block's
    flags say where its documents are.
    """

    def __init__(self, part: StorePart, length: int, lookahead: int, *, documents: bool = False) -> None:
        self.part = part
        self.length = length
        self.lookahead = lookahead
        self._count = max(0, (part.tokens - lookahead) // length)
        self.left_over = part.tokens - self._count * length
        self._ends = part.ends() if documents else None

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> Sample:
        """ids (length + lookahead,), and flags of that shape when asked for documents."""
        start, count = index * self.length, self.length + self.lookahead
        ids = self.part.read(start, count)
        if self._ends is None:
            return Sample(ids)
        # As uint64: numpy compares other integers with uint64 by turning all the ends into floats.
        first, last = np.searchsorted(self._ends, np.array([start, start + count], dtype=np.uint64), side="right")
        ends_here = self._ends[first:last].astype(np.int64) - start
        numbers = 1 + np.searchsorted(ends_here, np.arange(count), side="right")
        return Sample(ids, (2 * numbers + PREDICTED).astype(np.uint32))

    def origins(self, index: int) -> list[str]:
        return self.part.origins(index * self.length, (index + 1) * self.length)


class WholeSamples:
    """The samples of a store's part as they stand: pairs, windows, conversations."""

    def __init__(self, part: StorePart) -> None:
        self.part = part

    def __len__(self) -> int:
        return self.part.samples

    def read(self, index: int) -> Sample:
        return self.part.sample(index)

    def origins(self, index: int) -> list[str]:
        return [self.part.origin(index)]
