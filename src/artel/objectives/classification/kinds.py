"""The kinds of classification: one label, several labels or a number, with their targets, losses and answers.

A sample stores its target as integers: the index of its label, 0 or 1 for each label, or the bits of a float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from artel.config import ClassificationConfig
from artel.messages import Phrase
from artel.objectives.base import Direction, directions
from artel.objectives.classification.label_metrics import (
    DEFAULT_THRESHOLD,
    best_thresholds,
    confusion_counts,
    label_scores,
    multi_label_metrics,
    number_metrics,
    roc_auc,
    single_label_metrics,
    softmax,
)
from artel.objectives.statistics import bits_to_floats, float_to_bits, sigmoid
from artel.printable import shorten
from artel.text import LabeledText

if TYPE_CHECKING:
    import torch

THRESHOLDS = "thresholds.json"
"""The file beside the model with the threshold of each label."""


class LabelError(Exception):
    """A text has labels that this run cannot learn. `reason`: for the ledger. `detail`: for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class Kind(ABC):
    problem_type: ClassVar[str]
    """The `problem_type` in config.json: tells transformers' pipelines how to turn logits into scores."""
    metric_directions: ClassVar[dict[str, Direction]]
    has_classes: ClassVar[bool] = True
    """True if there are classes to weight and balance."""
    is_multi_label: ClassVar[bool] = False
    """True if a text may have several labels."""

    def __init__(self, classification: ClassificationConfig) -> None:
        self.classification = classification
        self.labels = list(classification.labels) if isinstance(classification.labels, list) else []
        self._indices = {label: index for index, label in enumerate(self.labels)}
        self._weights: torch.Tensor | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the logits."""
        return tuple(self.labels)

    @abstractmethod
    def encode_target(self, fields: LabeledText) -> tuple[int, ...]:
        """Return the target of a text as integers. Raise LabelError if the run cannot learn it."""

    @abstractmethod
    def decode_targets(self, numbers: np.ndarray) -> np.ndarray:
        """Return the targets for `loss` and `metrics` from samples' numbers (rows, columns)."""

    @abstractmethod
    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of `logits` (rows, outputs), float32 (rows,)."""

    @property
    @abstractmethod
    def loss_description(self) -> str:
        """A description of the loss."""

    @abstractmethod
    def metrics(self, logits: np.ndarray, target: np.ndarray) -> dict[str, float]: ...

    @abstractmethod
    def details(self, logits: np.ndarray, target: np.ndarray) -> dict[str, Any]: ...

    @abstractmethod
    def answer(self, logits: np.ndarray) -> dict[str, Any]:
        """Return the answer for one text. `logits`: (1, outputs)."""

    @abstractmethod
    def describe_target(self, target: np.ndarray) -> str:
        """Describe the target of one row."""

    def classes(self, numbers: np.ndarray) -> np.ndarray:
        """Return the class of each row for balancing, int64 (rows,)."""
        raise NotImplementedError

    def balance(self, numbers: np.ndarray) -> None:
        """Weight labels by their inverse frequency in the training rows. `numbers`: (rows, columns)."""
        raise NotImplementedError

    def tune(self, logits: np.ndarray, target: np.ndarray) -> None:  # noqa: B027  # only several labels have thresholds
        """Choose the thresholds of labels on validation data, unless they are set."""

    def set_thresholds(self, thresholds: dict[str, float]) -> str:
        """Use these thresholds and never choose others. Return a note if the model has none."""
        return ""

    def chosen_thresholds(self) -> dict[str, float]:
        """Return the thresholds by label; empty if none were chosen or set."""
        return {}

    def _describe_loss(self, loss: Phrase) -> Phrase:
        """Return the name of a loss with its options."""
        options = self.classification
        details = [Phrase("focal, gamma {gamma:g}", gamma=options.focal_gamma)] if options.loss == "focal" else []
        details += [Phrase("smoothing {share:g}", share=options.smoothing)] if options.smoothing else []
        details += [Phrase("weighted by class")] if options.class_weights == "balanced" else []
        return Phrase("{loss} ({options})", loss=loss, options=details) if details else loss

    def _label_index(self, label: str) -> int:
        if label not in self._indices:
            known = ", ".join(map(shorten, self.labels[:20])) + (" …" if len(self.labels) > 20 else "")
            is_written = "labels" in self.classification.model_fields_set
            what = "is not a label of this run" if is_written else "occurs in no training text; the run's are"
            fix = "fix it, add it to classification.labels, or remove the row"
            raise LabelError("unknown_label", f"the label {shorten(label)!r} {what} ({known}); {fix}")
        return self._indices[label]


class SingleLabel(Kind):
    problem_type = "single_label_classification"
    metric_directions = directions(lower=["loss"], higher=["accuracy", "macro_f1", "micro_f1", "matthews", "auc"])

    def encode_target(self, fields: LabeledText) -> tuple[int, ...]:
        if len(fields.labels) != 1:
            reason, count = ("several_labels", len(fields.labels)) if fields.labels else ("no_label", "no")
            what = f"has {count} label{'s' * (len(fields.labels) > 1)}, but each text of this run has one"
            raise LabelError(reason, f"{what}; fix it, or write classification.kind: multi")
        return (self._label_index(fields.labels[0]),)

    def decode_targets(self, numbers: np.ndarray) -> np.ndarray:
        return numbers[:, 0]

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy for label indices (rows,)."""
        import torch
        import torch.nn.functional as F

        options, weights = self.classification, self._weights
        loss = F.cross_entropy(logits, target, reduction="none", label_smoothing=options.smoothing)
        if options.loss == "focal":  # Lin et al. 2017, "Focal Loss for Dense Object Detection", equation 4
            loss = (1 - torch.exp(-loss)) ** options.focal_gamma * loss
        return loss if weights is None else loss * weights.to(loss.device)[target]

    @property
    def loss_description(self) -> str:
        return self._describe_loss(Phrase("cross-entropy of the label"))

    def metrics(self, logits: np.ndarray, target: np.ndarray) -> dict[str, float]:
        return single_label_metrics(logits, target)

    def details(self, logits: np.ndarray, target: np.ndarray) -> dict[str, Any]:
        counts = confusion_counts(target, logits.argmax(axis=1), len(self.labels))
        probabilities = softmax(logits)
        by_label = label_scores(np.diag(counts), counts.sum(axis=1), counts.sum(axis=0))
        rows = [
            {"label": label, "texts": int(counts[index].sum()), **scores}
            | _auc(probabilities[:, index], target == index)
            for index, (label, scores) in enumerate(zip(self.labels, by_label, strict=True))
        ]
        matrix = {"labels": self.labels, "counts": counts.tolist()}
        return {"tables": {"labels": rows}, "matrices": {"true labels and predicted ones": matrix}}

    def answer(self, logits: np.ndarray) -> dict[str, Any]:
        probabilities = softmax(logits)[0]
        best = int(probabilities.argmax())
        return {
            "label": self.labels[best],
            "probability": float(probabilities[best]),
            "probabilities": dict(zip(self.labels, probabilities.tolist(), strict=True)),
        }

    def describe_target(self, target: np.ndarray) -> str:
        return self.labels[int(target)]

    def classes(self, numbers: np.ndarray) -> np.ndarray:
        return numbers[:, 0]

    def balance(self, numbers: np.ndarray) -> None:
        """Weight as scikit-learn's "balanced" does: rows / (labels x count), so that the mean weight of a row is 1."""
        import torch

        counts = np.bincount(numbers[:, 0], minlength=len(self.labels))
        present = counts > 0
        weights = np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 0.0)
        self._weights = torch.tensor(weights, dtype=torch.float32)


