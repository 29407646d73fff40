"""The two ways to see a store's part as samples: joined and cut into blocks of equal length, or each as it stands."""

from __future__ import annotations

from artel.tokens.store import Sample, StorePart


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

    def read(self, index: int) -> Sample:
        """ids (length + lookahead,)."""
        return Sample(self.part.read(index * self.length, self.length + self.lookahead))

    def origins(self, index: int) -> list[str]:
        return self.part.origins(index * self.length, (index + 1) * self.length)


class Alone:
    """The samples of a store's part as they stand: pairs, windows, conversations."""

    def __init__(self, part: StorePart) -> None:
        self.part = part

    def __len__(self) -> int:
        return self.part.samples

    def read(self, index: int) -> Sample:
        return self.part.sample(index)

    def origins(self, index: int) -> list[str]:
        return [self.part.origin(index)]
