"""The validation split, chosen by a hash of the text. It stays the same when files are added.

With `validation.by: chapter`, all documents of a chapter go into the same split. A chapter begins at a heading. In a
text without headings, a chapter is a number of neighbouring documents.
"""

from __future__ import annotations

import re

import numpy as np
import xxhash
from numpy.typing import NDArray

# Any constant would do. The run's seed is not used, so that runs of all seeds are evaluated on the same texts.
_SEED = 20_261_121
_MAX_HEADING_CHARACTERS = 80
# Longer chapters are divided into runs of this many characters: ten documents of a text that is cut.
_MAX_CHAPTER_CHARACTERS = 40_000
# Without headings a chapter is at most this fraction of the held-out text, so that about the right amount is held out.
_MAX_CHAPTER_FRACTION = 0.25
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


def split_hash(text: str) -> int:
    """Return a 64-bit hash of a cleaned text. Documents with hashes below `data.validation` * 2**64 are held out."""
    return xxhash.xxh3_64_intdigest(text.encode(), seed=_SEED)


def is_held_out(hash_value: int, fraction: float) -> bool:
    """True if a document with this `split_hash` belongs to the validation split."""
    return hash_value < fraction * 2**64


def smallest_fraction(hashes: NDArray[np.uint64], fraction: float) -> float | None:
    """Return the smallest fraction that holds out about `fraction` of the documents, but not none or all; else None."""
    hashes = np.sort(hashes)
    if len(hashes) < 2 or hashes[0] == hashes[-1]:
        return None
    num_held_out = max(1, round(fraction * len(hashes)))
    below_largest = hashes[hashes < hashes[-1]]
    last_held_out = int(hashes[min(num_held_out, len(below_largest)) - 1])
    return float(np.nextafter(last_held_out / 2**64, 1.0))


def is_heading(line: str) -> bool:
    """True if a line begins a chapter: Глава I, ЧАСТЬ ПЕРВАЯ, Chapter 2. A title, IV, # Title."""
    line = line.strip()
    return 0 < len(line) <= _MAX_HEADING_CHARACTERS and _HEADING.match(line) is not None


class Chapters:
    """Assigns the documents of one text, in order, to chapters."""

    def __init__(self, byte_size: int, fraction: float) -> None:
        """`byte_size`: bytes of the text. `fraction`: fraction of the documents that is held out."""
        self._limit_without_headings = min(_MAX_CHAPTER_CHARACTERS, int(_MAX_CHAPTER_FRACTION * fraction * byte_size))
        self._limit = self._limit_without_headings
        self._chapter = ""
        self._num_characters = 0

    def assign_chapter(self, text: str) -> str:
        """Assign the next document to a chapter. Return the first text of the chapter, which identifies it."""
        is_start = is_heading(text.lstrip().partition("\n")[0])
        if is_start:
            self._limit = _MAX_CHAPTER_CHARACTERS
        if is_start or not self._chapter or self._num_characters >= self._limit:
            self._chapter, self._num_characters = text, 0
        self._num_characters += len(text)
        return self._chapter
