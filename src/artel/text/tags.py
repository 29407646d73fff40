"""Tags of words (B-PER, I-PER, O), labeled spans of characters, and records of both.

Tags are read as in conlleval and seqeval. Invalid spans raise BadRecord.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from artel.text.records import BadRecord, Record, TaggedText

OUTSIDE = "O"
BEGIN, INSIDE, END, SINGLE = "B", "I", "E", "S"
_PREFIXES = {"B": BEGIN, "I": INSIDE, "M": INSIDE, "E": END, "L": END, "S": SINGLE, "U": SINGLE}
Span = tuple[int, int, str]
ENTITIES, WORDS = "entities", "words"
"""Kinds of records: entities in a text, or a tag for each word."""
_JOINERS = "\u200d\ufe0e\ufe0f"  # join or follow the parts of one emoji


def split_tag(tag: str) -> tuple[str, str]:
    """Return (prefix of BIOES, type) of a tag. A tag without a prefix continues its type; `O` has the type ""."""
    if tag == OUTSIDE:
        return OUTSIDE, ""
    letter, dash, kind = tag.partition("-")
    return (_PREFIXES[letter], kind) if dash and kind and letter in _PREFIXES else (INSIDE, tag)


def has_prefix(tag: str) -> bool:
    """True for B-PER, L-PER; False for O, PER, NOUN."""
    return split_tag(tag)[1] not in ("", tag)


def find_entities(tags: Sequence[str]) -> list[tuple[int, int, str]]:
    """Return (first word, end word exclusive, type) of each entity in the tags of a sequence.

    One rule reads every scheme, as in conlleval (Tjong Kim Sang and Buchholz 2000) and seqeval by default: an
    entity begins at B and S, and at I and E if no entity of its type is open. So IOB1, IOB2 (BIO), BIOES and BILOU are
    all read correctly, and a malformed sequence gives the most plausible entities.
    """
    entities = []
    start, open_kind = 0, ""
    for index, tag in enumerate([*tags, OUTSIDE]):
        prefix, kind = split_tag(tag)
        is_start = kind != "" and (prefix in (BEGIN, SINGLE) or kind != open_kind)
        if open_kind and (is_start or not kind):
            entities.append((start, index, open_kind))
            open_kind = ""
        if is_start:
            start, open_kind = index, kind
        if open_kind and prefix in (END, SINGLE):
            entities.append((start, index + 1, open_kind))
            open_kind = ""
    return entities


def build_tagged_record(text: str, spans: Iterable[Span], origin: str, set_name: str) -> Record:
    """Return the record of a text with its spans, sorted and without white space at their ends.

    Raise BadRecord if the text is empty or a span is outside it.
    """
    if not text.strip():
        raise BadRecord("empty", "its text is empty; fill it in, or remove it")
    valid_spans = sorted(dict.fromkeys(_check_span(text, span) for span in spans))
    return Record(text, origin, set_name, TaggedText(text, tuple(valid_spans)))


def join_tagged_words(
    words: Sequence[str], tags: Sequence[str], kind: str, spaces: Sequence[bool] | None = None
) -> tuple[str, list[Span]]:
    """Join words by spaces. Return the text and its spans: entities, or for kind `words` each word with its tag.

    `spaces`: for each word, True if a space follows; None if a space follows every word. Raise BadRecord if the
    tags do not fit `kind`.
    """
    tag_without_prefix = next((tag for tag in tags if tag != OUTSIDE and not has_prefix(tag)), None)
    if kind != WORDS and tag_without_prefix is not None and OUTSIDE not in tags:
        what = f"the tag {tag_without_prefix!r} has no B- or I- prefix, and no word is O"
        raise BadRecord("no_prefix", f"{what}; write kind: words in the source if each word has its own tag")
    starts, chunks, end = [], [], 0
    for index, word in enumerate(words):
        if not word.strip():
            raise BadRecord("empty_word", f"word {index} is empty; fill it in, or remove it")
        starts.append(end)
        chunks.append(word)
        if index + 1 < len(words) and (spaces is None or spaces[index]):
            chunks.append(" ")
            end += 1
        end += len(word)
    if kind == WORDS:
        spans = [(start, start + len(word), tag) for start, word, tag in zip(starts, words, tags, strict=True)]
    else:
        spans = [
            (starts[first], starts[end - 1] + len(words[end - 1]), name) for first, end, name in find_entities(tags)
        ]
    return "".join(chunks), spans


def _check_span(text: str, span: Span) -> Span:
    start, end, label = span
    if not label.strip():
        raise BadRecord("no_label", f"the span {start} to {end} has no label; write one, or remove the span")
    if not 0 <= start <= end <= len(text):
        what = f"the span {start} to {end} ({label}) is outside the text of {len(text):,} characters"
        raise BadRecord("span_outside", f"{what}; fix it: characters are counted from 0, the end is not included")
    marked_text = text[start:end]
    if not marked_text.strip():
        what = f"the span {start} to {end} ({label}) is {'white space' if marked_text else 'empty'}"
        raise BadRecord("span_empty", f"{what}; fix it, or remove it")
    for offset in (start, end):
        if 0 < offset < len(text) and _is_continued(text, offset):
            character = text[offset - 1 : offset + 1]
            what = f"the span {start} to {end} ({label}) cuts the character {character!r} at {offset}"
            raise BadRecord("span_cuts_character", f"{what}; fix it: a visible character must not be split")
    return (
        start + len(marked_text) - len(marked_text.lstrip()),
        end - len(marked_text) + len(marked_text.rstrip()),
        label,
    )


def _is_continued(text: str, offset: int) -> bool:
    """True if the character at `offset` belongs to the one before it: an accent, a part of an emoji."""
    return unicodedata.category(text[offset])[0] == "M" or text[offset] in _JOINERS or text[offset - 1] == _JOINERS[0]
