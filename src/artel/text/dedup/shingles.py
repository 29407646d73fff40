"""Documents as sets of word n-grams, and how alike two of them are."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

# Counts the ways in which words were hashed: what was hashed in another way is not comparable.
GRAMS = 2

# A word is a run of letters and digits; case and punctuation are no difference. Kana and Han are written without
# spaces, so each of their characters is a word.
_WORDS = re.compile(r"\w+")
_APART = ((0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
_OTHER, _IN_WORD, _WORD = range(3)  # kinds of characters

# Characters looked at in one piece: its arrays, of 8 bytes for a character, stay in a core's cache.
_PIECE = 65_536
# Odd, so that it has an inverse of 64 bits; else any number would do.
_BASE = xxhash.xxh3_64_intdigest(b"base") | 1
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_MIXER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, of Knuth's multiplicative hashing


def jaccard(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> float:
    """The similarity of two sorted sets (0 to 1): what they share, of all that is in either."""
    shared = np.intersect1d(first, second, assume_unique=True).size
    return shared / (first.size + second.size - shared)


def as_set(grams: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The different n-grams, sorted, by the upper half of their hashes.

    Of n n-grams that another text does not have, n / 2^32 are taken for one of its own by chance: the similarity of
    books of a million words is wrong by 0.0003, that of a page by nothing.
    """
    found = np.sort((grams >> np.uint64(32)).astype(np.uint32))
    is_new = np.ones(found.size, bool)
    np.not_equal(found[1:], found[:-1], out=is_new[1:])
    return found[is_new]


class Grams:
    """The n-grams of texts, as hashes."""

    def __init__(self, words: int, piece: int = _PIECE) -> None:
        self._piece = piece
        # Odd, so that no two words give the same product.
        self._factors = [np.uint64(xxhash.xxh3_64_intdigest(bytes([place])) | 1) for place in range(words)]

    def of(self, texts: Sequence[str]) -> list[NDArray[np.uint64]]:
        """Of each text the 64-bit hash of each n-gram in its order, repeats and all; none for texts of fewer words.

        Short texts are best given many at a time: a call costs as much as 2,500 characters.
        """
        folded = [text.casefold() for text in texts]
        places, words = _hashed_words("\n".join(folded), self._piece)
        more = len(self._factors) - 1
        count = max(0, words.size - more)
        grams = words[:count] * self._factors[0]
        for place, factor in enumerate(self._factors[1:], 1):
            grams += words[place : place + count] * factor
        starts = [0, *accumulate(len(text) + 1 for text in folded)]
        firsts = np.searchsorted(places, starts).tolist()  # the number of each text's first word
        return [grams[first : max(first, last - more)] for first, last in pairwise(firsts)]


def _hashed_words(text: str, piece: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Where each word of a text begins, and its hash."""
    places, hashes = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    start, size = 0, piece
    while start < len(text):
        codes = np.frombuffer(text[start : start + size].encode("utf-32-le", "surrogatepass"), np.uint32)
        begins, ends = _words(codes)
        following = start + codes.size
        if following < len(text) and ends.size and ends[-1] == codes.size:  # it may go on in the next piece
            following = start + int(begins[-1])
            begins, ends = begins[:-1], ends[:-1]
        if following == start:  # a word longer than a piece
            size *= 2
            continue
        places.append(begins + start)
        hashes.append(_hashes(codes, begins, ends))
        start, size = following, piece
    return np.concatenate(places), np.concatenate(hashes)


def _words(codes: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each word begins and ends in characters given as numbers."""
    kinds = np.take(_kinds(), codes)
    inside = np.zeros(codes.size + 2, np.int8)
    inside[1:-1] = kinds == _IN_WORD
    steps = np.diff(inside)
    begins, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    alone = np.flatnonzero(kinds == _WORD)
    if alone.size:
        begins, ends = np.sort(np.concatenate([begins, alone])), np.sort(np.concatenate([ends, alone + 1]))
    return begins, ends


def _hashes(codes: NDArray[np.uint32], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Of each word the polynomial of its characters in _BASE, modulo 2^64 (Karp and Rabin 1987), then mixed.

    Taken from running sums over all characters, as a difference of two of them, brought back to the word's begin: so
    that no word is ever a Python string. Mixed, because n-grams are sums of these again.
    """
    powers, inverses = _powers(codes.size)
    sums = np.zeros(codes.size + 1, np.uint64)
    np.cumsum(codes * powers[: codes.size], out=sums[1:])
    found = (sums[ends] - sums[begins]) * inverses[begins]
    found ^= found >> np.uint64(32)
    found *= _MIXER
    found ^= found >> np.uint64(32)
    return found


def _powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """_BASE to the powers from 1 to `count` and more, and those of its inverse."""
    return _powers_of(_PIECE if count <= _PIECE else 1 << (count - 1).bit_length())


@cache
def _powers_of(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    powers = np.cumprod(np.full(count, _BASE, np.uint64), dtype=np.uint64)
    return powers, np.cumprod(np.full(count, _BASE_INVERSE, np.uint64), dtype=np.uint64)


@cache
def _kinds() -> NDArray[np.uint8]:
    """The kind of each character there is: from 0x40000 on are no letters."""
    kinds = np.full(sys.maxunicode + 1, _OTHER, np.uint8)
    for run in _WORDS.finditer("".join(map(chr, range(0x40000)))):
        kinds[run.start() : run.end()] = _IN_WORD
    for first, last in _APART:
        kinds[first : last + 1] = _WORD
    return kinds
