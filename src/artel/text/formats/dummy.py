"""Synthetic documents from a seed, with structure that a small model can learn: agreement, counting, copying."""

from __future__ import annotations

import random
from collections.abc import Iterator

from artel.config import SourceConfig
from artel.text.formats.dummy_entities import read_dummy_entities
from artel.text.formats.dummy_questions import read_dummy_questions
from artel.text.formats.format import Format
from artel.text.reading.source_file import Items, SourceFile
from artel.text.records import Record

_PLACES = ["river", "forest", "village", "market", "harbour", "mountain", "garden", "station", "library", "bridge"]
_SINGULAR = ["miller", "baker", "farmer", "weaver", "sailor", "teacher", "carpenter", "singer", "doctor", "painter"]
_SINGULAR_VERBS = ["walks", "works", "sings", "waits", "reads", "sleeps", "writes", "listens", "builds", "returns"]
_NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def read_dummy(source: SourceConfig) -> Iterator[Record]:
    """Document i depends only on (seed, i)."""
    for number in range(source.documents):
        chance = random.Random(f"{source.seed}:{number}")
        sentences = [_sentence(chance) for _ in range(chance.randint(1, 12))]
        yield Record(" ".join(sentences), f"dummy:{number}", source.name or "dummy")


def _sentence(chance: random.Random) -> str:
    kind = chance.randrange(3)
    if kind == 0:  # the verb agrees with its subject
        who, does, place = chance.choice(_SINGULAR), chance.choice(_SINGULAR_VERBS), chance.choice(_PLACES)
        if chance.random() < 0.5:
            return f"The {who} {does} by the {place}."
        return f"The {who}s {does[:-1]} by the {place}."
    if kind == 1:  # counting up from a number
        start = chance.randrange(6)
        return f"Count: {', '.join(_NUMBERS[start : start + chance.randint(3, 4)])}."
    word = "".join(chance.choice("abcdefgh") for _ in range(chance.randint(3, 6)))
    return f"Say {word} again: {word}."


def _read(file: SourceFile) -> Items:
    return _READERS.get(file.source.kind, read_dummy)(file.source)


_READERS = {"text": read_dummy, "questions": read_dummy_questions, "entities": read_dummy_entities}
DUMMY = Format(read=_read, yields=tuple(_READERS), has_files=False)
