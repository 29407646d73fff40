"""Fast encoding for byte-level BPE (GPT-2 and most later tokenizers): `tokenizers` encodes each unique word once.

Such a tokenizer splits a text into words by a regular expression and encodes the words independently. `tokenizers`
spends most time on splitting, because it tracks the origin of each character: 1 MB of prose takes a second. Here
Python's `regex` splits at 12 MB/s, and the tokenizer's model encodes only new words.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from array import array
from collections.abc import Iterable
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np
import regex

# The pattern of tokenizers' ByteLevel, from GPT-2 (github.com/openai/gpt-2, src/encoder.py).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Longer texts are split lazily, without a list of all words.
_MAX_LISTED_CHARACTERS = 1_000_000
# Limits of the cache, up to 60 MB: unique words, and their ids.
_MAX_WORDS, _MAX_IDS = 200_000, 2_000_000
_MAX_WORD_CHARACTERS = 100  # characters; longer words rarely repeat


class UnsupportedTokenizer(Exception):
    """A tokenizer does more than split and encode words. The message explains it."""


class WordCache:
    """Encodes texts word by word."""

    def __init__(self, backend: Any, state: dict[str, Any], max_words: int = _MAX_WORDS) -> None:
        """`backend`: a tokenizers.Tokenizer. `state`: its JSON. Raise UnsupportedTokenizer for other models."""
        self._pattern = _read_pattern(state)
        self._words = _Words(backend.model, max_words)

    def encode(self, texts: list[str]) -> list[np.ndarray | None]:
        """Return the ids of each text, int64 (tokens,); None for a text that `tokenizers` must encode."""
        return [None if _has_ambiguous_characters(text) else self._encode_words(text) for text in texts]

    def _encode_words(self, text: str) -> np.ndarray | None:
        self._words.shrink()
        pieces: Iterable[str]
        if len(text) <= _MAX_LISTED_CHARACTERS:
            pieces = self._pattern.findall(text)
        else:
            pieces = map(itemgetter(0), self._pattern.finditer(text))
        word_indices = np.fromiter(map(self._words.__getitem__, pieces), np.int64)
        return self._words.ids(word_indices, characters=len(text))


class _Words(dict[str, int]):
    """Numbers words in the order of their appearance. The ids of word n end at `_ends[n]`."""

    def __init__(self, model: Any, max_words: int) -> None:
        self._model, self._max_words = model, max_words
        self._reset()

    def _reset(self) -> None:
        self.clear()
        self._word_ids = array("q")
        self._ends = array("q", [0])
        self._lengths = array("q", [0])

    def shrink(self) -> None:
        if len(self) > self._max_words or len(self._word_ids) > _MAX_IDS:
            self._reset()

    def __missing__(self, word: str) -> int:
        word_index = len(self._ends)
        letters = word.encode().decode("latin-1").translate(byte_letters())
        self._word_ids.extend(token.id for token in self._model.tokenize(letters))
        self._ends.append(len(self._word_ids))
        self._lengths.append(len(word))
        if len(word) <= _MAX_WORD_CHARACTERS:
            self[word] = word_index
        return word_index

    def ids(self, word_indices: np.ndarray, *, characters: int) -> np.ndarray | None:
        """Return the ids of words in order; None if the words do not cover all `characters` of a text."""
        if np.frombuffer(self._lengths, np.int64)[word_indices].sum() != characters:
            return None
        ends = np.frombuffer(self._ends, np.int64)
        starts = ends[word_indices - 1]
        counts = ends[word_indices] - starts
        positions = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        return np.frombuffer(self._word_ids, np.int64)[positions]


def _read_pattern(state: dict[str, Any]) -> Any:
    """Return the pattern by which a tokenizer splits texts. Raise UnsupportedTokenizer if it also changes them."""
    step = state["pre_tokenizer"] or {}
    steps = step["pretokenizers"] if step.get("type") == "Sequence" else [step]
    pattern = _GPT2
    if len(steps) == 2 and steps[0]["type"] == "Split" and not steps[1].get("use_regex", True):
        split, *steps = steps
        pattern = split["pattern"].get("Regex")
        if pattern is None or split["behavior"] != "Isolated" or split["invert"]:
            raise UnsupportedTokenizer("it splits texts in another way")
    if state["model"]["type"] != "BPE" or len(steps) != 1 or steps[0].get("type") != "ByteLevel":
        raise UnsupportedTokenizer("it is not byte-level BPE")
    if state["normalizer"] is not None or steps[0]["add_prefix_space"] or state["model"].get("dropout"):
        raise UnsupportedTokenizer("it changes texts before it splits them, or splits them at random")
    if not all(token["special"] for token in state["added_tokens"]):
        raise UnsupportedTokenizer("it has added tokens that are not special")
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise UnsupportedTokenizer(f"its pattern is unknown to Python: {error}") from None


def _has_ambiguous_characters(text: str) -> bool:
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return bool(np.take(_ambiguous_characters(), codes).any())


@cache
def _ambiguous_characters() -> np.ndarray:
    """Return bool (characters,): True for unassigned characters, and for letters, digits and spaces added since 2002.

    `regex` and `tokenizers` may have different versions of Unicode, and disagree about which characters are letters.
    """
    is_ambiguous = np.ones(sys.maxunicode + 1, bool)
    pattern = regex.compile(r"[\p{L}\p{N}\p{Z}\p{Cn}]")
    characters = "".join(map(chr, range(0x40000)))  # all assigned characters
    is_ambiguous[: len(characters)] = [unicodedata.ucd_3_2_0.category(character) == "Cn" for character in characters]
    matches_pattern = np.zeros(len(characters), bool)
    matches_pattern[[match.start() for match in pattern.finditer(characters)]] = True
    is_ambiguous[: len(characters)] &= matches_pattern
    return is_ambiguous


@cache
def byte_letters() -> dict[int, int]:
    """Return the letter of each byte: itself if printable, else one from 256 on (GPT-2's bytes_to_unicode)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: byte for byte in printable} | {byte: 256 + index for index, byte in enumerate(others)}


def piece_bytes(piece: str) -> bytes | None:
    """Return the bytes of a vocabulary entry in byte letters or as <0xD0>; None for one in plain letters."""
    if match := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(match[1])
    bytes_of_letters = {chr(letter): byte for byte, letter in byte_letters().items()}
    return bytes(bytes_of_letters[letter] for letter in piece) if set(piece) <= bytes_of_letters.keys() else None
