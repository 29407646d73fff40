"""Synthetic records: documents, questions, and texts with names. A small model can learn them."""

from __future__ import annotations

import random
from collections.abc import Iterator

from artel.config import SourceConfig
from artel.text.formats.format import Format
from artel.text.records import AnswerClass, Question, Record
from artel.text.tags import build_tagged_record

_PLACES = ["river", "forest", "village", "market", "harbour", "mountain", "garden", "station", "library", "bridge"]
_VERBS = ["sings", "works", "reads", "sleeps", "writes", "waits"]
_OPENING = "news :"  # every name then follows a space, and is the same token as in the question
_CLASSES: tuple[AnswerClass, ...] = ("yes", "no", "short", "long", "unknown")
_SINGULAR = ["miller", "baker", "farmer", "weaver", "sailor", "teacher", "carpenter", "singer", "doctor", "painter"]
_SINGULAR_VERBS = ["walks", "works", "sings", "waits", "reads", "sleeps", "writes", "listens", "builds", "returns"]
_NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_PEOPLE = ["Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Henry", "Ivan", "Laura"]
_SURNAMES = ["Berg", "Stone", "Fisher", "Wood", "Hill", "Lake"]
_CITIES = ["Paris", "New York", "Moscow", "Rome", "Lake Garda", "Oslo"]
_FIRMS = ["Steel", "Paper", "Bread", "Glass"]
_PATTERNS = [
    ("PER", " lives in ", "LOC", "."),
    ("PER", " works for ", "ORG", " in ", "LOC", "."),
    ("ORG", " was sold to ", "ORG", "."),
    ("The train to ", "LOC", " is late."),
    ("PER", ", ", "PER", " and the others wait."),
]


def read_dummy_entities(source: SourceConfig) -> Iterator[Record]:
    """Yield texts with entities. Text i depends only on i."""
    for index in range(source.documents):
        rng = random.Random(f"0:{index}")
        text, spans = "", []
        for sentence in (rng.choice(_PATTERNS) for _ in range(rng.randint(1, 5))):
            text += " " if text else ""
            for token in sentence:
                name = _fill_placeholder(token, rng)
                if name != token:
                    spans.append((len(text), len(text) + len(name), token))
                text += name
        yield build_tagged_record(text, spans, f"dummy:{index}", source.name or "dummy")


def _fill_placeholder(token: str, rng: random.Random) -> str:
    """Return a random name for a placeholder of a pattern. Other tokens are returned unchanged."""
    if token == "PER":
        return " ".join([rng.choice(_PEOPLE), *([rng.choice(_SURNAMES)] if rng.random() < 0.6 else [])])
    if token == "LOC":
        return rng.choice(_CITIES)
    if token == "ORG":
        return f"{rng.choice(_SURNAMES)} {rng.choice(_FIRMS)} Ltd"
    return token


def read_dummy_questions(source: SourceConfig) -> Iterator[Record]:
    """Yield questions. Question i depends only on i."""
    for index in range(source.documents):
        question = _make_question(f"dummy-{index}", random.Random(f"0:{index}"))
        text = f"{question.question}\n{question.context}"
        yield Record(text, f"dummy:{index}", source.name or "dummy", question, group=question.context)


def _make_question(name: str, rng: random.Random) -> Question:
    """Return a question about one of the facts or, for class unknown, about a person who is not in the text.

    The kind of question does not reveal the class: each kind is sometimes unknown, and the moods are mixed.
    """
    people = rng.sample(_PEOPLE, rng.randint(3, 6) + 1)
    absent = people.pop()
    answer_class = rng.choice(_CLASSES)
    answer_index = rng.randrange(len(people))
    kind = rng.choice(_CLASSES[:4]) if answer_class == "unknown" else answer_class
    facts = [
        _make_fact(person, kind if index == answer_index else rng.choice(_CLASSES[:4]), rng)
        for index, person in enumerate(people)
    ]
    context = " ".join([_OPENING, *facts])
    if answer_class == "unknown":
        return Question(name, _phrase_question(absent, kind), context, (), answer_class)
    start = len(" ".join([_OPENING, *facts[:answer_index]])) + 1
    end = start + len(facts[answer_index])
    if kind == "short":
        end -= len(" .")
        start = context.rindex(" ", start, end) + 1
    return Question(name, _phrase_question(people[answer_index], kind), context, ((start, end),), answer_class)


def _make_fact(person: str, kind: AnswerClass, rng: random.Random) -> str:
    """Return a fact that a small model learns quickly: six words, the person first."""
    if kind == "short":
        return f"{person} is in the {rng.choice(_PLACES)} ."
    if kind == "long":
        return f"{person} {rng.choice(_VERBS)} by the {rng.choice(_PLACES)} ."
    return f"{person} is {'happy' if kind == 'yes' else 'sad'} this morning ."


def _phrase_question(person: str, kind: AnswerClass) -> str:
    if kind == "short":
        return f"where is {person} ?"
    if kind == "long":
        return f"what about {person} ?"
    return f"is {person} happy ?"


def read_dummy(source: SourceConfig) -> Iterator[Record]:
    """Yield documents. Document i depends only on i."""
    for index in range(source.documents):
        rng = random.Random(f"0:{index}")
        sentences = [_make_sentence(rng) for _ in range(rng.randint(1, 12))]
        yield Record(" ".join(sentences), f"dummy:{index}", source.name or "dummy")


def _make_sentence(rng: random.Random) -> str:
    kind = rng.randrange(3)
    if kind == 0:  # the verb agrees with its subject
        noun, verb, place = rng.choice(_SINGULAR), rng.choice(_SINGULAR_VERBS), rng.choice(_PLACES)
        if rng.random() < 0.5:
            return f"The {noun} {verb} by the {place}."
        return f"The {noun}s {verb[:-1]} by the {place}."
    if kind == 1:  # counting up from a number
        start = rng.randrange(6)
        return f"Count: {', '.join(_NUMBERS[start : start + rng.randint(3, 4)])}."
    word = "".join(rng.choice("abcdefgh") for _ in range(rng.randint(3, 6)))
    return f"Say {word} again: {word}."


_READERS = {"text": read_dummy, "questions": read_dummy_questions, "entities": read_dummy_entities}
DUMMY = Format(
    read=lambda file: _READERS.get(file.source.kind, read_dummy)(file.source), yields=tuple(_READERS), has_files=False
)
