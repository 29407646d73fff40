"""Sums and figures of objectives whose loss is the cross-entropy of single tokens: defined once, for all of them."""

from __future__ import annotations

import math

import torch

from artel.models import token_losses
from artel.objectives.base import Batch

SUMS = ("loss", "targets", "right")


def token_sums(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """`SUMS` of a batch, float32 (3,), by logits (rows, length, vocabulary); the first carries the gradient."""
    targets = batch.tensors["targets"]
    loss, guesses = token_losses(logits, targets)
    right = (guesses == targets).sum()  # no guess is `IGNORED`
    return torch.stack([loss, torch.tensor(float(batch.targets), device=loss.device), right.float()])


def token_figures(totals: dict[str, float]) -> dict[str, float]:
    """Of the totals of `SUMS`: the mean `loss` per target in nats, its `perplexity`, and the share that are `right`."""
    loss = totals["loss"] / totals["targets"]
    perplexity = math.exp(min(loss, 700.0))  # exp(710) overflows a double
    return {"loss": loss, "perplexity": perplexity, "accuracy": totals["right"] / totals["targets"]}
