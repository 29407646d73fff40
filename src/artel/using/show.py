"""Samples of a token store for people to read."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from artel.tokens import StorePart, Tokenizer


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample as text: its pieces in order, each with whether it is learned."""

    number: int
    origin: str
    tokens: int
    pieces: list[tuple[str, bool]]

    def to_json(self) -> dict[str, Any]:
        pieces = [{"text": text, "learned": learned} for text, learned in self.pieces]
        return {"number": self.number, "origin": self.origin, "tokens": self.tokens, "pieces": pieces}


def shown(part: StorePart, number: int, tokenizer: Tokenizer, has_learned: bool) -> Shown:
    """Sample `number` of a part; with `has_learned` its flags say which tokens are learned."""
    sample = part.sample(number)
    marked = sample.flags if has_learned and sample.flags is not None else [0] * len(sample.ids)
    together = groupby(zip(sample.ids.tolist(), marked, strict=True), key=lambda pair: bool(pair[1]))
    pieces = [(tokenizer.decode(token for token, _ in group), learned) for learned, group in together]
    return Shown(number, part.origin(number), len(sample.ids), pieces)
