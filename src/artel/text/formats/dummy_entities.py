"""Synthetic texts with names from a seed: people, places and firms, which their words and what stands before tell."""

from __future__ import annotations

import random
from collections.abc import Iterator

from artel.config import SourceConfig
from artel.text.formats.tagged.spans import tagged_record
from artel.text.records import Record

_FIRST = ["Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Henry", "Ivan", "Laura"]
_LAST = ["Berg", "Stone", "Fisher", "Wood", "Hill", "Lake"]
_PLACES = ["Paris", "New York", "Moscow", "Rome", "Lake Garda", "Oslo"]
_FIRMS = ["Steel", "Paper", "Bread", "Glass"]
_PATTERNS = [
    ("PER", " lives in ", "LOC", "."),
    ("PER", " works for ", "ORG", " in ", "LOC", "."),
    ("ORG", " was sold to ", "ORG", "."),
    ("The train to ", "LOC", " is late."),
    ("PER", ", ", "PER", " and the others wait."),
]


def read_dummy_entities(source: SourceConfig) -> Iterator[Record]:
    """Document i depends only on (seed, i)."""
    for number in range(source.documents):
        chance = random.Random(f"{source.seed}:{number}")
        text, spans = "", []
        for sentence in (chance.choice(_PATTERNS) for _ in range(chance.randint(1, 5))):
            text += " " if text else ""
            for part in sentence:
                name = _name(part, chance)
                if name != part:
                    spans.append((len(text), len(text) + len(name), part))
                text += name
        yield tagged_record(text, spans, f"dummy:{number}", source.name or "dummy")


def _name(part: str, chance: random.Random) -> str:
    """A name of the kind that a part of a pattern stands for, or the part itself."""
    if part == "PER":
        return " ".join([chance.choice(_FIRST), *([chance.choice(_LAST)] if chance.random() < 0.6 else [])])
    if part == "LOC":
        return chance.choice(_PLACES)
    if part == "ORG":
        return f"{chance.choice(_LAST)} {chance.choice(_FIRMS)} Ltd"
    return part
