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
_CHUNK_CHARACTERS = 65_536
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
    """Hashes the shingles of `words` words in texts, `chunk_characters` characters at a time."""

    def __init__(self, words: int, chunk_characters: int = _CHUNK_CHARACTERS) -> None:
        self._chunk_characters = chunk_characters
        # Odd, so that no two words give the same product.
        self._factors = [np.uint64(xxhash.xxh3_64_intdigest(bytes([index])) | 1) for index in range(words)]

    def hashes(self, texts: Sequence[str]) -> list[NDArray[np.uint64]]:
        """Return the 64-bit hashes of the shingles of each text, in order, with repetitions.

        Pass many short texts at a time: the overhead of a call is the time of 2,500 characters.
        """
        folded_texts = [text.casefold() for text in texts]
        positions, word_hashes = _split_and_hash("\n".join(folded_texts), self._chunk_characters)
        overlap = len(self._factors) - 1
        num_shingles = max(0, word_hashes.size - overlap)
        hashes = word_hashes[:num_shingles] * self._factors[0]
        for index, factor in enumerate(self._factors[1:], 1):
            hashes += word_hashes[index : index + num_shingles] * factor
        starts = [0, *accumulate(len(text) + 1 for text in folded_texts)]
        firsts = np.searchsorted(positions, starts).tolist()  # index of the first word of each text
        return [hashes[first : max(first, last - overlap)] for first, last in pairwise(firsts)]


def _split_and_hash(text: str, chunk_characters: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Return the position of the first character of each word, and the hash of the word."""
    positions, hashes = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
    start, num_characters = 0, chunk_characters
    while start < len(text):
        codes = np.frombuffer(text[start : start + num_characters].encode("utf-32-le", "surrogatepass"), np.uint32)
        starts, ends = _find_words(codes)
        next_start = start + codes.size
        if next_start < len(text) and ends.size and ends[-1] == codes.size:  # the word may continue in the next chunk
            next_start = start + int(starts[-1])
            starts, ends = starts[:-1], ends[:-1]
        if next_start == start:  # a word longer than a chunk
            num_characters *= 2
            continue
        positions.append(starts + start)
        hashes.append(_hash_words(codes, starts, ends))
        start, num_characters = next_start, chunk_characters
    return np.concatenate(positions), np.concatenate(hashes)


def _find_words(codes: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the starts and ends of the words in an array of code points."""
    kinds = np.take(_character_kinds(), codes)
    in_word = np.zeros(codes.size + 2, np.int8)
    in_word[1:-1] = kinds == _IN_WORD
    edges = np.diff(in_word)
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    single = np.flatnonzero(kinds == _WORD)
    if single.size:
        starts, ends = np.sort(np.concatenate([starts, single])), np.sort(np.concatenate([ends, single + 1]))
    return starts, ends


def _hash_words(codes: NDArray[np.uint32], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Hash words: the polynomial of their characters in _BASE, modulo 2^64 (Karp and Rabin 1987), then mixed.

    The polynomial is the difference of two running sums over all characters, times the inverse power of the start of
    the word. So no word becomes a Python string. Mixing is needed because shingle hashes are sums of word hashes.
    """
    powers, inverses = _compute_powers(
        _CHUNK_CHARACTERS if codes.size <= _CHUNK_CHARACTERS else 1 << (codes.size - 1).bit_length()
    )
    sums = np.zeros(codes.size + 1, np.uint64)
    np.cumsum(codes * powers[: codes.size], out=sums[1:])
    hashes = (sums[ends] - sums[starts]) * inverses[starts]
    hashes ^= hashes >> np.uint64(32)
    hashes *= _MIXER
    hashes ^= hashes >> np.uint64(32)
    return hashes


@cache
def _compute_powers(max_power: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the powers of _BASE from 1 to `max_power`, and those of its inverse."""
    powers = np.cumprod(np.full(max_power, _BASE, np.uint64), dtype=np.uint64)
    return powers, np.cumprod(np.full(max_power, _BASE_INVERSE, np.uint64), dtype=np.uint64)


@cache
def _character_kinds() -> NDArray[np.uint8]:
    """Return the kind of each code point. From 0x40000 on there are no letters."""
    kinds = np.full(sys.maxunicode + 1, _OTHER, np.uint8)
    for run in _WORDS.finditer("".join(map(chr, range(0x40000)))):
        kinds[run.start() : run.end()] = _IN_WORD
    for first, last in _SINGLE_CHARACTER_WORDS:
        kinds[first : last + 1] = _WORD
    return kinds
