"""Texts with spans as windows of tokens, `[CLS] window [SEP]`, and a tag for each word.

A word is a run of letters and digits, a punctuation mark, or a sign of Chinese, Japanese and other scripts that write
no spaces; its first token has its tag, the others none (Devlin et al. 2019, section 5.3). Tokens are located by the
tokenizer's offsets. Windows that are learned do not overlap; those that are judged do, and a word has its tag in the
one where most stands around it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from artel.errors import InputError
from artel.objectives.span_qa.answers import with_marks
from artel.objectives.span_qa.question_windows import window_starts
from artel.objectives.tokens.tag_set import TagSet
from artel.objectives.types import DocumentSamples
from artel.text import Document, Dropped, Rejected, Tagged
from artel.tokens import Encoded, Sample, Tokenizer

Span = tuple[int, int, str]

DOCUMENT, WINDOW = range(2)  # the numbers of a sample: its document in its split, its first token in the document
NO_WORD = 0
"""The flag of a token that is not the first of a word, or is judged in another window; else one more than its tag, or,
of a word without a tag, one more than all tags."""


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a text: the first token of each and its characters, int64 (words,) each."""

    tokens: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def words_of(text: str, encoded: Encoded) -> Words:
    """The words of a text by its tokens, whose offsets may include white space around them."""
    characters = np.array(list(text)) if text else np.empty(0, dtype="<U1")
    is_space = np.char.isspace(characters) if text else np.empty(0, dtype=bool)
    positions = np.arange(len(text))
    following = np.minimum.accumulate(np.where(is_space, len(text), positions)[::-1])[::-1]
    following = np.append(following, len(text))  # the first character at or after a place that is no white space
    before = np.maximum.accumulate(np.where(is_space, 0, positions + 1))
    before = np.insert(before, 0, 0)  # the end of the last character before a place that is none
    starts, ends = following[encoded.starts], before[encoded.ends]
    tokens = np.flatnonzero(starts < ends)
    starts, ends = starts[tokens], ends[tokens]
    reached = np.maximum.accumulate(np.insert(ends, 0, 0))[:-1]
    begins = starts >= reached  # several tokens of one character have the same place
    for token in np.flatnonzero((starts > 0) & (starts == reached)).tolist():
        place = int(starts[token])
        begins[token] = not (_is_letter(text[place - 1]) and _is_letter(text[place]))
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(tokens))[: len(first)] - 1
    ends = np.maximum.accumulate(ends)[last]
    return Words(tokens[first], starts[first], np.array([with_marks(text, end) for end in ends.tolist()], ends.dtype))


def words_of_spans(
    starts: Sequence[int] | np.ndarray, ends: Sequence[int] | np.ndarray, spans: Sequence[Span]
) -> list[tuple[int, int]]:
    """(first, word after the last) of each span: the words with characters in it, but for those of the span before.

    `starts` and `ends` are the words' characters; spans are in order. Where no word is left the two are the same.
    """
    first = np.searchsorted(ends, [start for start, _, _ in spans], side="right")
    stop = np.searchsorted(starts, [end for _, end, _ in spans], side="left")
    first[1:] = np.maximum(first[1:], stop[:-1])
    return list(zip(first.tolist(), stop.tolist(), strict=True))


def _is_letter(character: str) -> bool:
    """True for a letter or digit that continues a word; False for a sign that is a word by itself."""
    if character < "\x80":
        return character.isalnum()
    category = unicodedata.category(character)
    return category[0] in "MN" or (category[0] == "L" and not _stands_alone(character))


# Han, Hiragana, Katakana and their like; Thai, Lao, Khmer and Burmese, which write no spaces either.
_ALONE = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF),
          (0x20000, 0x3FFFF))  # fmt: skip


def _stands_alone(character: str) -> bool:
    return any(first <= ord(character) <= last for first, last in _ALONE)