class MultiLabel(Kind):
    problem_type = "multi_label_classification"
    is_multi_label = True
    metric_directions = directions(lower=["loss"], higher=["accuracy", "macro_f1", "micro_f1", "tuned_macro_f1", "auc"])

    def __init__(self, classification: ClassificationConfig) -> None:
        super().__init__(classification)
        self._thresholds = np.full(len(self.labels), DEFAULT_THRESHOLD)
        self._has_thresholds, self._may_tune = False, True

    def encode_target(self, fields: LabeledText) -> tuple[int, ...]:
        chosen = {self._label_index(label) for label in fields.labels}
        return tuple(int(index in chosen) for index in range(len(self.labels)))

    def decode_targets(self, numbers: np.ndarray) -> np.ndarray:
        return numbers.astype(np.float32)

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the mean over labels. `target` (rows, labels): 0 or 1."""
        import torch
        import torch.nn.functional as F

        options, weights = self.classification, self._weights
        smoothed = target * (1 - options.smoothing) + options.smoothing / 2
        loss = F.binary_cross_entropy_with_logits(logits, smoothed, reduction="none")
        if options.loss == "focal":
            loss = (1 - torch.exp(-loss)) ** options.focal_gamma * loss
        if weights is not None:
            loss = loss * torch.where(target > 0, weights.to(loss.device), 1.0)
        return loss.mean(dim=1)

    @property
    def loss_description(self) -> str:
        return self._describe_loss(Phrase("binary cross-entropy of each label"))

    def metrics(self, logits: np.ndarray, target: np.ndarray) -> dict[str, float]:
        thresholds = self._thresholds if self._has_thresholds else None
        return multi_label_metrics(sigmoid(logits), target > 0, thresholds)

    def details(self, logits: np.ndarray, target: np.ndarray) -> dict[str, Any]:
        probabilities, gold = sigmoid(logits), target > 0
        tables = {}
        thresholds_by_title: list[tuple[str, float | np.ndarray]] = [("labels, at 0.5", DEFAULT_THRESHOLD)]
        if self._has_thresholds:
            thresholds_by_title.append(("labels, at their thresholds", self._thresholds))
        for title, thresholds in thresholds_by_title:
            predicted = probabilities > thresholds
            by_label = label_scores((predicted & gold).sum(axis=0), gold.sum(axis=0), predicted.sum(axis=0))
            tables[title] = [
                {"label": label, "texts": int(gold[:, index].sum()), **scores}
                | _auc(probabilities[:, index], gold[:, index])
                for index, (label, scores) in enumerate(zip(self.labels, by_label, strict=True))
            ]
            if thresholds is not DEFAULT_THRESHOLD:
                for row, threshold in zip(tables[title], self._thresholds.tolist(), strict=True):
                    row["threshold"] = threshold
        return {"tables": tables}

    def answer(self, logits: np.ndarray) -> dict[str, Any]:
        probabilities = sigmoid(logits)[0]
        chosen = np.flatnonzero(probabilities > self._thresholds)
        ordered = sorted(chosen.tolist(), key=lambda index: -probabilities[index])
        return {
            "labels": [self.labels[index] for index in ordered],
            "probabilities": dict(zip(self.labels, probabilities.tolist(), strict=True)),
        }

    def describe_target(self, target: np.ndarray) -> str:
        return ", ".join(self.labels[index] for index in np.flatnonzero(target > 0)) or "no label"

    def classes(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rarest label of each row. Rows without a label form one more class."""
        rarity = np.argsort(np.argsort(numbers.sum(axis=0), kind="stable"), kind="stable")
        return np.where(numbers > 0, rarity, len(self.labels)).min(axis=1)

    def balance(self, numbers: np.ndarray) -> None:
        """Weight a label's positive rows by (rows without it) / (rows with it); 1 if no row has it, or every row."""
        import torch

        positive = numbers.sum(axis=0)
        weights = np.where(
            (positive > 0) & (positive < len(numbers)), (len(numbers) - positive) / np.maximum(positive, 1), 1.0
        )
        self._weights = torch.tensor(weights, dtype=torch.float32)

    def tune(self, logits: np.ndarray, target: np.ndarray) -> None:
        if self._may_tune:
            self._thresholds, self._has_thresholds = best_thresholds(sigmoid(logits), target > 0), True

    def set_thresholds(self, thresholds: dict[str, float]) -> str:
        self._may_tune = False
        if not thresholds:
            return (
                f"the model has no thresholds ({THRESHOLDS}), so a text has the labels with a probability over "
                f"{DEFAULT_THRESHOLD}"
            )
        self._thresholds = np.array([thresholds.get(label, DEFAULT_THRESHOLD) for label in self.labels])
        self._has_thresholds = True
        return ""

    def chosen_thresholds(self) -> dict[str, float]:
        return dict(zip(self.labels, self._thresholds.tolist(), strict=True)) if self._has_thresholds else {}


