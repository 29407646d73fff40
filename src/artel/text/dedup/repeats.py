"""Exact repeats of lines or paragraphs, within a document and across documents: the first of equal ones is kept."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Literal

import xxhash

from artel.text.cleaning.rules import without_spare_space

# Shorter units stay wherever they are: a closing brace, "Yes.", a heading are no copies of one another.
_LONG_ENOUGH = 30
_BREAKS = {"line": re.compile(r"(\n)"), "paragraph": re.compile(r"(\n(?:[^\S\n]*\n)+)")}


class RepeatedUnits:
    """Remembers 128 bits of each line or paragraph of 30 characters and more: about 100 bytes of memory for each.

    `earlier` are those of units that stood before all that it is shown.
    """

    def __init__(self, unit: Literal["line", "paragraph"], earlier: Iterable[bytes] = ()) -> None:
        self._unit = unit
        self._earlier = set(earlier)
        self.seen: dict[bytes, None] = {}
        """Those it was shown, in the order of their first places."""

    def without(self, text: str, counted: Counter[str]) -> str:
        """The text without the units that stood before, in it or in an earlier text.

        White space at the ends of units is no difference. Adds the number of those removed to
        `counted["lines_repeated"]` or `["paragraphs_repeated"]`; with them go blank lines over two in a row.
        """
        pieces = _BREAKS[self._unit].split(text)  # units at even places, breaks between them
        kept: list[str] = []
        removed = 0
        for place in range(0, len(pieces), 2):
            unit = pieces[place].strip()
            if len(unit) >= _LONG_ENOUGH and not self._is_new(unit):
                removed += 1
            else:
                kept += [pieces[place - 1] if place else "", pieces[place]]
        if not removed:
            return text
        counted[f"{self._unit}s_repeated"] += removed
        return without_spare_space("".join(kept))

    def _is_new(self, unit: str) -> bool:
        digest = xxhash.xxh3_128_digest(unit.encode())
        if digest in self.seen or digest in self._earlier:
            return False
        self.seen[digest] = None
        return True
