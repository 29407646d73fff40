"""Figures of names and of tags, by the definitions of seqeval (Nakayama 2018) and conlleval, over whole documents.

A name is right if its first character, its last and its label are those of a gold one. Precision is the share of right
names among those found, recall among those of the data, f1 their harmonic mean; each is 0 where it has no names. Over
all names together it is the micro average, the mean over labels the macro average; labels are those that occur, in the
data or in what was found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Span = tuple[int, int, str]


@dataclass(slots=True)
class Scores:
    """Counts of names by label."""

    right: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    gold: Counter[str] = field(default_factory=Counter)

    def add(self, gold: Iterable[Span], found: Iterable[Span]) -> None:
        """Count the names of a document."""
        gold, found = set(gold), set(found)
        self.gold.update(label for *_, label in gold)
        self.found.update(label for *_, label in found)
        self.right.update(label for *_, label in gold & found)

    def add_tags(self, gold: Sequence[str], found: Sequence[str]) -> None:
        """Count the words of a document by their tags."""
        self.gold.update(gold)
        self.found.update(found)
        self.right.update(tag for tag, other in zip(gold, found, strict=True) if tag == other)

    @property
    def labels(self) -> list[str]:
        return sorted({*self.gold, *self.found})

    def micro(self) -> dict[str, float]:
        """precision, recall and f1 over all names."""
        return _rates(self.right.total(), self.found.total(), self.gold.total())

    def macro_f1(self) -> float:
        """The mean of the labels' f1."""
        table = self.table()
        return sum(row["f1"] for row in table.values()) / len(table) if table else 0.0

    def table(self) -> dict[str, dict[str, float]]:
        """For each label its precision, recall and f1, and how many of it the data have (`support`)."""
        return {
            label: {**_rates(self.right[label], self.found[label], self.gold[label]), "support": self.gold[label]}
            for label in self.labels
        }

    def averages(self) -> dict[str, dict[str, float]]:
        """micro, macro (the mean over labels) and weighted (by their support), as seqeval's report has them."""
        table, support = self.table(), self.gold.total()
        names = ("precision", "recall", "f1")
        macro = {name: sum(row[name] for row in table.values()) / max(1, len(table)) for name in names}
        weighted = {name: sum(row[name] * row["support"] for row in table.values()) / max(1, support) for name in names}
        rows: dict[str, dict[str, Any]] = {"micro": self.micro(), "macro": macro, "weighted": weighted}
        return {name: {**row, "support": support} for name, row in rows.items()}


def _rates(right: int, found: int, gold: int) -> dict[str, float]:
    precision = right / found if found else 0.0
    recall = right / gold if gold else 0.0
    f1 = 2 * precision * recall / (precision + recall) if right else 0.0
    return {"precision": precision, "recall": recall, "f1": f1}
