"""Where a schoolbook rule puts commas in Russian: the baseline that a comma-restoring model must beat."""

from __future__ import annotations

import re

_WORD = re.compile(r"[^\W\d_]+")
# A comma stands before these when they join clauses, which is nearly always.
_JOINING = frozenset(
    "что чтобы но а если когда где куда откуда хотя пока поскольку словно будто ибо зато чем почему зачем "
    "который которая которое которые которого которой которому которым которых которую которыми котором "
    "чей чья чьё чьи кто как".split()
)
# Before both words, not between them: потому что, так как, для того чтобы.
_FIRST_OF_TWO = {"что": ("потому", "оттого"), "как": ("так", "тогда"), "чтобы": ()}
# These begin a clause only sometimes: a comma before them is wrong more often than right.
_DOUBTFUL = frozenset(["кто", "как", "чем"])


def comma_places(text: str) -> list[int]:
    """Characters of `text` after which the rule puts a comma: the last of the word before a joining word."""
    words = list(_WORD.finditer(text))
    places = []
    for number in range(1, len(words)):
        word, before = words[number][0].lower(), words[number - 1]
        if word not in _JOINING or word in _DOUBTFUL:
            continue
        if before[0].lower() in _FIRST_OF_TWO.get(word, ()):
            if number == 1:
                continue
            before = words[number - 2]
        if text[before.end() : words[number].start()].strip():  # a dash, a full stop: something stands there already
            continue
        places.append(before.end() - 1)
    return places
