"""Synthetic questions from a seed: a few facts about people, and a question that only the right fact answers."""

from __future__ import annotations

import random
from collections.abc import Iterator

from artel.config import SourceConfig
from artel.text.records import AnswerClass, Question, Record

_PEOPLE = ["Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Henry", "Ivan", "Laura"]
_PLACES = ["river", "forest", "village", "market", "harbour", "mountain", "garden", "station", "library", "bridge"]
_DEEDS = ["sings", "works", "reads", "sleeps", "writes", "waits"]
_OPENING = "news :"  # so that a space stands before every name, and its token is the same in the question
_CLASSES: tuple[AnswerClass, ...] = ("yes", "no", "short", "long", "unknown")


def read_dummy_questions(source: SourceConfig) -> Iterator[Record]:
    """Document i depends on (seed, i) alone."""
    for number in range(source.documents):
        question = _question(f"dummy-{number}", random.Random(f"{source.seed}:{number}"))
        text = f"{question.question}\n{question.context}"
        yield Record(text, f"dummy:{number}", source.name or "dummy", question, group=question.context)


def _question(name: str, chance: random.Random) -> Question:
    """One of the facts is asked about, or, if unknown, one of the same kinds about a person who is not there.

    The kind of question alone never tells the class: each kind is unknown at times, and the moods are mixed.
    """
    people = chance.sample(_PEOPLE, chance.randint(3, 6) + 1)
    absent = people.pop()
    answer_class = chance.choice(_CLASSES)
    asked = chance.randrange(len(people))
    kind = chance.choice(_CLASSES[:4]) if answer_class == "unknown" else answer_class
    facts = [
        _fact(who, kind if place == asked else chance.choice(_CLASSES[:4]), chance) for place, who in enumerate(people)
    ]
    context = " ".join([_OPENING, *facts])
    if answer_class == "unknown":
        return Question(name, _asks(absent, kind), context, (), answer_class)
    start = len(" ".join([_OPENING, *facts[:asked]])) + 1
    end = start + len(facts[asked])
    if kind == "short":
        end -= len(" .")
        start = context.rindex(" ", start, end) + 1
    return Question(name, _asks(people[asked], kind), context, ((start, end),), answer_class)


def _fact(who: str, kind: AnswerClass, chance: random.Random) -> str:
    """A small model learns it soon: the person, who is to be matched, begins the fact, and each has six words."""
    if kind == "short":
        return f"{who} is in the {chance.choice(_PLACES)} ."
    if kind == "long":
        return f"{who} {chance.choice(_DEEDS)} by the {chance.choice(_PLACES)} ."
    return f"{who} is {'happy' if kind == 'yes' else 'sad'} this morning ."


def _asks(who: str, kind: AnswerClass) -> str:
    if kind == "short":
        return f"where is {who} ?"
    if kind == "long":
        return f"what about {who} ?"
    return f"is {who} happy ?"
