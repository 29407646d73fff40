"""From texts and pairs of texts to rows of token ids, framed as the tokenizer frames them for transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from artel.tokens import Frame, Tokenizer


@dataclass(frozen=True, slots=True)
class FramedText:
    """One text or two as a row of a model."""

    ids: np.ndarray
    """int64 (tokens,)."""
    begins: int
    """The position at which the second text begins; 0 if there is one text."""
    cut: int
    """The number of tokens that were cut off."""


class Framing:
    """Frames one text or two; what has over `block` tokens is cut at its end, of a pair the longer text first."""

    def __init__(self, tokenizer: Tokenizer, block: int) -> None:
        self._tokenizer, self._block = tokenizer, block
        self.single = tokenizer.frame(needed=False)

    @cached_property
    def pair(self) -> Frame:
        """The frame of two texts."""
        return self._tokenizer.frame(pair=True, needed=False)

    def frame(self, inputs: Sequence[tuple[str, ...]]) -> Iterator[FramedText]:
        """Each input is one text, or two."""
        encoded = self._tokenizer.encode([text for texts in inputs for text in texts])
        for texts in inputs:
            ids = next(encoded)
            yield self._of_one(ids) if len(texts) == 1 else self._of_two(ids, next(encoded))

    def _of_one(self, ids: np.ndarray) -> FramedText:
        frame = self.single
        kept = ids[: self._block - frame.size]
        framed = np.concatenate([frame.before, kept, frame.after]).astype(np.int64)
        return FramedText(framed, 0, len(ids) - len(kept))

    def _of_two(self, first: np.ndarray, second: np.ndarray) -> FramedText:
        frame = self.pair
        sizes = longest_first(len(first), len(second), self._block - frame.size)
        before = [*frame.before, *first[: sizes[0]], *frame.between]
        framed = np.array([*before, *second[: sizes[1]], *frame.after], dtype=np.int64)
        return FramedText(framed, len(before), len(first) + len(second) - sum(sizes))


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts stay where `room` is for both, as `tokenizers` cuts by `longest_first`."""
    if first + second <= room:
        return first, second
    shorter, longer = sorted((first, second))
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (longer, shorter) if first > second else (shorter, longer)
