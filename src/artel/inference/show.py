"""Samples for people to read: as the model of a run reads them, or as a token store has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from artel.config import RunConfig
from artel.models.targets import IGNORED
from artel.objectives import objective_of
from artel.objectives.base import Reading
from artel.tokens import StorePart, Tokenizer, TokenStore, micro_batches


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that belong together, as text."""

    text: str
    learned: bool
    target: str = ""
    """What is learned, where that is not what is read: the word under a mask."""

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text, "learned": self.learned} | ({"target": self.target} if self.target else {})


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample as text: its pieces in order, each with whether it is learned."""

    number: int
    origin: str
    tokens: int
    learned: int
    """How many of the tokens have a target."""
    pieces: list[Piece]
    name: str = ""
    """Which reading of the sample it is: chosen, rejected, the class of a question's answer."""

    def to_json(self) -> dict[str, Any]:
        pieces = [piece.to_json() for piece in self.pieces]
        named = {"name": self.name} if self.name else {}
        return {"number": self.number, "origin": self.origin, "tokens": self.tokens, **named, "pieces": pieces}


def stored(part: StorePart, number: int, tokenizer: Tokenizer) -> Shown:
    """Sample `number` of a store's part, as it lies there."""
    ids = part.sample(number).ids
    return _shown(Reading(ids, np.full(len(ids), IGNORED)), number, [part.origin(number)], tokenizer)


class ReadSamples:
    """The samples of a run as its model reads them in the first epoch: blocks of text, conversations, windows."""

    def __init__(self, run: RunConfig, store: TokenStore, part: StorePart, tokenizer: Tokenizer) -> None:
        self._objective = objective_of(run, tokenizer)
        self._samples = self._objective.dataset(part)
        self._tokenizer = tokenizer
        self._epoch = 0 if part is store.train else -1

    def __len__(self) -> int:
        return len(self._samples)

    def shown(self, number: int) -> Iterator[Shown]:
        """The readings of a sample: one, or one of each answer."""
        place, epoch = np.array([number]), np.array([self._epoch])
        (rows,) = micro_batches(self._samples, place, epoch, rank=0, world=1, batch=1, size=1)
        for reading in self._objective.readings(rows):
            yield _shown(reading, number, self._samples.origins(number), self._tokenizer)


def _shown(reading: Reading, number: int, origins: list[str], tokenizer: Tokenizer) -> Shown:
    more = f" and {len(origins) - 1} more" if len(origins) > 1 else ""
    ids, targets = reading.ids.tolist(), reading.targets.tolist()
    # Tokens of one kind are decoded together: a character may be several of them.
    kinds = groupby(
        zip(ids, targets, strict=True), key=lambda pair: "" if pair[1] == IGNORED else ("=", ">")[pair[0] != pair[1]]
    )
    pieces = []
    for kind, group in kinds:
        read, learned = zip(*group, strict=True)
        pieces.append(Piece(tokenizer.decode(read), bool(kind), tokenizer.decode(learned) if kind == ">" else ""))
    count = sum(target != IGNORED for target in targets)
    return Shown(number, f"{origins[0]}{more}", len(ids), count, pieces, reading.name)
