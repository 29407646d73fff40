"""Exact repeats of lines or paragraphs, within a document and across documents: the first of equal ones is kept."""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal

from artel.text.clean import without_spare_space
from artel.text.unique import Unique

# Shorter units stay wherever they are: a closing brace, "Yes.", a heading are no copies of one another.
_LONG_ENOUGH = 30
_BREAKS = {"line": re.compile(r"(\n)"), "paragraph": re.compile(r"(\n(?:[^\S\n]*\n)+)")}


class RepeatedUnits:
    """Remembers each line or paragraph of 30 characters and more: about 100 bytes of memory for each."""

    def __init__(self, unit: Literal["line", "paragraph"]) -> None:
        self._unit = unit
        self._unique = Unique()

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
            if len(unit) >= _LONG_ENOUGH and not self._unique.is_new(unit):
                removed += 1
            else:
                kept += [pieces[place - 1] if place else "", pieces[place]]
        if not removed:
            return text
        counted[f"{self._unit}s_repeated"] += removed
        return without_spare_space("".join(kept))
