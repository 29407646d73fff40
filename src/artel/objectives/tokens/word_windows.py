"""Texts with spans as windows `[CLS] window [SEP]` with a tag for each word, and checks of the spans.

A word is a run of letters and digits, a punctuation mark, or a character of a script without spaces (Chinese, Japanese,
…). Its first token has its tag, further tokens have none (Devlin et al. 2019, section 5.3). Tokens are located by the
tokenizer's offsets. Training windows do not overlap. Validation windows do: a word is evaluated in the window with
the most context around it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from artel.errors import InputError
from artel.messages import Phrase
from artel.objectives.span_qa.answers import include_combining_marks
from artel.objectives.span_qa.question_windows import window_starts
from artel.objectives.tokens.tag_set import TagSet
from artel.objectives.types import DocumentSamples
from artel.text import Document, DroppedRecord, Rejected, TaggedText
from artel.tokens import Encoding, Sample, Tokenizer

Span = tuple[int, int, str]

DOCUMENT, WINDOW = range(2)  # columns of a sample's numbers: its document in the split, its first token there
NO_WORD = 0
"""The flag of a token that does not begin a word, or is evaluated in another window. Otherwise the flag is 1 + the
tag's id, or 1 + the number of tags for a word without a tag."""


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a text: first tokens and characters [start, end), int64 (words,) each."""

    tokens: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


def find_words(text: str, encoded: Encoding) -> Words:
    """Find the words of a text. Offsets of tokens may include white space."""
    characters = np.array(list(text)) if text else np.empty(0, dtype="<U1")
    is_space = np.char.isspace(characters) if text else np.empty(0, dtype=bool)
    positions = np.arange(len(text))
    following = np.minimum.accumulate(np.where(is_space, len(text), positions)[::-1])[::-1]
    following = np.append(following, len(text))  # first character at or after a position that is not white space
    preceding = np.maximum.accumulate(np.where(is_space, 0, positions + 1))
    preceding = np.insert(preceding, 0, 0)  # end of the last character before a position that is not white space
    starts, ends = following[encoded.starts], preceding[encoded.ends]
    tokens = np.flatnonzero(starts < ends)
    starts, ends = starts[tokens], ends[tokens]
    reached = np.maximum.accumulate(np.insert(ends, 0, 0))[:-1]
    begins_word = starts >= reached  # several tokens of one character have the same offset
    for token in np.flatnonzero((starts > 0) & (starts == reached)).tolist():
        position = int(starts[token])
        begins_word[token] = not (_is_letter(text[position - 1]) and _is_letter(text[position]))
    first = np.flatnonzero(begins_word)
    last = np.append(first[1:], len(tokens))[: len(first)] - 1
    ends = np.maximum.accumulate(ends)[last]
    return Words(
        tokens[first],
        starts[first],
        np.array([include_combining_marks(text, end) for end in ends.tolist()], ends.dtype),
    )


def find_span_words(
    starts: Sequence[int] | np.ndarray, ends: Sequence[int] | np.ndarray, spans: Sequence[Span]
) -> list[tuple[int, int]]:
    """Return the words [first, end) of each span: the words that overlap it but not the previous span.

    `starts` and `ends`: the characters of the words. Spans are in order. first == end if no word is left.
    """
    first_words = np.searchsorted(ends, [start for start, _, _ in spans], side="right")
    end_words = np.searchsorted(starts, [end for _, end, _ in spans], side="left")
    first_words[1:] = np.maximum(first_words[1:], end_words[:-1])
    return list(zip(first_words.tolist(), end_words.tolist(), strict=True))


def _is_letter(character: str) -> bool:
    """True for a letter or digit that continues a word; False for a character that is a word of its own."""
    if character < "\x80":
        return character.isalnum()
    category = unicodedata.category(character)
    is_unspaced = any(first <= ord(character) <= last for first, last in _UNSPACED)
    return category[0] in "MN" or (category[0] == "L" and not is_unspaced)


# Scripts without spaces: Han, Hiragana, Katakana and related; Thai, Lao, Khmer, Burmese.
_UNSPACED = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF),
          (0x20000, 0x3FFFF))  # fmt: skip


class WordWindows:
    """Turns tagged texts into windows."""

    def __init__(self, tokenizer: Tokenizer, tags: TagSet, block: int, nested: str) -> None:
        self.frame = tokenizer.frame()
        self._tokenizer = tokenizer
        self._tags = tags
        self._length = block - self.frame.size
        self._stride = max(1, self._length // 2)
        self._innermost = nested == "innermost"
        self._unlabeled = len(tags.tags) + 1
        self._flag_type = np.uint8 if self._unlabeled < 2**8 else np.uint64

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples | Rejected | DroppedRecord]:
        fields = [document.record.fields for document in documents]
        texts = [tagged.text for tagged in fields if isinstance(tagged, TaggedText)]
        for document, encoded in zip(documents, self._tokenizer.encode_with_offsets(texts), strict=True):
            yield self._convert(document, encoded)

    def _convert(self, document: Document, encoded: Encoding) -> DocumentSamples | Rejected:
        record = document.record
        assert isinstance(record.fields, TaggedText)
        text = record.fields.text
        spans = record.fields.spans if self._tags.labels else ()  # none until the records decide the labels
        words = find_words(text, encoded)
        if len(words.tokens) == 0:
            return Rejected(record.origin, "empty", "its text contains no word", record.set_name)
        unknown = next((span for span in spans if span[2] not in self._tags.labels), None)
        if unknown is not None:
            what = f"the span {unknown[0]} to {unknown[1]} has the label {unknown[2]!r}, which is not in tokens.labels"
            detail = f"{what}; fix it, or add it there"
            return Rejected(record.origin, "unknown_label", detail, record.set_name)
        learned = without_overlaps(spans, innermost=self._innermost)
        flags, num_cut = self._build_flags(words, learned, len(encoded.ids))
        counts = {"overlapping_left_out": len(spans) - len(learned), "cut_words": num_cut}
        observed = {} if self._tags.word_tags else observed_spans(text, spans, len(learned))
        stride = self._length if document.split == "train" else self._stride
        samples = list(self._cut_windows(encoded.ids, words.tokens, flags, stride))
        reference: dict[str, Any] | None = None
        if document.split == "validation":
            reference = {"text": text, "spans": learned, "starts": words.starts.tolist(), "ends": words.ends.tolist()}
        return DocumentSamples(samples, reference, {name: count for name, count in counts.items() if count}, observed)

    def _build_flags(self, words: Words, spans: Sequence[Span], tokens: int) -> tuple[np.ndarray, int]:
        """Return (flags of all tokens, number of spans that begin or end inside a word).

        Spans like that are learned as full words, unless all their words belong to another span.
        """
        outside = self._tags.outside
        tags = np.full(len(words.tokens), self._unlabeled if outside is None else outside + 1, self._flag_type)
        num_cut = 0
        ranges = find_span_words(words.starts, words.ends, spans)
        for (start, end, label), (first, end_word) in zip(spans, ranges, strict=True):
            is_whole = first < end_word and words.starts[first] == start and words.ends[end_word - 1] == end
            num_cut += not is_whole
            if first < end_word:
                tags[first:end_word] = [tag_id + 1 for tag_id in self._tags.tag_ids(label, end_word - first)]
        flags = np.full(tokens, NO_WORD, self._flag_type)
        flags[words.tokens] = tags
        return flags, num_cut

    def _cut_windows(self, ids: np.ndarray, words: np.ndarray, flags: np.ndarray, stride: int) -> Iterator[Sample]:
        starts = window_starts(len(ids), self._length, stride)
        owners = best_windows(words, np.array(starts), self._length, len(ids))
        bounds = np.searchsorted(owners, np.arange(len(starts) + 1))  # words come in order
        before, after = self.frame.before, self.frame.after
        frame_flags = [np.full(len(special), NO_WORD, self._flag_type) for special in (before, after)]
        for window_index, first in enumerate(starts):
            window = ids[first : first + self._length]
            window_flags = np.full(len(window), NO_WORD, self._flag_type)
            window_words = words[bounds[window_index] : bounds[window_index + 1]]
            window_flags[window_words - first] = flags[window_words]
            yield Sample(
                np.concatenate([before, window, after]).astype(np.int64),
                np.concatenate([frame_flags[0], window_flags, frame_flags[1]]),
                (0, first),  # the store counts the documents
            )


def best_windows(words: np.ndarray, starts: np.ndarray, length: int, tokens: int) -> np.ndarray:
    """Return the window with the most context around each word's first token, int64 (words,).

    Context is the number of tokens on the shorter side. The edges of the text do not limit it. Of two equal windows,
    the first is returned.
    """
    if len(starts) == 1:
        return np.zeros(len(words), dtype=np.int64)
    ends = np.minimum(starts + length, tokens)
    # Among windows with a shorter right side, the last has the most context; among all others, the first.
    later = np.searchsorted(starts + ends, 2 * words + 1, side="right").clip(1, len(starts) - 1)
    is_later_better = words - starts[later] > ends[later - 1] - 1 - words
    return later - 1 + is_later_better


def without_overlaps(spans: Iterable[Span], *, innermost: bool) -> list[Span]:
    """Return spans without overlaps, in order. Longer spans win (`innermost`: shorter); ties go to the first."""
    chosen_spans: list[Span] = []
    for start, end, label in sorted(spans, key=lambda span: (span[1] - span[0]) * (1 if innermost else -1)):
        if all(end <= chosen[0] or chosen[1] <= start for chosen in chosen_spans):
            chosen_spans.append((start, end, label))
    return sorted(chosen_spans)


_SCRIPTS = ("LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "GEORGIAN")
"""Scripts in which names are delimited by spaces or punctuation. Chinese, Japanese and Thai have no spaces; Korean
attaches particles to a name, Hebrew and Arabic attach prepositions and articles."""
_MIN_SPANS = 20  # enough spans to distinguish wrong offsets from a few oddities
_MAX_QUOTED = 40  # characters


def observed_spans(text: str, spans: Sequence[Span], learned: int) -> dict[str, Any]:
    """Return the observations about a document for `review_spans`; {} without spans.

    `learned`: number of learned spans.
    """
    if not spans:
        return {}
    observed: dict[str, Any] = {"spans": len(spans)}
    if learned < len(spans):
        observed["overlapping"] = len(spans) - learned
    cut = [text[start:end] for start, end, _ in spans if _is_within(text, start) or _is_within(text, end)]
    if cut:
        observed |= {"cut": len(cut), "first": cut[0][:_MAX_QUOTED]}
    return observed


def review_spans(observed: Iterable[tuple[str, dict[str, Any]]], nested: str) -> list[str]:
    """Return notes about (origin, `observed_spans`) of all documents. `nested`: tokens.nested.

    Offsets counted in bytes, or in another encoding of the text, shift every span. Raise InputError if more than half
    of at least 20 spans begin or end inside a word.
    """
    spans = overlapping = cut = 0
    first_origin = first = ""
    for origin, counts in observed:
        spans += counts["spans"]
        overlapping += counts.get("overlapping", 0)
        if "cut" in counts:
            first_origin, first = first_origin or origin, first or counts["first"]
            cut += counts["cut"]
    notes: list[str] = []
    if overlapping:
        left_out = "{count:,} overlapping names are skipped: the outermost ones are used (tokens.nested)"
        if nested == "innermost":
            left_out = "{count:,} overlapping names are skipped: the innermost ones are used (tokens.nested)"
        notes.append(Phrase(left_out, count=overlapping))
    if cut:
        if spans >= _MIN_SPANS and cut > spans / 2:
            what = f"{cut:,} of {spans:,} spans begin or end within a word, the first {first!r}"
            fix = "count offsets in characters of the text (Python's text[start:end]), not in bytes"
            raise InputError.at(first_origin, what, fix)
        what = (
            "{count:,} of {total:,} spans begin or end within a word, the first {place} {first!r}; are offsets counted "
            "in characters?"
        )
        notes.append(Phrase(what, count=cut, total=spans, place=first_origin, first=first))
    return notes


def _is_within(text: str, position: int) -> bool:
    """True if there are letters of a script with spaces on both sides of a position."""
    return 0 < position < len(text) and _is_spaced(text[position - 1]) and _is_spaced(text[position])


def _is_spaced(character: str) -> bool:
    return character.isalpha() and unicodedata.name(character, "").startswith(_SCRIPTS)
