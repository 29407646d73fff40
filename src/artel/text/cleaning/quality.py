"""Rules that drop a document because of its text: length, symbols and digits, repetition, filters, language.

The measures of repetition are those of Gopher (Rae et al. 2021, appendix A.1, table A1), as fractions of characters.
The language is identified by py3langid: 140 languages; its model is in the package.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artel.config import CleanConfig
from artel.errors import InputError, missing_extra
from artel.text.records import Question, Record, Tagged

# A share of few words says nothing: one "yes, yes" would be a third of them. Gopher drops shorter documents.
_MIN_WORDS = 50
# Below this probability another language is four times as likely.
_MIN_LANGUAGE_SHARE = 0.2
# Characters counted at a time: 16 MB of memory for a document of any length.
_CHUNK = 1 << 20
# From this length on all repeated n-grams count. Of shorter ones, which repeat in any text, the most frequent counts.
_LONG_NGRAM = 5
_SYMBOL, _DIGIT, _OTHER, _NOTHING = range(4)


def why_dropped(record: Record, rules: CleanConfig) -> str | None:
    """The first rule that drops a cleaned record, by its name in the ledger; None if no rule does.

    Only the minimum length applies to questions and to texts with marked spans. Raises InputError for
    `rules.languages` if py3langid is not installed or does not know one of them.
    """
    text = record.text
    if not text:
        return "empty"
    if len(text) < rules.minimum:
        return "too_short"
    if isinstance(record.fields, Question | Tagged):
        return None
    if rules.maximum is not None and len(text) > rules.maximum:
        return "too_long"
    if any(re.search(pattern, text, re.MULTILINE) for pattern in rules.drop_documents) or (
        rules.keep_documents and not any(re.search(pattern, text, re.MULTILINE) for pattern in rules.keep_documents)
    ):
        return "document_filter"
    return _for_characters(text, rules) or _for_repetition(text, rules) or _for_language(text, rules)


def symbol_and_digit_share(text: str) -> tuple[float, float]:
    """The shares (0 to 1) of symbols, such as punctuation, and of digits among the visible characters of a text."""
    counts = np.zeros(4, dtype=np.int64)
    for start in range(0, len(text), _CHUNK):
        codes = np.frombuffer(text[start : start + _CHUNK].encode("utf-32-le", "surrogatepass"), dtype="<u4")
        counts += np.bincount(_kinds()[codes], minlength=4)
    visible = counts.sum() - counts[_NOTHING]
    return (counts[_SYMBOL] / visible, counts[_DIGIT] / visible) if visible else (0.0, 0.0)


def repeated_share(units: Iterable[str]) -> float:
    """The share (0 to 1) of characters in units (lines, paragraphs) that are equal to an earlier unit.

    White space at the ends of units is ignored.
    """
    seen: set[str] = set()
    total = repeated = 0
    for unit in units:
        unit = unit.strip()
        total += len(unit)
        if unit in seen:
            repeated += len(unit)
        seen.add(unit)
    return repeated / total if total else 0.0


def ngram_shares(words: list[str], lengths: Iterable[int]) -> dict[int, float]:
    """For each n in `lengths`, the share (0 to 1) of the characters of `words` in repeated n-grams of words.

    Below n = 5 only the most frequent n-gram counts (of equally frequent ones the longest, and of these the first), at
    all its positions, if it occurs more than once. From 5 on all n-grams count, at each position after their first. A
    character in two of them counts once. Takes n log n time in the number of words.
    """
    numbers: dict[str, int] = {}
    codes = _mixed(np.array([numbers.setdefault(word, len(numbers)) for word in words], dtype=np.uint64))
    characters = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
    ends = np.concatenate(([0], np.cumsum(characters)))
    shares = {}
    lengths = set(lengths)
    hashes, length = codes, 1
    while length <= max(lengths, default=0) and length <= len(words):
        if length in lengths:
            measure = _repeated_places if length >= _LONG_NGRAM else _most_frequent_places
            places = measure(hashes, ends[length:] - ends[:-length])
            shares[length] = _covered(places, length, characters)
        hashes = _mixed(hashes[:-1]) + codes[length:]
        length += 1
    return {length: shares.get(length, 0.0) for length in sorted(lengths)}


def _for_characters(text: str, rules: CleanConfig) -> str | None:
    if rules.symbols is None and rules.digits is None:
        return None
    symbols, digits = symbol_and_digit_share(text)
    if rules.symbols is not None and symbols > rules.symbols:
        return "symbols"
    return "digits" if rules.digits is not None and digits > rules.digits else None


def _for_repetition(text: str, rules: CleanConfig) -> str | None:
    if rules.repeated_lines is None and rules.repeated_paragraphs is None and not rules.repeated_ngrams:
        return None
    words = text.split()
    if len(words) < _MIN_WORDS:
        return None
    if rules.repeated_lines is not None and repeated_share(text.split("\n")) > rules.repeated_lines:
        return "repeated_lines"
    if rules.repeated_paragraphs is not None and repeated_share(text.split("\n\n")) > rules.repeated_paragraphs:
        return "repeated_paragraphs"
    limits = rules.repeated_ngrams
    if limits and any(share > limits[length] for length, share in ngram_shares(words, limits).items()):
        return "repeated_ngrams"
    return None


def _for_language(text: str, rules: CleanConfig) -> str | None:
    if not rules.languages:
        return None
    share = share_of_languages(text, tuple(rules.languages))
    return "language" if share is not None and share < _MIN_LANGUAGE_SHARE else None


@cache
def _kinds() -> NDArray[np.uint8]:
    """The kind of each code point. Marks count as letters: the vowels of Indian scripts are marks."""
    kinds = {"L": _OTHER, "M": _OTHER, "N": _DIGIT, "Z": _NOTHING, "Cc": _NOTHING, "Cf": _NOTHING}

    def kind(category: str) -> int:
        return kinds.get(category, kinds.get(category[0], _SYMBOL))

    return np.array([kind(unicodedata.category(chr(code))) for code in range(0x110000)], dtype=np.uint8)


def _mixed(codes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 pseudo-random bits for each code. Sums of them collide for n-grams in 3 of 1e8 texts of a million words."""
    codes = (codes + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    codes = (codes ^ (codes >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return codes ^ (codes >> np.uint64(29))


def _repeated_places(hashes: NDArray[np.uint64], _: NDArray[np.int64]) -> NDArray[np.int64]:
    order = np.argsort(hashes, kind="stable")
    return order[1:][hashes[order[1:]] == hashes[order[:-1]]]


def _most_frequent_places(hashes: NDArray[np.uint64], characters: NDArray[np.int64]) -> NDArray[np.int64]:
    _, firsts, counts = np.unique(hashes, return_index=True, return_counts=True)
    if counts.max() < 2:
        return np.empty(0, dtype=np.int64)
    frequent = np.sort(firsts[counts == counts.max()])
    return np.flatnonzero(hashes == hashes[frequent[np.argmax(characters[frequent])]])


def _covered(places: NDArray[np.int64], length: int, characters: NDArray[np.int64]) -> float:
    """The share of characters in the words at each place and after it, `length` words from each."""
    edges = np.zeros(len(characters) + 1, dtype=np.int64)
    np.add.at(edges, places, 1)
    np.add.at(edges, places + length, -1)
    return float(characters[np.cumsum(edges[:-1]) > 0].sum() / characters.sum())


# The language of shorter texts is uncertain: of paragraphs in Russian novels one in ten is taken for Bulgarian or
# Serbian.
_MIN_CHARACTERS = 100
# Characters examined at the start, in the middle and at the end: the first page may be in another language than the
# text, and three pages tell as much as a book.
_PAGE = 1000


def share_of_languages(text: str, languages: tuple[str, ...]) -> float | None:
    """The probability (0 to 1) that a text is in one of the languages (ISO 639 codes: ru, en); None if it is too short.

    Raises InputError at `data.clean.languages` if py3langid is not installed or does not know one of them.
    """
    identifier, known = _identifier()
    unknown = [code for code in languages if code not in known]
    if unknown:
        what = f"{', '.join(unknown)}: no language that can be identified"
        raise InputError.at("data.clean.languages", what, f"write some of: {', '.join(known)}")
    if len(text) < _MIN_CHARACTERS:
        return None
    if len(text) > 3 * _PAGE:
        middle = len(text) // 2 - _PAGE // 2
        text = "\n".join((text[:_PAGE], text[middle : middle + _PAGE], text[-_PAGE:]))
    return sum(share for code, share in identifier.rank(text) if code in languages)


@cache
def _identifier() -> tuple[Any, list[str]]:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise missing_extra("py3langid", "languages", "data.clean.languages") from None
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    return identifier, sorted(identifier.labels)
