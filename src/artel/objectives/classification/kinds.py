"""What is predicted: one label, several labels or a number. Each knows its targets, its loss, its figures and answers.

A sample holds its target as whole numbers: the number of its label; 0 or 1 for each label; the bits of a float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from artel.config import ClassificationConfig
from artel.objectives.base import Better
from artel.objectives.classification.label_metrics import (
    HALF,
    best_thresholds,
    confusion_counts,
    confusion_matrix,
    number_figures,
    roc_auc,
    scores_of_labels,
    several_figures,
    single_figures,
    softmax,
)
from artel.objectives.statistics import float_bits, floats_of_bits, sigmoid
from artel.printable import shortened
from artel.text import Labeled

if TYPE_CHECKING:
    import torch

THRESHOLDS = "thresholds.json"
"""The file beside the model with the threshold of each label."""


class Unfit(Exception):
    """Why the labels of a row cannot be learned: a word for the ledger and a sentence for people."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


class Kind(ABC):
    problem_type: ClassVar[str]
    """As transformers names it in config.json, by which its pipelines turn logits into scores."""
    better: ClassVar[dict[str, Better]]
    has_classes: ClassVar[bool] = True
    """Whether there are classes to weigh and to balance."""
    answers_several: ClassVar[bool] = False
    """Whether a text may have several labels."""

    def __init__(self, config: ClassificationConfig) -> None:
        self.config = config
        self.labels = list(config.labels) if isinstance(config.labels, list) else []
        self._numbers = {label: number for number, label in enumerate(self.labels)}
        self._weights: torch.Tensor | None = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the logits."""
        return tuple(self.labels)

    @abstractmethod
    def numbers(self, fields: Labeled) -> tuple[int, ...]:
        """The target of a row as whole numbers. Raises Unfit."""

    @abstractmethod
    def target(self, numbers: np.ndarray) -> np.ndarray:
        """The targets of rows, as `loss` and the figures take them, of their numbers (rows, columns)."""

    @abstractmethod
    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """float32 (rows,): of `logits` (rows, outputs)."""

    @property
    @abstractmethod
    def loss_description(self) -> str:
        """What `loss` is."""

    @abstractmethod
    def figures(self, logits: np.ndarray, target: np.ndarray) -> dict[str, float]: ...

    @abstractmethod
    def details(self, logits: np.ndarray, target: np.ndarray) -> dict[str, Any]: ...

    @abstractmethod
    def answer(self, logits: np.ndarray) -> dict[str, Any]:
        """What is said of one text: `logits` (1, outputs)."""

    @abstractmethod
    def words(self, target: np.ndarray) -> str:
        """The target of one row as people write it."""

    def classes(self, numbers: np.ndarray) -> np.ndarray:
        """int64 (rows,): by which rows are balanced."""
        raise NotImplementedError

    def balance(self, numbers: np.ndarray) -> None:
        """Weigh labels by the inverse of their share in the training rows `numbers` (rows, columns)."""
        raise NotImplementedError

    def tune(self, logits: np.ndarray, target: np.ndarray) -> None:  # noqa: B027  # only several labels have thresholds
        """Choose the thresholds of labels on validation, unless they are set."""

    def set_thresholds(self, thresholds: dict[str, float]) -> str:
        """Take thresholds by label; they are not chosen again. Returns what is used where there are none, in words."""
        return ""

    def chosen_thresholds(self) -> dict[str, float]:
        """By label; empty if none were chosen or set."""
        return {}

    def _number_of(self, label: str) -> int:
        if label not in self._numbers:
            known = ", ".join(map(shortened, self.labels[:20])) + (" …" if len(self.labels) > 20 else "")
            is_written = "labels" in self.config.model_fields_set
            what = "is none of the run's" if is_written else "occurs in no training text; the run's are"
            fix = "mend it, add it to classification.labels, or leave the row out"
            raise Unfit("unknown_label", f"the label {shortened(label)!r} {what} ({known}); {fix}")
        return self._numbers[label]


class SingleLabel(Kind):
    problem_type = "single_label_classification"
    better: ClassVar[dict[str, Better]] = {
        "loss": "lower",
        "accuracy": "higher",
        "macro_f1": "higher",
        "micro_f1": "higher",
        "matthews": "higher",
        "auc": "higher",
    }

    def numbers(self, fields: Labeled) -> tuple[int, ...]:
        if len(fields.labels) != 1:
            reason, count = ("several_labels", len(fields.labels)) if fields.labels else ("no_label", "no")
            what = f"has {count} label{'s' * (len(fields.labels) > 1)}, and each text of this run has one"
            raise Unfit(reason, f"{what}; mend it, or write classification.kind: multi")
        return (self._number_of(fields.labels[0]),)

    def target(self, numbers: np.ndarray) -> np.ndarray:
        return numbers[:, 0]

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return label_loss(logits, target, self.config, self._weights)

    @property
    def loss_description(self) -> str:
        return loss_of_labels("cross-entropy of the label", self.config)

    def figures(self, logits: np.ndarray, target: np.ndarray) -> dict[str, float]:
        return single_figures(logits, target)

    def details(self, logits: np.ndarray, target: np.ndarray) -> dict[str, Any]:
        counts = confusion_counts(target, logits.argmax(axis=1), len(self.labels))
        probabilities = softmax(logits)
        by_label = scores_of_labels(np.diag(counts), counts.sum(axis=1), counts.sum(axis=0))
        rows = [
            {"label": label, "texts": int(counts[number].sum()), **scores}
            | _area(probabilities[:, number], target == number)
            for number, (label, scores) in enumerate(zip(self.labels, by_label, strict=True))
        ]
        matrix = confusion_matrix(self.labels, target, logits.argmax(axis=1))
        return {"tables": {"labels": rows}, "matrices": {"true labels and predicted ones": matrix}}

    def answer(self, logits: np.ndarray) -> dict[str, Any]:
        probabilities = softmax(logits)[0]
        best = int(probabilities.argmax())
        return {
            "label": self.labels[best],
            "probability": float(probabilities[best]),
            "probabilities": dict(zip(self.labels, probabilities.tolist(), strict=True)),
        }

    def words(self, target: np.ndarray) -> str:
        return self.labels[int(target)]

    def classes(self, numbers: np.ndarray) -> np.ndarray:
        return numbers[:, 0]

    def balance(self, numbers: np.ndarray) -> None:
        """As scikit-learn's "balanced": rows / (labels x count), so that the mean weight of a row is 1."""
        import torch

        counts = np.bincount(numbers[:, 0], minlength=len(self.labels))
        present = counts > 0
        weights = np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 0.0)
        self._weights = torch.tensor(weights, dtype=torch.float32)


