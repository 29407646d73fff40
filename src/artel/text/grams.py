"""Documents as sets of word n-grams, and how alike two of them are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import itemgetter

import numpy as np
import xxhash
from numpy.typing import NDArray

# A word is a run of letters and digits; case and punctuation are no difference. Kana and Han are written without
# spaces, so each of their characters is a word.
_APART = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[^\W{_APART}]+|[{_APART}]")
# The same of a text that has none of these, at twice the speed.
_ANY_APART = re.compile(f"[{_APART}]")
_PLAIN_WORD = re.compile(r"\w+")
# Of longer texts the words are not held all at once.
_HELD_CHARACTERS = 1_000_000

# Different words remembered with their hashes: 30 to 40 MB.
_KNOWN_WORDS = 200_000


def jaccard(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> float:
    """The similarity of two sorted sets (0 to 1): what they share, of all that is in either."""
    shared = np.intersect1d(first, second, assume_unique=True).size
    return shared / (first.size + second.size - shared)


class Grams:
    """The n-grams of texts, as hashes."""

    def __init__(self, words: int) -> None:
        self._known = _WordHashes()
        # Odd, so that no two words give the same product.
        self._factors = [np.uint64(xxhash.xxh3_64_intdigest(bytes([place])) | 1) for place in range(words)]

    def of(self, text: str) -> NDArray[np.uint64]:
        """The 64-bit hash of each n-gram in its order, repeats and all; empty for texts of fewer words."""
        if len(self._known) > _KNOWN_WORDS:
            self._known.clear()
        text = text.casefold()
        word = _PLAIN_WORD if text.isascii() or not _ANY_APART.search(text) else _WORD
        short = len(text) <= _HELD_CHARACTERS
        words: Iterable[str] = word.findall(text) if short else map(itemgetter(0), word.finditer(text))
        hashes = np.fromiter(map(self._known.__getitem__, words), np.uint64)
        count = hashes.size - len(self._factors) + 1
        if count <= 0:
            return hashes[:0]
        grams = hashes[:count] * self._factors[0]
        for place, factor in enumerate(self._factors[1:], 1):
            grams += hashes[place : place + count] * factor
        return grams


def as_set(grams: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The different n-grams, sorted, by the upper half of their hashes.

    Of n n-grams that another text does not have, n / 2^32 are taken for one of its own by chance: the similarity of
    books of a million words is wrong by 0.0003, that of a page by nothing.
    """
    return np.unique((grams >> np.uint64(32)).astype(np.uint32))


class _WordHashes(dict[str, int]):
    def __missing__(self, word: str) -> int:
        self[word] = found = xxhash.xxh3_64_intdigest(word.encode())
        return found