class Windows:
    def __init__(self, tokenizer: Tokenizer, tags: TagSet, block: int, stride: int | None, nested: str) -> None:
        self.frame = tokenizer.frame()
        self._tokenizer = tokenizer
        self._tags = tags
        self._room = block - self.frame.size
        self._stride = min(stride or max(1, self._room // 2), self._room)
        self._innermost = nested == "innermost"
        self._unlabeled = len(tags.tags) + 1
        self._flag_type = np.uint8 if self._unlabeled < 2**8 else np.uint64

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | Dropped]:
        fields = [document.record.fields for document in documents]
        texts = [tagged.text for tagged in fields if isinstance(tagged, Tagged)]
        for document, encoded in zip(documents, self._tokenizer.encode_with_offsets(texts), strict=True):
            yield self._made(document, encoded)

    def _made(self, document: Document, encoded: Encoded) -> DocumentSamples | Rejected:
        record = document.record
        assert isinstance(record.fields, Tagged)
        text = record.fields.text
        spans = record.fields.spans if self._tags.labels else ()  # before the records have decided the labels
        words = words_of(text, encoded)
        if len(words.tokens) == 0:
            return Rejected(record.origin, "empty", "its text has no token that is a word", record.set_name)
        unknown = next((span for span in spans if span[2] not in self._tags.labels), None)
        if unknown is not None:
            what = f"the span {unknown[0]} to {unknown[1]} is of {unknown[2]!r}, which is not in tokens.labels"
            detail = f"{what}; mend it, or write it there"
            return Rejected(record.origin, "unknown_label", detail, record.set_name)
        flat = without_overlaps(spans, innermost=self._innermost)
        flags, cut = self._flags(words, flat, len(encoded.ids))
        counted = {"overlapping_left_out": len(spans) - len(flat), "cut_words": cut}
        observed = {} if self._tags.of_words else observed_spans(text, spans, len(flat))
        stride = self._room if document.split == "train" else self._stride
        samples = list(self._windows(encoded.ids, words.tokens, flags, stride))
        source: dict[str, Any] | None = None
        if document.split == "validation":
            source = {"text": text, "spans": flat, "starts": words.starts.tolist(), "ends": words.ends.tolist()}
        return DocumentSamples(samples, source, {name: count for name, count in counted.items() if count}, observed)

    def _flags(self, words: Words, spans: Sequence[Span], tokens: int) -> tuple[np.ndarray, int]:
        """(the flags of all tokens; how many spans begin or end within a word, and are learned by whole words).

        A span with none but words of another is not learned, and is counted too.
        """
        outside = self._tags.outside
        tags = np.full(len(words.tokens), self._unlabeled if outside is None else outside + 1, self._flag_type)
        cut = 0
        found = words_of_spans(words.starts, words.ends, spans)
        for (start, end, label), (first, stop) in zip(spans, found, strict=True):
            is_whole = first < stop and words.starts[first] == start and words.ends[stop - 1] == end
            cut += not is_whole
            if first < stop:
                tags[first:stop] = [number + 1 for number in self._tags.ids_of(label, stop - first)]
        flags = np.full(tokens, NO_WORD, self._flag_type)
        flags[words.tokens] = tags
        return flags, cut

    def _windows(self, ids: np.ndarray, words: np.ndarray, flags: np.ndarray, stride: int) -> Iterator[Sample]:
        starts = window_starts(len(ids), self._room, stride)
        owners = window_of_words(words, np.array(starts), self._room, len(ids))
        bounds = np.searchsorted(owners, np.arange(len(starts) + 1))  # words come in order
        before, after = self.frame.before, self.frame.after
        none = [np.full(len(special), NO_WORD, self._flag_type) for special in (before, after)]
        for number, first in enumerate(starts):
            window = ids[first : first + self._room]
            own = np.full(len(window), NO_WORD, self._flag_type)
            mine = words[bounds[number] : bounds[number + 1]]
            own[mine - first] = flags[mine]
            yield Sample(
                np.concatenate([before, window, after]).astype(np.int64),
                np.concatenate([none[0], own, none[1]]),
                (0, first),  # the store counts the documents
            )


def window_of_words(words: np.ndarray, starts: np.ndarray, room: int, tokens: int) -> np.ndarray:
    """The number of the window in which each word is judged, int64 (words,): where most stands around its first token.

    What counts is the shorter side. At the edges of the text nothing is missing. Of two alike the first has it.
    """
    if len(starts) == 1:
        return np.zeros(len(words), dtype=np.int64)
    ends = np.minimum(starts + room, tokens)
    # Of the windows whose right side is the shorter the last has most around a word, of the others the first.
    others = np.searchsorted(starts + ends, 2 * words + 1, side="right").clip(1, len(starts) - 1)
    is_later = words - starts[others] > ends[others - 1] - 1 - words
    return others - 1 + is_later


def without_overlaps(spans: Iterable[Span], *, innermost: bool) -> list[Span]:
    """Of spans that overlap the longest (innermost: the shortest), in order; of two alike the first."""
    kept: list[Span] = []
    for start, end, label in sorted(spans, key=lambda span: (span[1] - span[0]) * (1 if innermost else -1)):
        if all(end <= other[0] or other[1] <= start for other in kept):
            kept.append((start, end, label))
    return sorted(kept)


Span = tuple[int, int, str]

_SCRIPTS = ("LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "GEORGIAN")
"""Scripts whose names stand between spaces or marks. Chinese, Japanese and Thai write no spaces; Korean joins particles
to a name, Hebrew and Arabic prepositions and articles."""
_ENOUGH = 20  # spans, to tell wrong offsets from a few oddities
_LONGEST = 40  # characters that are quoted


def observed_spans(text: str, spans: Sequence[Span], learned: int) -> dict[str, Any]:
    """What `review_spans` is to know of a document, of whose spans so many are learned; empty where it has none."""
    if not spans:
        return {}
    observed: dict[str, Any] = {"spans": len(spans)}
    if learned < len(spans):
        observed["overlapping"] = len(spans) - learned
    cut = [text[start:end] for start, end, _ in spans if _is_within(text, start) or _is_within(text, end)]
    if cut:
        observed |= {"cut": len(cut), "first": cut[0][:_LONGEST]}
    return observed


def review_spans(observed: Iterable[tuple[str, dict[str, Any]]], nested: str) -> list[str]:
    """Sentences about the (origin, `observed_spans`) of all documents; `nested` is tokens.nested.

    Raises InputError where more than half of the spans, of at least 20, begin or end within a word.
    """
    spans = overlapping = cut = 0
    where = first = ""
    for origin, counts in observed:
        spans += counts["spans"]
        overlapping += counts.get("overlapping", 0)
        if "cut" in counts:
            where, first = where or origin, first or counts["first"]
            cut += counts["cut"]
    notes = []
    if overlapping:
        what = f"{overlapping:,} names that overlap others are left out"
        notes.append(f"{what}: the {nested} are learned (tokens.nested)")
    if cut:
        what = f"{cut:,} of {spans:,} spans begin or end within a word, the first"
        if spans >= _ENOUGH and cut > spans / 2:
            fix = "count offsets in characters of the text as it stands there (Python's text[start:end]), not in bytes"
            raise InputError.at(where, f"{what} {first!r}", fix)
        notes.append(f"{what} {where} {first!r}; are offsets counted in characters?")
    return notes


def _is_within(text: str, place: int) -> bool:
    """True if letters of a script that writes spaces stand on both sides of a place."""
    return 0 < place < len(text) and _is_spaced(text[place - 1]) and _is_spaced(text[place])


def _is_spaced(character: str) -> bool:
    return character.isalpha() and unicodedata.name(character, "").startswith(_SCRIPTS)