class SeveralLabels(Kind):
    problem_type = "multi_label_classification"
    answers_several = True
    better: ClassVar[dict[str, Better]] = {
        "loss": "lower",
        "accuracy": "higher",
        "macro_f1": "higher",
        "micro_f1": "higher",
        "tuned_macro_f1": "higher",
        "auc": "higher",
    }

    def __init__(self, config: ClassificationConfig) -> None:
        super().__init__(config)
        self._thresholds = np.full(len(self.labels), HALF)
        self._are_chosen, self._may_choose = False, True

    def numbers(self, fields: Labeled) -> tuple[int, ...]:
        chosen = {self._number_of(label) for label in fields.labels}
        return tuple(int(number in chosen) for number in range(len(self.labels)))

    def target(self, numbers: np.ndarray) -> np.ndarray:
        return numbers.astype(np.float32)

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return labels_loss(logits, target, self.config, self._weights)

    @property
    def loss_description(self) -> str:
        return loss_of_labels("binary cross-entropy of each label", self.config)

    def figures(self, logits: np.ndarray, target: np.ndarray) -> dict[str, float]:
        thresholds = self._thresholds if self._are_chosen else None
        return several_figures(sigmoid(logits), target > 0, thresholds)

    def details(self, logits: np.ndarray, target: np.ndarray) -> dict[str, Any]:
        probabilities, gold = sigmoid(logits), target > 0
        tables = {}
        cuts: list[tuple[str, float | np.ndarray]] = [("labels, at 0.5", HALF)]
        if self._are_chosen:
            cuts.append(("labels, at their thresholds", self._thresholds))
        for title, thresholds in cuts:
            predicted = probabilities > thresholds
            by_label = scores_of_labels((predicted & gold).sum(axis=0), gold.sum(axis=0), predicted.sum(axis=0))
            tables[title] = [
                {"label": label, "texts": int(gold[:, number].sum()), **scores}
                | _area(probabilities[:, number], gold[:, number])
                for number, (label, scores) in enumerate(zip(self.labels, by_label, strict=True))
            ]
            if thresholds is not HALF:
                for row, threshold in zip(tables[title], self._thresholds.tolist(), strict=True):
                    row["threshold"] = threshold
        return {"tables": tables}

    def answer(self, logits: np.ndarray) -> dict[str, Any]:
        probabilities = sigmoid(logits)[0]
        chosen = np.flatnonzero(probabilities > self._thresholds)
        ordered = sorted(chosen.tolist(), key=lambda number: -probabilities[number])
        return {
            "labels": [self.labels[number] for number in ordered],
            "probabilities": dict(zip(self.labels, probabilities.tolist(), strict=True)),
        }

    def words(self, target: np.ndarray) -> str:
        return ", ".join(self.labels[number] for number in np.flatnonzero(target > 0)) or "no label"

    def classes(self, numbers: np.ndarray) -> np.ndarray:
        """The rarest label of each row; rows without a label are a class of their own."""
        rarity = np.argsort(np.argsort(numbers.sum(axis=0), kind="stable"), kind="stable")
        place = np.where(numbers > 0, rarity, len(self.labels))
        return place.min(axis=1)

    def balance(self, numbers: np.ndarray) -> None:
        """A label weighs as many times more in the rows that have it as there are more rows without it.

        One that no row has, or every row, weighs 1.
        """
        import torch

        positive = numbers.sum(axis=0)
        weights = np.where(
            (positive > 0) & (positive < len(numbers)), (len(numbers) - positive) / np.maximum(positive, 1), 1.0
        )
        self._weights = torch.tensor(weights, dtype=torch.float32)

    def tune(self, logits: np.ndarray, target: np.ndarray) -> None:
        if self._may_choose:
            self._thresholds, self._are_chosen = best_thresholds(sigmoid(logits), target > 0), True

    def set_thresholds(self, thresholds: dict[str, float]) -> str:
        self._may_choose = False
        if not thresholds:
            return (
                f"the model has no thresholds ({THRESHOLDS}), so a text has the labels with a probability over {HALF}"
            )
        self._thresholds = np.array([thresholds.get(label, HALF) for label in self.labels])
        self._are_chosen = True
        return ""

    def chosen_thresholds(self) -> dict[str, float]:
        return dict(zip(self.labels, self._thresholds.tolist(), strict=True)) if self._are_chosen else {}


