"""The loss of a window: the weighted losses of its heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from artel.config import SpanQAConfig
from artel.objectives.batch import Batch
from artel.objectives.span_qa.windows import UNKNOWN

if TYPE_CHECKING:
    import torch


class WindowLoss:
    def __init__(self, config: SpanQAConfig) -> None:
        self._config = config
        self._class_weights: torch.Tensor | None = None

    def balance_classes(self, counts: np.ndarray) -> None:
        """Weigh each class by the inverse of its share of the training windows; `counts` (5,) are those of each."""
        import torch

        present = counts > 0
        # As scikit-learn's "balanced": samples / (classes x count), so that the mean weight of a sample is 1.
        weights = np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 0.0)
        self._class_weights = torch.tensor(weights, dtype=torch.float32)

    def sums(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """(sum over the windows of the losses of `outputs`, the number of windows)."""
        import torch
        import torch.nn.functional as F

        weights, tensors = self._config.weights, batch.tensors
        start, end, valid = tensors["start"], tensors["end"], tensors["valid"]
        loss = weights.start * F.cross_entropy(outputs["start"], start, reduction="none")
        loss = loss + weights.end * F.cross_entropy(outputs["end"], end, reduction="none")
        if self._config.heads == "five":
            # Squared error of places as shares of the window, where there is an answer.
            answered = (tensors["class"] != UNKNOWN).float()
            length = tensors["attention_mask"].sum(dim=1).float()
            position = outputs["position"]
            loss = loss + weights.start_position * answered * (position[:, 0] - start / length).square()
            loss = loss + weights.end_position * answered * (position[:, 1] - end / length).square()
            loss = loss + weights.answer_class * self._class_loss(outputs["class"], tensors["class"])
        windows = torch.tensor(float(batch.targets), device=loss.device)
        return torch.stack([torch.where(valid, loss, 0.0).sum(), windows])

    def _class_loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        config = self._config
        smoothing = config.smoothing if config.class_loss == "smooth" else 0.0
        loss = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
        if config.class_loss == "focal":  # Lin et al. 2017, "Focal Loss for Dense Object Detection", equation 5
            loss = config.focal_alpha * (1 - torch.exp(-loss)) ** config.focal_gamma * loss
        weights = self._class_weights
        return loss if weights is None else loss * weights.to(loss.device)[target]
