"""Turns tags of words into entities of full texts, and scores them.

Scores follow seqeval (Nakayama 2018) and conlleval, over full documents. A name is correct if its first character, last
character and label equal those of a gold name. Precision, recall and f1 are 0 without names. micro averages over all
names, macro over labels that occur in the data or in predictions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from artel.models import evaluation_mode
from artel.objectives.length_groups import batches_by_length
from artel.objectives.statistics import precision_recall_f1
from artel.objectives.tokens.tag_set import TagSet
from artel.objectives.tokens.word_windows import DOCUMENT, NO_WORD, WordWindows
from artel.objectives.types import Batch, DocumentSamples
from artel.text import Document, Record, TaggedText
from artel.text.tags import find_entities
from artel.tokens import Rows, Sample, SampleList, StoreSplit, evaluation_rows

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Tagger(Protocol):
    """The methods of the objective that `predict_entities` uses."""

    tags: TagSet

    def batch(self, rows: Rows) -> Batch: ...

    def logits(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor: ...


def predicted_tags(logits: torch.Tensor, words: torch.Tensor, shape: Sequence[int], columns: int) -> torch.Tensor:
    """Return the likeliest tag at the `words` in flattened rows of `shape`, 0 elsewhere; float32 (rows, columns)."""
    import torch.nn.functional as F

    rows, length = shape
    tags = logits.new_zeros(rows * length)
    tags[words] = logits.argmax(dim=-1).float()
    return F.pad(tags.view(rows, length)[:, :columns], (0, max(0, columns - length)))


def document_tags(outputs: np.ndarray, split: StoreSplit) -> dict[int, list[int]]:
    """Return the tags of the words of each document of a split, from the outputs (samples, block) of its windows."""
    owners = split.numbers()[: len(outputs), DOCUMENT].tolist()
    tags: dict[int, list[int]] = {}
    for index, owner in enumerate(owners):
        flags = split.sample(index).flags
        assert flags is not None
        window_tags = outputs[index, : len(flags)][flags != NO_WORD]
        tags.setdefault(owner, []).extend(window_tags.astype(np.int64).tolist())
    return tags


def most_common_fraction(split: StoreSplit, samples: int, tags: int) -> float:
    """Return the fraction of the commonest tag among the labeled words of the first `samples` of a split."""
    counts = np.zeros(tags, dtype=np.int64)
    for index in range(samples):
        flags = split.sample(index).flags
        assert flags is not None
        counts += np.bincount(flags.astype(np.int64), minlength=tags + 2)[
            1 : tags + 1
        ]  # without flag 0 (no word) and the last (no tag)
    return float(counts.max() / max(1, counts.sum()))


def entity_words(
    tags: Sequence[str], starts: Sequence[int], ends: Sequence[int], *, word_tags: bool
) -> list[tuple[int, int, str]]:
    """Return the words [first, end) and the label of each name, from the words' tags and characters.

    If every word has a tag, adjacent pieces of a word (around a hyphen or apostrophe) with the same tag are joined.
    """
    if not word_tags:
        return find_entities(tags)
    words: list[tuple[int, int, str]] = []
    for word, tag in enumerate(tags):
        if words and words[-1][2] == tag and ends[word - 1] == starts[word]:
            words[-1] = (words[-1][0], word + 1, tag)
        else:
            words.append((word, word + 1, tag))
    return words


def token_labels(tags: Sequence[str], *, word_tags: bool) -> list[str]:
    """Return the label of each token's name, from the tags of words at their first tokens, "" elsewhere."""
    words = [token for token, tag in enumerate(tags) if tag]
    labels = [""] * len(tags)
    word_labels = [(word, word + 1, tags[token]) for word, token in enumerate(words)]
    for first, end, label in word_labels if word_tags else find_entities([tags[token] for token in words]):
        end_token = words[end] if end < len(words) else words[end - 1] + 1
        labels[words[first] : end_token] = [label] * (end_token - words[first])
    return labels


def predict_entities(
    objective: Tagger, model: PreTrainedModel, windows: WordWindows, texts: list[str]
) -> list[dict[str, Any]]:
    """Return the names of each text: {"entities": [{"start", "end", "label", "text", "score"}]}."""
    records = [Record(text, f"text {index}", "", TaggedText(text, ())) for index, text in enumerate(texts)]
    results = windows.samples([Document(record, "validation") for record in records])
    documents = [result if isinstance(result, DocumentSamples) else None for result in results]  # None: no words
    samples = [sample for document in documents if document for sample in document.samples]
    predictions = iter(_predict_tags(objective, model, samples))
    answers = []
    for text, document in zip(texts, documents, strict=True):
        predicted = [next(predictions) for _ in document.samples] if document else []
        answers.append({"entities": _join_entities(objective, text, document, predicted)})
    return answers


