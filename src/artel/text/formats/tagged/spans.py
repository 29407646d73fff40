"""From spans of characters, or words with tags, to a record; what cannot be right is a BadRecord."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from artel.text.records import BadRecord, Record, Tagged
from artel.text.tags import OUTSIDE, entities_of, has_prefix

Span = tuple[int, int, str]
ENTITIES, WORDS = "entities", "words"
"""Kinds of records: names in a text; a tag for each word."""

_JOINERS = "\u200d\ufe0e\ufe0f"  # what stands between or behind the parts of one emoji


def tagged_record(text: str, spans: Iterable[Span], origin: str, set_name: str, group: str = "") -> Record:
    """The record of a text with its spans in order, white space at their ends left out. Raises BadRecord."""
    if not text.strip():
        raise BadRecord("empty", "its text is empty; fill it in, or leave it out")
    checked = sorted(dict.fromkeys(_checked(text, span) for span in spans))
    return Record(text, origin, set_name, Tagged(text, tuple(checked)), group)


def tagged_words(
    words: Sequence[str], tags: Sequence[str], kind: str, spaces: Sequence[bool] | None = None
) -> tuple[str, list[Span]]:
    """The text of words joined by spaces, and its spans: entities, or of kind `words` each word with its tag.

    `spaces` tells after which words a space stands; after all, where it is None. Raises BadRecord.
    """
    plain = next((tag for tag in tags if tag != OUTSIDE and not has_prefix(tag)), None)
    if kind != WORDS and plain is not None and OUTSIDE not in tags:
        what = f"the tag {plain!r} has no B- or I-, and no word is O"
        raise BadRecord("no_prefix", f"{what}; write kind: words in the source if each word has a tag of its own")
    starts, pieces, at = [], [], 0
    for number, word in enumerate(words):
        if not word.strip():
            raise BadRecord("empty_word", f"word {number} is empty; write what stands there, or leave it out")
        starts.append(at)
        pieces.append(word)
        if number + 1 < len(words) and (spaces is None or spaces[number]):
            pieces.append(" ")
            at += 1
        at += len(word)
    if kind == WORDS:
        spans = [(start, start + len(word), tag) for start, word, tag in zip(starts, words, tags, strict=True)]
    else:
        spans = [(starts[first], starts[end - 1] + len(words[end - 1]), name) for first, end, name in entities_of(tags)]
    return "".join(pieces), spans


def _checked(text: str, span: Span) -> Span:
    start, end, label = span
    if not label.strip():
        raise BadRecord("no_label", f"the span {start} to {end} has no label; write one, or leave the span out")
    if not 0 <= start <= end <= len(text):
        what = f"the span {start} to {end} ({label}) is no part of the text, which has {len(text):,} characters"
        raise BadRecord("span_outside", f"{what}; mend it: characters are counted from 0, the end is not included")
    piece = text[start:end]
    if not piece.strip():
        what = f"the span {start} to {end} ({label}) is {'white space' if piece else 'empty'}"
        raise BadRecord("span_empty", f"{what}; mend it, or leave it out")
    for place in (start, end):
        if 0 < place < len(text) and _is_continued(text, place):
            what = f"the span {start} to {end} ({label}) cuts the character {text[place - 1 : place + 1]!r} at {place}"
            raise BadRecord("span_cuts_character", f"{what}; mend it: what is one character to a reader stays whole")
    return start + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip()), label


def _is_continued(text: str, place: int) -> bool:
    """True if the character at `place` is a part of the one before it: an accent, a part of an emoji."""
    return unicodedata.category(text[place])[0] == "M" or text[place] in _JOINERS or text[place - 1] == _JOINERS[0]
