"""Shingles (word n-grams) of documents, as hashes, and the similarity of two sets of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

# Part of the store's key: shingles that are hashed in another way cannot be compared.
SHINGLE_VERSION = 2

# A word is a run of letters and digits; case and punctuation are ignored. Kana and Han are written without spaces, so
# that each of their characters is a word.
_WORDS = re.compile(r"\w+")
_SINGLE_CHARACTER_WORDS = ((0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
_OTHER, _IN_WORD, _WORD = range(3)  # kinds of characters

# Characters hashed at a time: the arrays, of 8 bytes per character, stay in a core's cache.
_PIECE = 65_536
# Odd, so that it has an inverse modulo 2^64; any other odd number would do.
_BASE = xxhash.xxh3_64_intdigest(b"base") | 1
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_MIXER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Knuth's multiplicative hashing


def jaccard(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> float:
    """The Jaccard similarity (0 to 1) of two sorted sets: the size of their intersection over that of their union."""
    shared = np.intersect1d(first, second, assume_unique=True).size
    return shared / (first.size + second.size - shared)


def shingle_set(hashes: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The distinct shingles, sorted, by the upper half of their hashes.

    Of n shingles that are not in another text, n / 2^32 collide with one of its own: the similarity of books of a
    million words is wrong by 0.0003, that of pages by nothing.
    """
    sorted_hashes = np.sort((hashes >> np.uint64(32)).astype(np.uint32))
    is_first = np.ones(sorted_hashes.size, bool)
    np.not_equal(sorted_hashes[1:], sorted_hashes[:-1], out=is_first[1:])
    return sorted_hashes[is_first]


class Shingler:
    """Hashes the shingles of `words` words in texts, `piece` characters at a time."""

    def __init__(self, words: int, piece: int = _PIECE) -> None:
        self._piece = piece
        # Odd, so that no two words give the same product.
        self._factors = [np.uint64(xxhash.xxh3_64_intdigest(bytes([place])) | 1) for place in range(words)]

    def hashes(self, texts: Sequence[str]) -> list[NDArray[np.uint64]]:
        """For each text, the 64-bit hashes of its shingles in order, with repetitions; empty for texts of fewer words.

        Short texts are best passed many at a time: a call takes as long as 2,500 characters.
        """
        folded = [text.casefold() for text in texts]
        places, words = _hashed_words("\n".join(folded), self._piece)
        overlap = len(self._factors) - 1
        count = max(0, words.size - overlap)
        hashes = words[:count] * self._factors[0]
        for place, factor in enumerate(self._factors[1:], 1):
            hashes += words[place : place + count] * factor
        starts = [0, *accumulate(len(text) + 1 for text in folded)]
        firsts = np.searchsorted(places, starts).tolist()  # the number of each text's first word
        return [hashes[first : max(first, last - overlap)] for first, last in pairwise(firsts)]


def _hashed_words(text: str, piece: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """The position of each word's first character, and its hash."""
    places, hashes = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    start, size = 0, piece
    while start < len(text):
        codes = np.frombuffer(text[start : start + size].encode("utf-32-le", "surrogatepass"), np.uint32)
        begins, ends = _words(codes)
        following = start + codes.size
        if following < len(text) and ends.size and ends[-1] == codes.size:  # the word may continue in the next piece
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
    """The begin and end of each word among characters given as code points."""
    kinds = np.take(_kinds(), codes)
    inside = np.zeros(codes.size + 2, np.int8)
    inside[1:-1] = kinds == _IN_WORD
    steps = np.diff(inside)
    begins, ends = np.flatnonzero(steps == 1), np.flatnonzero(steps == -1)
    single = np.flatnonzero(kinds == _WORD)
    if single.size:
        begins, ends = np.sort(np.concatenate([begins, single])), np.sort(np.concatenate([ends, single + 1]))
    return begins, ends


def _hashes(codes: NDArray[np.uint32], begins: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The polynomial of each word's characters in _BASE, modulo 2^64 (Karp and Rabin 1987), then mixed.

    It is the difference of two running sums over all characters, times the inverse power of the word's begin, so that
    no word becomes a Python string. It is mixed because shingle hashes are sums of word hashes.
    """
    powers, inverses = _powers(codes.size)
    sums = np.zeros(codes.size + 1, np.uint64)
    np.cumsum(codes * powers[: codes.size], out=sums[1:])
    hashes = (sums[ends] - sums[begins]) * inverses[begins]
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIXER
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """_BASE to the powers from 1 to at least `count`, and those of its inverse."""
    return _powers_of(_PIECE if count <= _PIECE else 1 << (count - 1).bit_length())


@cache
def _powers_of(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    powers = np.cumprod(np.full(count, _BASE, np.uint64), dtype=np.uint64)
    return powers, np.cumprod(np.full(count, _BASE_INVERSE, np.uint64), dtype=np.uint64)


@cache
def _kinds() -> NDArray[np.uint8]:
    """The kind of each code point; from 0x40000 on there are no letters."""
    kinds = np.full(sys.maxunicode + 1, _OTHER, np.uint8)
    for run in _WORDS.finditer("".join(map(chr, range(0x40000)))):
        kinds[run.start() : run.end()] = _IN_WORD
    for first, last in _SINGLE_CHARACTER_WORDS:
        kinds[first : last + 1] = _WORD
    return kinds
