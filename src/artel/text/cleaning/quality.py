"""Rules that drop a document because of its text: length, symbols, repetition, filters, language.

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
from artel.text.records import Question, Record, TaggedText

# In a few words fractions are meaningless: one "yes, yes" would be a third. Gopher drops shorter documents.
_MIN_WORDS = 50
# Below this probability another language is four times as likely.
_MIN_LANGUAGE_PROBABILITY = 0.2
# Characters counted at a time: 16 MB of memory for a document of any length.
_CHUNK_CHARACTERS = 1 << 20
# From this length on, all repeated n-grams count. Shorter ones repeat in any text: only the most frequent counts.
_LONG_NGRAM = 5
_SYMBOL, _OTHER, _INVISIBLE = range(3)
# Shorter texts are uncertain: one in ten paragraphs of Russian novels is identified as Bulgarian or Serbian.
_MIN_LANGUAGE_CHARACTERS = 100
# Characters examined at the start, in the middle and at the end. The first page may be in another language, and three
# pages are as reliable as a book.
_PAGE_CHARACTERS = 1000


def drop_reason(record: Record, rules: CleanConfig) -> str | None:
    """Return the ledger name of the first rule that drops a cleaned record; None if no rule does.

    For questions and texts with spans only the minimum length applies. Raise InputError for
    `rules.languages` if py3langid is not installed or does not support one of them.
    """
    text = record.text
    if not text:
        return "empty"
    if len(text) < rules.minimum:
        return "too_short"
    if isinstance(record.fields, Question | TaggedText):
        return None
    if rules.maximum is not None and len(text) > rules.maximum:
        return "too_long"
    if any(re.search(pattern, text, re.MULTILINE) for pattern in rules.drop_documents):
        return "document_filter"
    if rules.symbols is not None and symbol_fraction(text) > rules.symbols:
        return "symbols"
    return _repetition_reason(text, rules) or _language_reason(text, rules)


def symbol_fraction(text: str) -> float:
    """Return the fraction (0 to 1) of symbols (such as punctuation) among the visible characters."""
    counts = np.zeros(3, dtype=np.int64)
    for start in range(0, len(text), _CHUNK_CHARACTERS):
        codes = np.frombuffer(text[start : start + _CHUNK_CHARACTERS].encode("utf-32-le", "surrogatepass"), dtype="<u4")
        counts += np.bincount(_character_kinds()[codes], minlength=3)
    visible = counts.sum() - counts[_INVISIBLE]
    return counts[_SYMBOL] / visible if visible else 0.0


def repeated_fraction(units: Iterable[str]) -> float:
    """Return the fraction (0 to 1) of characters in units (lines, paragraphs) that repeat an earlier unit, stripped."""
    seen: set[str] = set()
    num_characters = num_repeated = 0
    for unit in units:
        unit = unit.strip()
        num_characters += len(unit)
        if unit in seen:
            num_repeated += len(unit)
        seen.add(unit)
    return num_repeated / num_characters if num_characters else 0.0


def ngram_fractions(words: list[str], lengths: Iterable[int]) -> dict[int, float]:
    """Return {n: fraction (0 to 1) of the characters of `words` that are in repeated n-grams}, for each n in `lengths`.

    Below n = 5 only the most frequent n-gram counts, at all its positions, if it occurs more than once (of equally
    frequent ones the longest, then the first). From 5 on all n-grams count, at each position after their first. A
    character in two n-grams counts once. Takes n log n time in the number of words.
    """
    word_ids: dict[str, int] = {}
    codes = _mix_bits(np.array([word_ids.setdefault(word, len(word_ids)) for word in words], dtype=np.uint64))
    characters = np.fromiter(map(len, words), dtype=np.int64, count=len(words))
    ends = np.concatenate(([0], np.cumsum(characters)))
    fractions = {}
    lengths = set(lengths)
    hashes, length = codes, 1
    while length <= max(lengths, default=0) and length <= len(words):
        if length in lengths:
            find_positions = _repeated_positions if length >= _LONG_NGRAM else _most_frequent_positions
            positions = find_positions(hashes, ends[length:] - ends[:-length])
            fractions[length] = _covered_fraction(positions, length, characters)
        hashes = _mix_bits(hashes[:-1]) + codes[length:]
        length += 1
    return {length: fractions.get(length, 0.0) for length in sorted(lengths)}


def _repetition_reason(text: str, rules: CleanConfig) -> str | None:
    if rules.repeated_lines is None and rules.repeated_paragraphs is None and not rules.repeated_ngrams:
        return None
    words = text.split()
    if len(words) < _MIN_WORDS:
        return None
    if rules.repeated_lines is not None and repeated_fraction(text.split("\n")) > rules.repeated_lines:
        return "repeated_lines"
    if rules.repeated_paragraphs is not None and repeated_fraction(text.split("\n\n")) > rules.repeated_paragraphs:
        return "repeated_paragraphs"
    limits = rules.repeated_ngrams
    if limits and any(fraction > limits[length] for length, fraction in ngram_fractions(words, limits).items()):
        return "repeated_ngrams"
    return None


def _language_reason(text: str, rules: CleanConfig) -> str | None:
    if not rules.languages:
        return None
    probability = language_probability(text, tuple(rules.languages))
    return "language" if probability is not None and probability < _MIN_LANGUAGE_PROBABILITY else None


@cache
def _character_kinds() -> NDArray[np.uint8]:
    """Return the kind of each code point. Marks count as letters: the vowels of Indian scripts are marks."""
    kinds = {"L": _OTHER, "M": _OTHER, "N": _OTHER, "Z": _INVISIBLE, "Cc": _INVISIBLE, "Cf": _INVISIBLE}

    def kind(category: str) -> int:
        return kinds.get(category, kinds.get(category[0], _SYMBOL))

    return np.array([kind(unicodedata.category(chr(code))) for code in range(0x110000)], dtype=np.uint8)


def _mix_bits(codes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 pseudo-random bits per code. Their sums collide for n-grams in 3 of 1e8 texts of a million words."""
    codes = (codes + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    codes = (codes ^ (codes >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return codes ^ (codes >> np.uint64(29))


def _repeated_positions(hashes: NDArray[np.uint64], _: NDArray[np.int64]) -> NDArray[np.int64]:
    order = np.argsort(hashes, kind="stable")
    return order[1:][hashes[order[1:]] == hashes[order[:-1]]]


def _most_frequent_positions(hashes: NDArray[np.uint64], characters: NDArray[np.int64]) -> NDArray[np.int64]:
    _, firsts, counts = np.unique(hashes, return_index=True, return_counts=True)
    if counts.max() < 2:
        return np.empty(0, dtype=np.int64)
    frequent = np.sort(firsts[counts == counts.max()])
    return np.flatnonzero(hashes == hashes[frequent[np.argmax(characters[frequent])]])


def _covered_fraction(positions: NDArray[np.int64], length: int, characters: NDArray[np.int64]) -> float:
    """Return the fraction of characters in the words that start at `positions`, `length` words from each."""
    edges = np.zeros(len(characters) + 1, dtype=np.int64)
    np.add.at(edges, positions, 1)
    np.add.at(edges, positions + length, -1)
    return float(characters[np.cumsum(edges[:-1]) > 0].sum() / characters.sum())


def language_probability(text: str, languages: tuple[str, ...], where: str = "data.clean.languages") -> float | None:
    """Return the probability (0 to 1) that a text is in one of `languages` (ISO 639 codes); None if it is too short.

    Raise InputError at `where` if py3langid is not installed or does not know one of them.
    """
    identifier, known_codes = _load_identifier(where)
    unknown_codes = [code for code in languages if code not in known_codes]
    if unknown_codes:
        what = f"{', '.join(unknown_codes)}: unknown language"
        raise InputError.at(where, what, f"use: {', '.join(known_codes)}")
    if len(text) < _MIN_LANGUAGE_CHARACTERS:
        return None
    if len(text) > 3 * _PAGE_CHARACTERS:
        middle = len(text) // 2 - _PAGE_CHARACTERS // 2
        text = "\n".join((text[:_PAGE_CHARACTERS], text[middle : middle + _PAGE_CHARACTERS], text[-_PAGE_CHARACTERS:]))
    return sum(probability for code, probability in identifier.rank(text) if code in languages)


@cache
def _load_identifier(where: str) -> tuple[Any, list[str]]:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise missing_extra("py3langid", "languages", where) from None
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    return identifier, sorted(identifier.labels)
