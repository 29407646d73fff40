"""From the tags of words to names in whole texts: of a split's documents, or of any texts that a model is asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from artel.models.evaluating import evaluating
from artel.objectives.length_groups import batches_by_length
from artel.objectives.tokens.tag_set import TagSet
from artel.objectives.tokens.word_windows import DOCUMENT, NO_WORD, Windows
from artel.objectives.types import Batch, DocumentSamples
from artel.text import Document, Record, Tagged
from artel.text.tags import entities_of
from artel.tokens import Rows, Sample, SampleList, StoreSplit, evaluation_rows

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Tagger(Protocol):
    """What of the objective is needed to ask its model."""

    tags: TagSet

    def batch(self, rows: Rows) -> Batch: ...

    def logits(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor: ...


def predicted_tags(logits: torch.Tensor, words: torch.Tensor, shape: Sequence[int], columns: int) -> torch.Tensor:
    """float32 (rows, columns): the likeliest tag at each of the `words` in flattened rows of `shape`, elsewhere 0."""
    import torch.nn.functional as F

    rows, length = shape
    tags = logits.new_zeros(rows * length)
    tags[words] = logits.argmax(dim=-1).float()
    return F.pad(tags.view(rows, length)[:, :columns], (0, max(0, columns - length)))


def judged_tags(outputs: np.ndarray, split: StoreSplit) -> dict[int, list[int]]:
    """For each document of a split the tags of its words in order, by the outputs (samples, block) of its windows."""
    owners = split.numbers()[: len(outputs), DOCUMENT].tolist()
    tags: dict[int, list[int]] = {}
    for number, owner in enumerate(owners):
        flags = split.sample(number).flags
        assert flags is not None
        judged = outputs[number, : len(flags)][flags != NO_WORD]
        tags.setdefault(owner, []).extend(judged.astype(np.int64).tolist())
    return tags


def commonest_share(split: StoreSplit, samples: int, tags: int) -> float:
    """The share of the commonest of so many tags among the judged words of the first `samples` of a split."""
    counts = np.zeros(tags, dtype=np.int64)
    for number in range(samples):
        flags = split.sample(number).flags
        assert flags is not None
        counts += np.bincount(flags.astype(np.int64), minlength=tags + 2)[1 : tags + 1]  # 0 is no word, the last no tag
    return float(counts.max() / max(1, counts.sum()))


def found_in(
    tags: Sequence[str], starts: Sequence[int], ends: Sequence[int], *, of_words: bool
) -> list[tuple[int, int, str]]:
    """(first word, word after the last, label) of each name, by the tags of the words and their characters.

    Where each word has a tag, pieces of a word (a hyphen, an apostrophe) are one word if they have the same.
    """
    if not of_words:
        return entities_of(tags)
    found: list[tuple[int, int, str]] = []
    for word, tag in enumerate(tags):
        if found and found[-1][2] == tag and ends[word - 1] == starts[word]:
            found[-1] = (found[-1][0], word + 1, tag)
        else:
            found.append((word, word + 1, tag))
    return found


def marked(tags: Sequence[str], *, of_words: bool) -> list[str]:
    """For each token the label of its name, by the tags of words at their first tokens and "" elsewhere."""
    words = [place for place, tag in enumerate(tags) if tag]
    labels = [""] * len(tags)
    names = [(word, word + 1, tags[place]) for word, place in enumerate(words)]
    for first, end, label in names if of_words else entities_of([tags[place] for place in words]):
        stop = words[end] if end < len(words) else words[end - 1] + 1
        labels[words[first] : stop] = [label] * (stop - words[first])
    return labels


def entities_in(objective: Tagger, model: PreTrainedModel, windows: Windows, texts: list[str]) -> list[dict[str, Any]]:
    """The names of each text: {"entities": [{"start", "end", "label", "text", "score"}]}."""
    records = [Record(text, f"text {number}", "", Tagged(text, ())) for number, text in enumerate(texts)]
    made = list(windows.samples([Document(record, "validation") for record in records]))
    documents = [each if isinstance(each, DocumentSamples) else None for each in made]  # a text without words has none
    listed = [sample for document in documents if document for sample in document.samples]
    judged = iter(_judge(objective, model, listed))
    answers = []
    for text, document in zip(texts, documents, strict=True):
        pairs = [next(judged) for _ in document.samples] if document else []
        answers.append({"entities": _entities(objective, text, document, pairs)})
    return answers


def _entities(
    objective: Tagger, text: str, document: DocumentSamples | None, pairs: list[tuple[np.ndarray, np.ndarray]]
) -> list[dict[str, Any]]:
    if document is None or document.source is None:
        return []
    starts, ends = document.source["starts"], document.source["ends"]
    tags = objective.tags.names(np.concatenate([ids for ids, _ in pairs]).tolist())
    shares = np.concatenate([shares for _, shares in pairs])
    return [
        {
            "start": starts[first],
            "end": ends[end - 1],
            "label": label,
            "text": text[starts[first] : ends[end - 1]],
            "score": float(shares[first:end].mean()),
        }
        for first, end, label in found_in(tags, starts, ends, of_words=objective.tags.of_words)
    ]


def _judge(objective: Tagger, model: PreTrainedModel, samples: list[Sample]) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each sample the likeliest tags of its words, and their probabilities. Long ones are run first, together."""

    judged: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    with evaluating(model):
        for numbers in batches_by_length([len(sample.ids) for sample in samples]):
            rows = evaluation_rows(SampleList(samples), np.array(numbers), len(numbers))
            shares = _probabilities(objective, model, objective.batch(rows))
            best = zip(numbers, _by_row(rows, shares.argmax(axis=1)), _by_row(rows, shares.max(axis=1)), strict=True)
            judged |= {number: (tags, share) for number, tags, share in best}
    return [judged[number] for number in range(len(samples))]


def _probabilities(objective: Tagger, model: PreTrainedModel, batch: Batch) -> np.ndarray:
    """float32 (words, tags)."""
    shares: np.ndarray = objective.logits(model, batch.to(model.device)).softmax(dim=-1).cpu().numpy()
    return shares


def _by_row(rows: Rows, values: np.ndarray) -> list[np.ndarray]:
    """What stands for the judged words of all rows, in order, by rows."""
    assert rows.flags is not None
    counts = [np.count_nonzero(flags[:length]) for flags, length in zip(rows.flags, rows.lengths, strict=True)]
    return np.split(values, np.cumsum(counts)[:-1])


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
