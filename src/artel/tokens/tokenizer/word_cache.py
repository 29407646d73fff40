"""Fast encoding for byte-level BPE (GPT-2 and most tokenizers since): `tokenizers` encodes each different word once.

Such a tokenizer splits a text into words by a regular expression and encodes each word by itself. `tokenizers` spends
its time on splitting, because it tracks the origin of each character: 1 MB of prose takes a second. Here Python's
`regex` splits at 12 MB/s, and the tokenizer's own model encodes new words only.
"""

from __future__ import annotations

import sys
import unicodedata
from array import array
from collections.abc import Iterable
from functools import cache
from operator import itemgetter
from typing import Any

import numpy as np
import regex

from artel.tokens.tokenizer.byte_letters import letters_of_bytes

# The pattern of tokenizers' ByteLevel, from GPT-2 (github.com/openai/gpt-2, src/encoder.py).
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The words of longer texts are not all in memory at once.
_HELD_CHARACTERS = 1_000_000
# Limits of the cache, up to 60 MB: different words, and their ids.
_KNOWN_WORDS, _KNOWN_IDS = 200_000, 2_000_000
_LONG = 100  # characters; longer words rarely repeat


class NotCacheable(Exception):
    """A tokenizer that does more than split and encode words. The message says what."""


class WordCache:
    """Encodes texts word by word."""

    def __init__(self, backend: Any, state: dict[str, Any], known_words: int = _KNOWN_WORDS) -> None:
        """`backend`: a tokenizers.Tokenizer; `state`: the same as JSON. Raises NotCacheable."""
        self._pattern = _pattern(state)
        self._known = _Words(backend.model, known_words)

    def encode(self, texts: list[str]) -> list[np.ndarray | None]:
        """Ids of each text, int64 (tokens,); None for a text that `tokenizers` must encode."""
        return [None if _is_doubtful(text) else self._ids(text) for text in texts]

    def _ids(self, text: str) -> np.ndarray | None:
        self._known.shrink()
        pieces: Iterable[str]
        if len(text) <= _HELD_CHARACTERS:
            pieces = self._pattern.findall(text)
        else:
            pieces = map(itemgetter(0), self._pattern.finditer(text))
        numbers = np.fromiter(map(self._known.__getitem__, pieces), np.int64)
        return self._known.ids(numbers, characters=len(text))


class _Words(dict[str, int]):
    """Numbers of words in the order of their appearance. The ids of word n end at `_ends[n]`."""

    def __init__(self, model: Any, most: int) -> None:
        self._model, self._most = model, most
        self._forget()

    def _forget(self) -> None:
        self.clear()
        self._all = array("q")
        self._ends = array("q", [0])
        self._lengths = array("q", [0])

    def shrink(self) -> None:
        if len(self) > self._most or len(self._all) > _KNOWN_IDS:
            self._forget()

    def __missing__(self, word: str) -> int:
        number = len(self._ends)
        self._all.extend(token.id for token in self._model.tokenize(_as_letters(word)))
        self._ends.append(len(self._all))
        self._lengths.append(len(word))
        if len(word) <= _LONG:
            self[word] = number
        return number

    def ids(self, numbers: np.ndarray, *, characters: int) -> np.ndarray | None:
        """The ids of words in order; None where the words do not make up all `characters` of a text."""
        if np.frombuffer(self._lengths, np.int64)[numbers].sum() != characters:
            return None
        ends = np.frombuffer(self._ends, np.int64)
        starts = ends[numbers - 1]
        counts = ends[numbers] - starts
        places = np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        return np.frombuffer(self._all, np.int64)[places]


def _pattern(state: dict[str, Any]) -> Any:
    """The pattern that a tokenizer splits texts by. Raises NotCacheable if it does anything else to them."""
    step = state["pre_tokenizer"] or {}
    steps = step["pretokenizers"] if step.get("type") == "Sequence" else [step]
    pattern = _GPT2
    if len(steps) == 2 and steps[0]["type"] == "Split" and not steps[1].get("use_regex", True):
        split, *steps = steps
        pattern = split["pattern"].get("Regex")
        if pattern is None or split["behavior"] != "Isolated" or split["invert"]:
            raise NotCacheable("it splits texts in another way")
    if state["model"]["type"] != "BPE" or len(steps) != 1 or steps[0].get("type") != "ByteLevel":
        raise NotCacheable("it is no byte-level BPE")
    if state["normalizer"] is not None or steps[0]["add_prefix_space"] or state["model"].get("dropout"):
        raise NotCacheable("it changes texts before it splits them, or splits them at random")
    if not all(token["special"] for token in state["added_tokens"]):
        raise NotCacheable("it has added tokens that are not special")
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise NotCacheable(f"its pattern is unknown to Python: {error}") from None


def _as_letters(word: str) -> str:
    """The bytes of a word as the letters of byte-level tokenizers."""
    return word.encode().decode("latin-1").translate(letters_of_bytes())


def _is_doubtful(text: str) -> bool:
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return bool(np.take(_doubtful(), codes).any())


@cache
def _doubtful() -> np.ndarray:
    """bool (characters,): letters, digits and spaces added to Unicode since 2002, and unassigned characters.

    `regex` and `tokenizers` may know different versions of Unicode, and so disagree on what is a letter.
    """
    doubtful = np.ones(sys.maxunicode + 1, bool)
    old, counted = unicodedata.ucd_3_2_0, regex.compile(r"[\p{L}\p{N}\p{Z}\p{Cn}]")
    characters = "".join(map(chr, range(0x40000)))  # nothing is in use beyond
    doubtful[: len(characters)] = [old.category(character) == "Cn" for character in characters]
    is_counted = np.zeros(len(characters), bool)
    is_counted[[match.start() for match in counted.finditer(characters)]] = True
    doubtful[: len(characters)] &= is_counted
    return doubtful
