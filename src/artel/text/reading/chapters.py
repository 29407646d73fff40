"""Chapters of a text that is read as several documents, which stay on one side of the split (`validation.by: chapter`).

A chapter begins at a heading. Where none comes, as in a text without headings, it is so many neighbouring documents.
"""

from __future__ import annotations

import re

_LONGEST_HEADING = 80
# A chapter of more characters is divided, into runs of this many: ten documents of a text that is cut.
_MOST = 40_000
# Without headings a chapter is at most this share of what is held out, so that about that much is.
_SHARE = 0.25

_ORDINALS = (
    "перв|втор|трет|четв[её]рт|пят|шест|седьм|восьм|девят|десят|одиннадцат|двенадцат|последн|"
    "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|the|first|second|third|fourth|last"
)
_HEADING = re.compile(
    rf"#{{1,6}}\s+\S"
    rf"|(?i:глава|часть|книга|том|раздел|песнь|действие|chapter|part|book|volume|section|canto|act)\s+"
    rf"(?:[IVXLCDM]+\b|\d+|(?i:{_ORDINALS}))"
    rf"|(?i:пролог|эпилог|предисловие|послесловие|prologue|epilogue|preface|foreword)[.:]?\s*$"
    rf"|[IVXLC]{{1,8}}\.?\s*$"
)


def is_heading(line: str) -> bool:
    """True for a line that begins a chapter: Глава I, ЧАСТЬ ПЕРВАЯ, Chapter 2. A title, IV, # Title."""
    line = line.strip()
    return 0 < len(line) <= _LONGEST_HEADING and _HEADING.match(line) is not None


class Chapters:
    """The chapters of one text, given its documents in order."""

    def __init__(self, size: int, fraction: float) -> None:
        """`size` is that of the text, in bytes, and `fraction` the share of documents that is held out."""
        self._most_without_headings = min(_MOST, int(_SHARE * fraction * size))
        self._most = self._most_without_headings
        self._chapter = ""
        self._characters = 0

    def chapter_of(self, text: str) -> str:
        """The text that the next document's chapter begins with: equal for all documents of a chapter."""
        begins = is_heading(text.lstrip().partition("\n")[0])
        if begins:
            self._most = _MOST
        if begins or not self._chapter or self._characters >= self._most:
            self._chapter, self._characters = text, 0
        self._characters += len(text)
        return self._chapter
