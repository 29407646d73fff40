"""Documents joined into one stream and cut into blocks of equal length."""

from __future__ import annotations

import numpy as np

from artel.tokens.store import StorePart


class Blocks:
    """The joined blocks of a store's part.

    With `lookahead` 1 a block carries the token after its end, so that each token of the stream but the first is
    predicted exactly once an epoch. The tokens after the last whole block are `left_over`.
    """

    def __init__(self, part: StorePart, length: int, lookahead: int) -> None:
        self.part = part
        self.length = length
        self.lookahead = lookahead
        self._count = max(0, (part.tokens - lookahead) // length)
        self.left_over = part.tokens - self._count * length

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> np.ndarray:
        """Token ids, int64 (length + lookahead,)."""
        return self.part.read(index * self.length, self.length + self.lookahead)

    def origins(self, index: int) -> list[str]:
        """The `file:line` of each document that has tokens in this block."""
        return self.part.origins(index * self.length, (index + 1) * self.length)
