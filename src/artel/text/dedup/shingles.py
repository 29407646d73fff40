"""Shingles (word n-grams) of documents as hashes, and the similarity of two sets of shingles."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

# Part of the store key: increase it when shingles are hashed in another way.
SHINGLE_VERSION = 2

# A word is a run of letters and digits; case and punctuation are ignored. Kana and Han are written without spaces,
# so each of their characters is a word.
_WORDS = re.compile(r"\w+")
_SINGLE_CHARACTER_WORDS = ((0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
_OTHER, _IN_WORD, _WORD = range(3)  # kinds of characters

# Characters hashed at a time: the arrays, of 8 bytes per character, stay in a core's cache.
_CHUNK = 65_536
# Odd, so that it has an inverse modulo 2^64; any other odd number would do.
_BASE = xxhash.xxh3_64_intdigest(b"base") | 1
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_MIXER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: Knuth's multiplicative hashing


def jaccard(first: NDArray[np.uint32], second: NDArray[np.uint32]) -> float:
    """Return the Jaccard similarity (0 to 1) of two sorted sets: size of the intersection over size of the union."""
    shared = np.intersect1d(first, second, assume_unique=True).size
    return shared / (first.size + second.size - shared)


def shingle_set(hashes: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return the distinct shingles, sorted, as the upper halves of their hashes.

    Of n shingles that are not in a text, n / 2^32 collide with one of its shingles: the error of the similarity is
    0.0003 for books of a million words, and negligible for pages.
    """
    sorted_hashes = np.sort((hashes >> np.uint64(32)).astype(np.uint32))
    is_first = np.ones(sorted_hashes.size, bool)
    np.not_equal(sorted_hashes[1:], sorted_hashes[:-1], out=is_first[1:])
    return sorted_hashes[is_first]


class Shingler:
    """Hashes the shingles of `words` words in texts, `chunk` characters at a time."""

    def __init__(self, words: int, chunk: int = _CHUNK) -> None:
        self._chunk = chunk
        # Odd, so that no two words give the same product.
        self._factors = [np.uint64(xxhash.xxh3_64_intdigest(bytes([index])) | 1) for index in range(words)]

    def hashes(self, texts: Sequence[str]) -> list[NDArray[np.uint64]]:
        """Return the 64-bit hashes of the shingles of each text, in order, with repetitions.

        Pass many short texts at a time: the overhead of a call is the time of 2,500 characters.
        """
        folded = [text.casefold() for text in texts]
        positions, words = _hashed_words("\n".join(folded), self._chunk)
        overlap = len(self._factors) - 1
        count = max(0, words.size - overlap)
        hashes = words[:count] * self._factors[0]
        for index, factor in enumerate(self._factors[1:], 1):
            hashes += words[index : index + count] * factor
        starts = [0, *accumulate(len(text) + 1 for text in folded)]
        firsts = np.searchsorted(positions, starts).tolist()  # index of the first word of each text
        return [hashes[first : max(first, last - overlap)] for first, last in pairwise(firsts)]


def _hashed_words(text: str, chunk: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the position of the first character of each word, and the hash of the word."""
    positions, hashes = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    start, size = 0, chunk
    while start < len(text):
        codes = np.frombuffer(text[start : start + size].encode("utf-32-le", "surrogatepass"), np.uint32)
        begins, ends = _words(codes)
        following = start + codes.size
        if following < len(text) and ends.size and ends[-1] == codes.size:  # the word may continue in the next chunk
            following = start + int(begins[-1])
            begins, ends = begins[:-1], ends[:-1]
        if following == start:  # a word longer than a chunk
            size *= 2
            continue
        positions.append(begins + start)
        hashes.append(_hashes(codes, begins, ends))
        start, size = following, chunk
    return np.concatenate(positions), np.concatenate(hashes)


def _words(codes: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the starts and ends of the words in an array of code points."""
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
    """Hash words: the polynomial of their characters in _BASE, modulo 2^64 (Karp and Rabin 1987), then mixed.

    The polynomial is the difference of two running sums over all characters, times the inverse power of the start of
    the word. So no word becomes a Python string. Mixing is needed because shingle hashes are sums of word hashes.
    """
    powers, inverses = _powers(_CHUNK if codes.size <= _CHUNK else 1 << (codes.size - 1).bit_length())
    sums = np.zeros(codes.size + 1, np.uint64)
    np.cumsum(codes * powers[: codes.size], out=sums[1:])
    hashes = (sums[ends] - sums[begins]) * inverses[begins]
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIXER
    hashes ^= hashes >> np.uint64(32)
    return hashes


@cache
def _powers(count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the powers of _BASE from 1 to `count`, and those of its inverse."""
    powers = np.cumprod(np.full(count, _BASE, np.uint64), dtype=np.uint64)
    return powers, np.cumprod(np.full(count, _BASE_INVERSE, np.uint64), dtype=np.uint64)


@cache
def _kinds() -> NDArray[np.uint8]:
    """Return the kind of each code point. From 0x40000 on there are no letters."""
    kinds = np.full(sys.maxunicode + 1, _OTHER, np.uint8)
    for run in _WORDS.finditer("".join(map(chr, range(0x40000)))):
        kinds[run.start() : run.end()] = _IN_WORD
    for first, last in _SINGLE_CHARACTER_WORDS:
        kinds[first : last + 1] = _WORD
    return kinds
