"""N-grams of simplified words, as 64-bit hashes.

Texts are simplified as datatrove does (`simplify_text`): lower case, no punctuation, no diacritics (ё is е, é is e), a
0 in place of each number, so that neither typesetting nor other numbers hide a benchmark.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from artel.text.dedup.shingles import SHINGLE_VERSION, Shingler

NGRAM_VERSION = [1, SHINGLE_VERSION]
"""Part of the store's key: n-grams that are hashed in another way cannot be compared."""

_MARKS = re.compile("[\u0300-\u036f]")
_NUMBERS = re.compile(r"\d+(?:[.,]\d+)*")
# As the shingles have them: each character of Kana and Han is a word.
_SINGLE = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_WORDS = re.compile(rf"[{_SINGLE}]|(?:(?![{_SINGLE}])\w)+")


def simplified(text: str) -> str:
    """The text in lower case, without diacritics, with a 0 for each number."""
    decomposed = unicodedata.normalize("NFD", text)
    if decomposed != text or not text.isascii():
        decomposed = _MARKS.sub("", decomposed)
    return _NUMBERS.sub("0", decomposed.casefold())


def simplified_words(text: str) -> list[str]:
    """The words of a simplified text."""
    return _WORDS.findall(simplified(text))


class Ngrams:
    """Hashes of the n-grams of texts."""

    def __init__(self, words: int) -> None:
        self.words = words
        self._ngrams, self._singles = Shingler(words), Shingler(1)

    def of(self, texts: Sequence[str]) -> list[NDArray[np.uint64]]:
        """uint64 (n-grams,) for each text, in order, with repetitions; empty for fewer than `words` words."""
        return self._ngrams.hashes(list(map(simplified, texts)))

    def of_row(self, query: str, label: str, places: Sequence[str]) -> NDArray[np.uint64]:
        """Those of a row that lie in the query, in the label, or across the two (overlap), of the chosen `places`."""
        query, label = simplified(query), simplified(label)
        hashes = self._ngrams.hashes([f"{query}\n{label}"])[0]
        query_words = self._singles.hashes([query])[0].size
        first = np.arange(hashes.size)
        in_query, in_label = first + self.words <= query_words, first >= query_words
        chosen = {"query": in_query, "label": in_label, "overlap": ~(in_query | in_label)}
        return hashes[np.logical_or.reduce([chosen[place] for place in places])]
