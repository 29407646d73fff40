"""Sums and figures of objectives whose loss is the cross-entropy of single tokens: defined once, for all of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.models.targets import IGNORED
from artel.objectives.base import Batch

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SUMS = ("loss", "targets", "right")

# Where fewer positions than this share have a target, the others are left out before the head.
_FEW = 0.9


def target_tensors(targets: np.ndarray) -> dict[str, torch.Tensor]:
    """`targets` int64 (rows, length), and where few positions have one, `places`: which, int64 (targets,).

    The places are counted here, on the host: to find them on a GPU the host would have to wait for it.
    """
    import torch

    places = np.flatnonzero(targets != IGNORED)
    tensors = {"targets": torch.from_numpy(targets)}
    if len(places) < _FEW * targets.size:
        tensors["places"] = torch.from_numpy(places)
    return tensors


def token_sums(model: PreTrainedModel, inputs: dict[str, Any], batch: Batch) -> torch.Tensor:
    """`SUMS` of a batch, float32 (3,), by calling the model with `inputs`; the first carries the gradient."""
    import torch

    from artel.models.loss import model_losses

    targets, places = batch.tensors["targets"], batch.tensors.get("places")
    loss, guesses = model_losses(model, inputs, targets, places)
    right = (guesses == (targets if places is None else targets.flatten()[places])).sum()  # no guess is `IGNORED`
    return torch.stack([loss, torch.full_like(loss, batch.targets), right.float()])


def token_figures(totals: dict[str, float]) -> dict[str, float]:
    """Of the totals of `SUMS`: the mean `loss` per target in nats, its `perplexity`, and the share that are `right`."""
    loss = totals["loss"] / totals["targets"]
    perplexity = math.exp(min(loss, 700.0))  # exp(710) overflows a double
    return {"loss": loss, "perplexity": perplexity, "accuracy": totals["right"] / totals["targets"]}
