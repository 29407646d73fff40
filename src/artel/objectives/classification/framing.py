"""Rows of token ids for texts and pairs, with the special tokens that the tokenizer adds for transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from artel.tokens import Frame, Tokenizer


@dataclass(frozen=True, slots=True)
class FramedText:
    """A row of one text or two."""

    ids: np.ndarray
    """int64 (tokens,)."""
    second_start: int
    """Start of the second text; 0 if there is one text."""
    num_truncated: int
    """Number of tokens cut off."""


class Framing:
    """Adds special tokens to texts and pairs, and truncates them to `block` tokens, in pairs the longer text first."""

    def __init__(self, tokenizer: Tokenizer, block: int) -> None:
        self._tokenizer, self._block = tokenizer, block
        self.single = tokenizer.frame(required=False)

    @cached_property
    def pair(self) -> Frame:
        """The special tokens of a pair."""
        return self._tokenizer.frame(pair=True, required=False)

    def frame(self, inputs: Sequence[tuple[str, ...]]) -> Iterator[FramedText]:
        """Yield the row of each input, which is one text or two."""
        encoded = self._tokenizer.encode([text for texts in inputs for text in texts])
        for texts in inputs:
            frame = self.single if len(texts) == 1 else self.pair
            first = next(encoded)
            if len(texts) == 1:
                truncated = first[: self._block - frame.size]
                ids = np.concatenate([frame.before, truncated, frame.after]).astype(np.int64)
                yield FramedText(ids, 0, len(first) - len(truncated))
                continue
            second = next(encoded)
            lengths = longest_first(len(first), len(second), self._block - frame.size)
            prefix = [*frame.before, *first[: lengths[0]], *frame.between]
            ids = np.array([*prefix, *second[: lengths[1]], *frame.after], dtype=np.int64)
            yield FramedText(ids, len(prefix), len(first) + len(second) - sum(lengths))


def longest_first(first: int, second: int, limit: int) -> tuple[int, int]:
    """Return the lengths of two texts cut to `limit` in all, like `longest_first` of `tokenizers`."""
    if first + second <= limit:
        return first, second
    shorter, longer = sorted((first, second))
    longer = max(shorter, limit - shorter)
    if shorter + longer > limit:
        shorter, longer = limit // 2, limit - limit // 2
    return (longer, shorter) if first > second else (shorter, longer)