class Regression(Kind):
    problem_type = "regression"
    has_classes = False
    metric_directions = directions(lower=["loss", "rmse", "mae"], higher=["r2", "pearson", "spearman"])

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("number",)

    def encode_target(self, fields: LabeledText) -> tuple[int, ...]:
        if fields.number is None:
            label = repr(fields.labels[0]) if fields.labels else "nothing"
            raise LabelError("no_number", f"has {label} instead of a number; write one (0.5), or remove the row")
        return (float_to_bits(fields.number),)

    def decode_targets(self, numbers: np.ndarray) -> np.ndarray:
        return bits_to_floats(numbers[:, 0]).astype(np.float32)

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (logits[:, 0] - target).square()

    @property
    def loss_description(self) -> str:
        return "squared error"

    def metrics(self, logits: np.ndarray, target: np.ndarray) -> dict[str, float]:
        return number_metrics(logits[:, 0].astype(np.float64), target.astype(np.float64))

    def details(self, logits: np.ndarray, target: np.ndarray) -> dict[str, Any]:
        return {}

    def answer(self, logits: np.ndarray) -> dict[str, Any]:
        return {"number": float(logits[0, 0])}

    def describe_target(self, target: np.ndarray) -> str:
        return f"{float(target):g}"


class PlaceholderLabels(SingleLabel):
    """Stands in for the labels until the records are read: `artel plan` needs samples, but no labels."""

    def encode_target(self, fields: LabeledText) -> tuple[int, ...]:
        return (0,)


KINDS: dict[str, type[Kind]] = {"single": SingleLabel, "multi": MultiLabel, "number": Regression}


def _auc(probabilities: np.ndarray, positive: np.ndarray) -> dict[str, float]:
    auc = roc_auc(probabilities, positive)
    return {} if auc is None else {"auc": auc}
