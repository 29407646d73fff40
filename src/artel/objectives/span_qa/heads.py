"""The heads of a model: logits, losses and the best span of each window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from artel.config import SpanQAConfig
from artel.objectives.span_qa.question_windows import UNKNOWN
from artel.objectives.types import Batch

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def run_heads(model: PreTrainedModel, batch: Batch, *, five_heads: bool) -> dict[str, torch.Tensor]:
    """Return logits of start and end (rows, length), minus infinity at padding.

    With `five_heads` also logits of the classes (rows, 5), and relative positions of start and end, 0 to 1 (rows, 2).
    """
    import torch

    inputs = {
        name: batch.tensors[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch.tensors
    }
    output = model(**inputs, output_hidden_states=five_heads)
    padding = batch.tensors["attention_mask"] == 0
    outputs = {
        "start": output.start_logits.float().masked_fill(padding, -torch.inf),
        "end": output.end_logits.float().masked_fill(padding, -torch.inf),
    }
    if five_heads:
        first_states = output.hidden_states[-1][:, 0]
        outputs["class"] = model.get_submodule("answer_class")(first_states).float()
        outputs["position"] = model.get_submodule("answer_position")(first_states).float().sigmoid()
    return outputs


def best_spans(
    start: torch.Tensor, end: torch.Tensor, allowed: torch.Tensor, max_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (score, first, last) of each row's best span by start + end, of at most `max_tokens` allowed tokens.

    start, end, allowed: (rows, length).
    """
    import torch
    import torch.nn.functional as F

    start, end = (logits.masked_fill(~allowed, -torch.inf) for logits in (start, end))
    length = start.shape[1]
    # The best last token for each first one is among the next `max_tokens`: a window over the end logits.
    padded = F.pad(end, (0, max_tokens - 1), value=-torch.inf)
    best, offset = padded.unfold(1, max_tokens, 1).max(dim=2)
    score, first = (start + best).max(dim=1)
    last = first + offset.gather(1, first[:, None])[:, 0]
    return score, first, last.clamp(max=length - 1)


class WindowLoss:
    """The weighted losses of the heads."""

    def __init__(self, span_qa: SpanQAConfig) -> None:
        self._span_qa = span_qa
        self._class_weights: torch.Tensor | None = None

    def balance_classes(self, counts: np.ndarray) -> None:
        """Weight classes by their inverse frequency. `counts`: training windows of each class, (5,)."""
        import torch

        present = counts > 0
        # As scikit-learn's "balanced": samples / (classes x count), so that the mean weight of a sample is 1.
        weights = np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 0.0)
        self._class_weights = torch.tensor(weights, dtype=torch.float32)

    def sums(self, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """Return (sum of losses over the windows, number of windows)."""
        import torch
        import torch.nn.functional as F

        weights, tensors = self._span_qa.weights, batch.tensors
        start, end, valid = tensors["start"], tensors["end"], tensors["valid"]
        loss = weights.start * F.cross_entropy(outputs["start"], start, reduction="none")
        loss = loss + weights.end * F.cross_entropy(outputs["end"], end, reduction="none")
        if self._span_qa.heads == "five":
            # Squared error of relative positions, if there is an answer.
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

        span_qa = self._span_qa
        smoothing = span_qa.smoothing if span_qa.class_loss == "smooth" else 0.0
        loss = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
        if span_qa.class_loss == "focal":  # Lin et al. 2017, "Focal Loss for Dense Object Detection", equation 5
            loss = span_qa.focal_alpha * (1 - torch.exp(-loss)) ** span_qa.focal_gamma * loss
        weights = self._class_weights
        return loss if weights is None else loss * weights.to(loss.device)[target]
