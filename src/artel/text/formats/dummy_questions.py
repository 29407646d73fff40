"""Synthetic questions from a seed: a few facts about people, and a question that one of the facts answers."""

from __future__ import annotations

import random
from collections.abc import Iterator

from artel.config import SourceConfig
from artel.text.records import AnswerClass, Question, Record

_PEOPLE = ["Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Henry", "Ivan", "Laura"]
_PLACES = ["river", "forest", "village", "market", "harbour", "mountain", "garden", "station", "library", "bridge"]
_DEEDS = ["sings", "works", "reads", "sleeps", "writes", "waits"]
_OPENING = "news :"  # so that every name follows a space, and is the same token as in the question
_CLASSES: tuple[AnswerClass, ...] = ("yes", "no", "short", "long", "unknown")


def read_dummy_questions(source: SourceConfig) -> Iterator[Record]:
    """Document i depends only on (seed, i)."""
    for number in range(source.documents):
        question = _question(f"dummy-{number}", random.Random(f"{source.seed}:{number}"))
        text = f"{question.question}\n{question.context}"
        yield Record(text, f"dummy:{number}", source.name or "dummy", question, group=question.context)


def _question(name: str, chance: random.Random) -> Question:
    """A question about one of the facts or, for the class unknown, about a person who is not in the text.

    The kind of question does not tell the class: each kind is sometimes unknown, and the moods are mixed.
    """
    people = chance.sample(_PEOPLE, chance.randint(3, 6) + 1)
    absent = people.pop()
    answer_class = chance.choice(_CLASSES)
    index = chance.randrange(len(people))
    kind = chance.choice(_CLASSES[:4]) if answer_class == "unknown" else answer_class
    facts = [
        _fact(person, kind if number == index else chance.choice(_CLASSES[:4]), chance)
        for number, person in enumerate(people)
    ]
    context = " ".join([_OPENING, *facts])
    if answer_class == "unknown":
        return Question(name, _question_text(absent, kind), context, (), answer_class)
    start = len(" ".join([_OPENING, *facts[:index]])) + 1
    end = start + len(facts[index])
    if kind == "short":
        end -= len(" .")
        start = context.rindex(" ", start, end) + 1
    return Question(name, _question_text(people[index], kind), context, ((start, end),), answer_class)


def _fact(person: str, kind: AnswerClass, chance: random.Random) -> str:
    """A fact that a small model learns quickly: it begins with the person, and has six words."""
    if kind == "short":
        return f"{person} is in the {chance.choice(_PLACES)} ."
    if kind == "long":
        return f"{person} {chance.choice(_DEEDS)} by the {chance.choice(_PLACES)} ."
    return f"{person} is {'happy' if kind == 'yes' else 'sad'} this morning ."


def _question_text(person: str, kind: AnswerClass) -> str:
    if kind == "short":
        return f"where is {person} ?"
    if kind == "long":
        return f"what about {person} ?"
    return f"is {person} happy ?"
