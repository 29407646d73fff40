"""Exact repeats of lines or paragraphs, within a document and across documents: the first of equal ones is kept."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal

import xxhash

# Shorter units are always kept: a closing brace, "Yes." or a heading are not copies of one another.
_MIN_CHARACTERS = 30
_BREAKS = {"line": re.compile(r"(\n)"), "paragraph": re.compile(r"(\n(?:[^\S\n]*\n)+)")}


class RepeatedUnits:
    """Remembers 128 bits of each line or paragraph of at least 30 characters: about 100 bytes of memory for each.

    `earlier` are digests of units that occurred before all texts passed to `without`.
    """

    def __init__(self, unit: Literal["line", "paragraph"], earlier: Iterable[bytes] = ()) -> None:
        self._unit = unit
        self._earlier = set(earlier)
        self.seen: dict[bytes, None] = {}
        """Digests of the units in the texts, in the order of their first occurrences."""

    def without(self, text: str, changed: Counter[str]) -> str:
        """The text without the units that occurred before, in it or in an earlier text.

        White space at the ends of units is ignored. Adds the number of removed units to `changed["lines_repeated"]` or
        `["paragraphs_repeated"]`. The break before a unit goes with it.
        """
        pieces = _BREAKS[self._unit].split(text)  # units at even indices, breaks between them
        kept: list[str] = []
        removed = 0
        for index in range(0, len(pieces), 2):
            unit = pieces[index].strip()
            if len(unit) >= _MIN_CHARACTERS and not self._is_new(unit):
                removed += 1
            else:
                kept += [pieces[index - 1] if index else "", pieces[index]]
        if not removed:
            return text
        changed[f"{self._unit}s_repeated"] += removed
        text = "".join(kept).rstrip()
        return text.lstrip("\n") if kept and kept[0] else text

    def _is_new(self, unit: str) -> bool:
        digest = xxhash.xxh3_128_digest(unit.encode())
        if digest in self.seen or digest in self._earlier:
            return False
        self.seen[digest] = None
        return True
