"""Two datasets over a split of a token store: blocks of equal length, or the samples as they are stored."""

from __future__ import annotations

import numpy as np

from artel.tokens.store.store import Sample, StoreSplit

# A token's flags in a block: twice the number of its document in the block, from 1, plus this bit where the token may
# be predicted from the one before it in the block. 0 is padding.
PREDICTED = 1


def document_numbers(flags: np.ndarray) -> np.ndarray:
    """int64: the number of each token's document in its block, from 1; 0 for padding. `flags` have any shape."""
    return (flags >> 1).astype(np.int64)


def may_be_predicted(flags: np.ndarray) -> np.ndarray:
    """bool: whether a token may be predicted from the one before it in the block. `flags` have any shape."""
    return (flags & PREDICTED) > 0


class TokenBlocks:
    """The token stream of a split, cut into blocks of `length` tokens.

    With `lookahead` 1 a block includes the token after its end, so each token of the stream but the first is predicted
    exactly once an epoch. The tokens after the last whole block are `left_over`. With `documents` a block has flags
    that number its documents.
    """

    def __init__(self, split: StoreSplit, length: int, lookahead: int, *, documents: bool = False) -> None:
        self.split = split
        self.length = length
        self.lookahead = lookahead
        self._count = max(0, (split.tokens - lookahead) // length)
        self.left_over = split.tokens - self._count * length
        self._ends = split.ends() if documents else None

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> Sample:
        """ids (length + lookahead,), and flags of that shape with `documents`."""
        start, count = index * self.length, self.length + self.lookahead
        ids = self.split.read(start, count)
        if self._ends is None:
            return Sample(ids)
        # As uint64: to compare other integers with uint64, numpy would convert all ends to floats.
        first, last = np.searchsorted(self._ends, np.array([start, start + count], dtype=np.uint64), side="right")
        block_ends = self._ends[first:last].astype(np.int64) - start
        numbers = 1 + np.searchsorted(block_ends, np.arange(count), side="right")
        return Sample(ids, (2 * numbers + PREDICTED).astype(np.uint32))

    def origins(self, index: int) -> list[str]:
        return self.split.origins(index * self.length, (index + 1) * self.length)


class WholeSamples:
    """The samples of a split as they are stored: pairs, windows, conversations."""

    def __init__(self, split: StoreSplit) -> None:
        self.split = split

    def __len__(self) -> int:
        return self.split.samples

    def read(self, index: int) -> Sample:
        return self.split.sample(index)

    def origins(self, index: int) -> list[str]:
        return [self.split.origin(index)]
