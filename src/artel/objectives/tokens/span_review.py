"""Whether the spans of all documents are plausible: names rarely begin or end within a word, or overlap.

Offsets that are counted in bytes, or in another encoding of the text, shift every span, and a model learns them without
an error. A span is taken to cut a word where letters stand on both sides of its beginning or of its end.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from artel.errors import InputError

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
