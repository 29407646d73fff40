"""The loss of a row: cross-entropy of its label, of each of its labels, or the squared error of its number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from artel.config import ClassificationConfig

if TYPE_CHECKING:
    import torch


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