class Number(Kind):
    problem_type = "regression"
    has_classes = False
    better: ClassVar[dict[str, Better]] = {
        "loss": "lower",
        "rmse": "lower",
        "mae": "lower",
        "r2": "higher",
        "pearson": "higher",
        "spearman": "higher",
    }

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("number",)

    def numbers(self, fields: Labeled) -> tuple[int, ...]:
        if fields.number is None:
            given = repr(fields.labels[0]) if fields.labels else "nothing"
            raise Unfit("no_number", f"has {given} where a number is learned; write one (0.5), or leave the row out")
        return (float_bits(fields.number),)

    def target(self, numbers: np.ndarray) -> np.ndarray:
        return floats_of_bits(numbers[:, 0]).astype(np.float32)

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return number_loss(logits, target)

    @property
    def loss_description(self) -> str:
        return "squared error"

    def figures(self, logits: np.ndarray, target: np.ndarray) -> dict[str, float]:
        return number_figures(logits[:, 0].astype(np.float64), target.astype(np.float64))

    def details(self, logits: np.ndarray, target: np.ndarray) -> dict[str, Any]:
        return {}

    def answer(self, logits: np.ndarray) -> dict[str, Any]:
        return {"number": float(logits[0, 0])}

    def words(self, target: np.ndarray) -> str:
        return f"{float(target):g}"


class Undecided(SingleLabel):
    """What stands for the labels before the records are read: `artel plan` needs samples, and no labels."""

    def numbers(self, fields: Labeled) -> tuple[int, ...]:
        return (0,)


KINDS: dict[str, type[Kind]] = {"single": SingleLabel, "multi": SeveralLabels, "number": Number}


def _area(probabilities: np.ndarray, positive: np.ndarray) -> dict[str, float]:
    area = roc_auc(probabilities, positive)
    return {} if area is None else {"auc": area}


def loss_of_labels(plain: str, config: ClassificationConfig) -> str:
    """The loss in words; `plain` is what it is without options."""
    more = [f"focal, gamma {config.focal_gamma:g}"] if config.loss == "focal" else []
    more += [f"smoothing {config.smoothing:g}"] if config.smoothing else []
    more += ["weighed by label"] if config.class_weights == "balanced" else []
    return f"{plain} ({', '.join(more)})" if more else plain


def label_loss(
    logits: torch.Tensor, target: torch.Tensor, config: ClassificationConfig, weights: torch.Tensor | None
) -> torch.Tensor:
    """float32 (rows,): of `logits` (rows, labels) and the numbers of the labels (rows,). `weights` are of labels."""
    import torch
    import torch.nn.functional as F

    loss = F.cross_entropy(logits, target, reduction="none", label_smoothing=config.smoothing)
    if config.loss == "focal":  # Lin et al. 2017, "Focal Loss for Dense Object Detection", equation 4
        loss = (1 - torch.exp(-loss)) ** config.focal_gamma * loss
    return loss if weights is None else loss * weights.to(loss.device)[target]


def labels_loss(
    logits: torch.Tensor, target: torch.Tensor, config: ClassificationConfig, weights: torch.Tensor | None
) -> torch.Tensor:
    """float32 (rows,): the mean over labels; `target` (rows, labels) is 0 or 1. `weights` are of rows with a label."""
    import torch
    import torch.nn.functional as F

    smooth = target * (1 - config.smoothing) + config.smoothing / 2
    loss = F.binary_cross_entropy_with_logits(logits, smooth, reduction="none")
    if config.loss == "focal":
        loss = (1 - torch.exp(-loss)) ** config.focal_gamma * loss
    if weights is not None:
        loss = loss * torch.where(target > 0, weights.to(loss.device), 1.0)
    return loss.mean(dim=1)


def number_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """float32 (rows,): the squared error of `logits` (rows, 1)."""
    return (logits[:, 0] - target).square()
