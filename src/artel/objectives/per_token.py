"""Sums and figures of objectives whose loss is the cross-entropy of single tokens: defined once, for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from artel.objectives.types import Batch

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SUMS = ("loss", "targets", "right")
BALANCED_SUMS = (*SUMS, "balance")


def inputs_of(model: PreTrainedModel, batch: Batch, *, causal: bool) -> dict[str, Any]:
    """The model's arguments: the ids and, if the batch has documents, the mask that keeps them apart."""
    tensors = batch.tensors
    inputs = {"input_ids": tensors["input_ids"]}
    if "documents" in tensors:
        from artel.models.document_mask import document_inputs

        inputs |= document_inputs(model, tensors["documents"], tensors["positions"], causal=causal)
    return inputs


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

    That is a sum like the loss, to be divided by the targets. It is 0 where the model has no experts, and in
    evaluation. The gradient of the first is that of both together, while its value stays that of the tokens. Where rows
    have padding the batch says so: `real`, bool (rows, length).
    """
    return with_balance(model, batch, lambda: token_sums(model, inputs, batch))


def with_balance(model: PreTrainedModel, batch: Batch, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The sums that `compute` gives by calling the model once, and the balance loss of experts after the last of them,
    whose gradient the first then has, too: see `balanced_token_sums`.
    """
    import torch

    from artel.models.router_aux_loss import router_aux_loss_of

    balance = router_aux_loss_of(model)
    if balance is None or not model.training:
        sums = compute()
        return torch.cat([sums, sums.new_zeros(1)])
    with balance.recording() as logits:
        sums = compute()
    aux_loss = balance.loss(logits, batch.tensors["targets"], batch.tensors.get("real"))[None]
    return torch.cat([sums[:1] + (aux_loss - aux_loss.detach()), sums[1:], aux_loss.detach()])


def token_metrics(totals: dict[str, float]) -> dict[str, float]:
    """Of the totals of `SUMS`: the mean `loss` per target in nats, its `perplexity`, and the share that are `right`."""
    loss = totals["loss"] / totals["targets"]
    perplexity = math.exp(min(loss, 700.0))  # exp(710) overflows a double
    return {"loss": loss, "perplexity": perplexity, "accuracy": totals["right"] / totals["targets"]}