def _join_entities(
    objective: Tagger, text: str, document: DocumentSamples | None, predicted: list[tuple[np.ndarray, np.ndarray]]
) -> list[dict[str, Any]]:
    if document is None or document.reference is None:
        return []
    starts, ends = document.reference["starts"], document.reference["ends"]
    tags = objective.tags.names(np.concatenate([ids for ids, _ in predicted]).tolist())
    scores = np.concatenate([scores for _, scores in predicted])
    return [
        {
            "start": starts[first],
            "end": ends[end - 1],
            "label": label,
            "text": text[starts[first] : ends[end - 1]],
            "score": float(scores[first:end].mean()),
        }
        for first, end, label in entity_words(tags, starts, ends, word_tags=objective.tags.word_tags)
    ]


def _predict_tags(
    objective: Tagger, model: PreTrainedModel, samples: list[Sample]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the likeliest tags of each sample's words, and their probabilities."""
    tags_and_scores: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    with evaluation_mode(model):
        for indices in batches_by_length([len(sample.ids) for sample in samples]):
            rows = evaluation_rows(SampleList(samples), np.array(indices), len(indices))
            chances = objective.logits(model, objective.batch(rows).to(model.device)).softmax(dim=-1).cpu().numpy()
            best = zip(
                indices,
                _split_by_row(rows, chances.argmax(axis=1)),
                _split_by_row(rows, chances.max(axis=1)),
                strict=True,
            )
            tags_and_scores |= {index: (tags, scores) for index, tags, scores in best}
    return [tags_and_scores[index] for index in range(len(samples))]


def _split_by_row(rows: Rows, values: np.ndarray) -> list[np.ndarray]:
    """Split the values of all words by row."""
    assert rows.flags is not None
    counts = [np.count_nonzero(flags[:length]) for flags, length in zip(rows.flags, rows.lengths, strict=True)]
    return np.split(values, np.cumsum(counts)[:-1])


Span = tuple[int, int, str]


@dataclass(slots=True)
class Scores:
    """Counts of names by label."""

    correct: Counter[str] = field(default_factory=Counter)
    predicted: Counter[str] = field(default_factory=Counter)
    gold: Counter[str] = field(default_factory=Counter)

    def add(self, gold: Iterable[Span], predicted: Iterable[Span]) -> None:
        """Count the names of a document."""
        gold, predicted = set(gold), set(predicted)
        self.gold.update(label for *_, label in gold)
        self.predicted.update(label for *_, label in predicted)
        self.correct.update(label for *_, label in gold & predicted)

    def add_tags(self, gold: Sequence[str], predicted: Sequence[str]) -> None:
        """Count the words of a document by their tags."""
        self.gold.update(gold)
        self.predicted.update(predicted)
        self.correct.update(tag for tag, predicted_tag in zip(gold, predicted, strict=True) if tag == predicted_tag)

    @property
    def labels(self) -> list[str]:
        return sorted({*self.gold, *self.predicted})

    def micro(self) -> dict[str, float]:
        """Return precision, recall and f1 over all names."""
        return precision_recall_f1(self.correct.total(), self.predicted.total(), self.gold.total())

    def macro_f1(self) -> float:
        """Return the mean f1 of the labels."""
        table = self.table()
        return sum(row["f1"] for row in table.values()) / len(table) if table else 0.0

    def table(self) -> dict[str, dict[str, float]]:
        """Return precision, recall, f1 and `support` (count in the data) of each label."""
        return {
            label: {
                **precision_recall_f1(self.correct[label], self.predicted[label], self.gold[label]),
                "support": self.gold[label],
            }
            for label in self.labels
        }

    def averages(self) -> dict[str, dict[str, float]]:
        """Return micro, macro (mean over labels) and weighted (by support) averages, as in seqeval's report."""
        table, support = self.table(), self.gold.total()
        names = ("precision", "recall", "f1")
        macro = {name: sum(row[name] for row in table.values()) / max(1, len(table)) for name in names}
        weighted = {name: sum(row[name] * row["support"] for row in table.values()) / max(1, support) for name in names}
        rows: dict[str, dict[str, Any]] = {"micro": self.micro(), "macro": macro, "weighted": weighted}
        return {name: {**row, "support": support} for name, row in rows.items()}
