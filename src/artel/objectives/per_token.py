"""Sums and figures of objectives whose loss is the cross-entropy of single tokens: defined once, for all of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.models.targets import IGNORED
from artel.objectives.base import Batch, Reading

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SUMS = ("loss", "targets", "right")
BALANCED_SUMS = (*SUMS, "balance")

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


def predicted(ids: np.ndarray, targets: np.ndarray, name: str = "") -> Reading:
    """Of a sequence each token of which is predicted from those before it: `targets` (tokens - 1,) or more."""
    return Reading(ids, np.append(IGNORED, targets)[: len(ids)], name)


def token_sums(model: PreTrainedModel, inputs: dict[str, Any], batch: Batch) -> torch.Tensor:
    """`SUMS` of a batch, float32 (3,), by calling the model with `inputs`; the first carries the gradient."""
    import torch

    from artel.models.loss import model_losses

    targets, places = batch.tensors["targets"], batch.tensors.get("places")
    loss, guesses = model_losses(model, inputs, targets, places)
    right = (guesses == (targets if places is None else targets.flatten()[places])).sum()  # no guess is `IGNORED`
    return torch.stack([loss, torch.full_like(loss, batch.targets), right.float()])


def balanced_token_sums(model: PreTrainedModel, inputs: dict[str, Any], batch: Batch) -> torch.Tensor:
    """`BALANCED_SUMS` of a batch, float32 (4,): as `token_sums`, and the loss that keeps experts equally busy.

    That is a sum like the loss, to be divided by the targets; it is 0 where the model has none, or is only judged. The
    gradient of the first is that of both together, while its value stays that of the tokens. Where rows have filler
    the batch says so: `real`, bool (rows, length).
    """
    import torch

    from artel.models.router_aux_loss import router_aux_loss_of

    balance = router_aux_loss_of(model)
    if balance is None or not model.training:
        sums = token_sums(model, inputs, batch)
        return torch.cat([sums, sums.new_zeros(1)])
    with balance.recording() as logits:
        sums = token_sums(model, inputs, batch)
    aux_loss = balance.loss(logits, batch.tensors["targets"], batch.tensors.get("real"))[None]
    return torch.cat([sums[:1] + (aux_loss - aux_loss.detach()), sums[1:], aux_loss.detach()])


def token_metrics(totals: dict[str, float]) -> dict[str, float]:
    """Of the totals of `SUMS`: the mean `loss` per target in nats, its `perplexity`, and the share that are `right`."""
    loss = totals["loss"] / totals["targets"]
    perplexity = math.exp(min(loss, 700.0))  # exp(710) overflows a double
    return {"loss": loss, "perplexity": perplexity, "accuracy": totals["right"] / totals["targets"]}
