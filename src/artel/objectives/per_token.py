"""Sums and metrics of objectives whose loss is the cross-entropy of single tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from artel.objectives.types import Batch

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SUMS = ("loss", "targets", "correct")
BALANCED_SUMS = (*SUMS, "balance")


def inputs_of(model: PreTrainedModel, batch: Batch, *, causal: bool) -> dict[str, Any]:
    """Return the model's inputs: the ids and, if the batch has documents, the mask that isolates them."""
    tensors = batch.tensors
    inputs = {"input_ids": tensors["input_ids"]}
    if "documents" in tensors:
        from artel.models.document_mask import document_inputs

        inputs |= document_inputs(model, tensors["documents"], tensors["positions"], causal=causal)
    return inputs


def token_sums(model: PreTrainedModel, inputs: dict[str, Any], batch: Batch) -> torch.Tensor:
    """Call the model with `inputs` and return `SUMS`, float32 (3,); the first has the gradient."""
    import torch

    from artel.models.loss import model_losses

    targets, positions = batch.tensors["targets"], batch.tensors.get("target_positions")
    loss, guesses = model_losses(model, inputs, targets, positions)
    correct = (
        guesses == (targets if positions is None else targets.flatten()[positions])
    ).sum()  # no guess is `IGNORED`
    return torch.stack([loss, torch.full_like(loss, batch.targets), correct.float()])


def balanced_token_sums(model: PreTrainedModel, inputs: dict[str, Any], batch: Batch) -> torch.Tensor:
    """Return `BALANCED_SUMS`, float32 (4,): `token_sums`, and the balance loss of experts.

    The balance loss is a sum over targets, and 0 without experts or in evaluation. The first sum has the gradient of
    both losses, but only the value of the token loss. If rows have padding, the batch has `real`, bool (rows, length).
    """
    return with_balance(model, batch, lambda: token_sums(model, inputs, batch))


def with_balance(model: PreTrainedModel, batch: Batch, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Append the balance loss of experts to the sums of `compute`, which calls the model once.

    The first sum gets its gradient: see `balanced_token_sums`.
    """
    import torch

    from artel.models.router_aux_loss import get_router_aux_loss

    balance = get_router_aux_loss(model)
    if balance is None or not model.training:
        sums = compute()
        return torch.cat([sums, sums.new_zeros(1)])
    with balance.recording() as logits:
        sums = compute()
    aux_loss = balance.loss(logits, batch.tensors["targets"], batch.tensors.get("real"))[None]
    return torch.cat([sums[:1] + (aux_loss - aux_loss.detach()), sums[1:], aux_loss.detach()])


def token_metrics(totals: dict[str, float]) -> dict[str, float]:
    """Return the mean `loss` per target in nats, its `perplexity`, and the `accuracy`, from totals of `SUMS`."""
    loss = totals["loss"] / totals["targets"]
    perplexity = math.exp(min(loss, 700.0))  # exp(710) overflows a double
    return {"loss": loss, "perplexity": perplexity, "accuracy": totals["correct"] / totals["targets"]}
