"""The load-balancing loss of a mixture of experts, independent of how a batch is split.

A router that prefers a few experts never learns to use the rest. So the loss gets a term E · Σ f_e · P_e
over the E experts of a layer, where f_e is the fraction of tokens that choose expert e, and P_e the router's mean
probability for it (Fedus et al. 2021, "Switch Transformers", equations 4 to 6; as in transformers, f sums to the number
of choices, which is also the loss when the load is balanced).

Both are means over tokens. The product of two means over a micro-batch would depend on how the batch is split, so the
means are over one row ("sequence-wise balance loss": Liu et al. 2024, "DeepSeek-V3", equations 17 to 20) in each layer.
The loss is the mean over layers, and over rows weighted by their number of targets, times `router_aux_loss_coef`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch._dynamo  # its settings
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from artel.errors import InputError
from artel.models import IGNORED

_LOSSES: WeakKeyDictionary[nn.Module, RouterAuxLoss | None] = WeakKeyDictionary()
_KEY = "router_aux_loss_coef"
_LOGITS_ATTRIBUTE = "_artel_logits"


def get_router_aux_loss(model: PreTrainedModel) -> RouterAuxLoss | None:
    """Return the model's router loss, or None if its configuration has no coefficient. Always the same object.

    Call it before a model is split into pipeline stages, so that all of its layers count.
    """
    if model not in _LOSSES:
        coefficient = getattr(model.config.get_text_config(), _KEY, None)
        routers = _find_routers(model)
        if coefficient and routers:
            # Compiled layers with activation checkpointing then record their routers only in the forward pass.
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
            _LOSSES[model] = RouterAuxLoss(model, coefficient, routers)
        else:
            _LOSSES[model] = None
    return _LOSSES[model]


def share_router_aux_loss(model: PreTrainedModel, models: list[PreTrainedModel]) -> None:
    """Use the router loss of `model` for `models`, which consist of its modules."""
    _LOSSES.update(dict.fromkeys(models, get_router_aux_loss(model)))


class RouterAuxLoss:
    """Records the logits of a model's routers and computes the loss."""

    context: dist.ProcessGroup | None = None
    """The processes over which each row is split, under context parallelism."""

    def __init__(self, model: PreTrainedModel, coefficient: float, routers: dict[nn.Module, int]) -> None:
        config = model.config.get_text_config()
        self._model_type = config.model_type
        self._choices = config.num_experts_per_tok
        self._coefficient = coefficient
        self._routers = list(routers)
        self._is_recording = False
        for router, index in routers.items():
            router.register_forward_hook(partial(self._record, index))

    @contextmanager
    def recording(self) -> Iterator[list[torch.Tensor]]:
        """Record routers inside the block. Afterwards the list has their logits (tokens, experts), in order of layers.

        Calls without gradient and recomputation in a backward pass are not recorded. A nested block takes the logits
        recorded so far and ends the recording.
        """
        logits: list[torch.Tensor] = []
        self._is_recording = True
        try:
            yield logits
        finally:
            self._is_recording = False
            recorded = [router.__dict__.pop(_LOGITS_ATTRIBUTE, None) for router in self._routers]
            logits += [tensor for tensor in recorded if tensor is not None]

    def loss(self, logits: list[torch.Tensor], targets: torch.Tensor, is_real: torch.Tensor | None) -> torch.Tensor:
        """Return the sum over rows of loss times number of targets: a scalar, float32.

        `logits`: from `recording`. targets int64 (rows, length), or `IGNORED`: a row without targets (padding) adds
        nothing. is_real bool (rows, length): False for padding; None for no padding. With `context` all tensors cover
        this process's part of each row, and the loss is the sum of the results of all processes. Raise InputError for a
        router whose output has an unexpected shape.
        """
        is_token = torch.ones_like(targets, dtype=torch.float32) if is_real is None else is_real.float()
        has_target = (targets != IGNORED).float()
        row_sums = [has_target.sum(dim=1, keepdim=True), is_token.sum(dim=1, keepdim=True)]
        probability_sums = []
        for layer_logits in logits:
            if layer_logits.numel() != targets.numel() * layer_logits.shape[-1]:
                what = f"{self._model_type}: its routers do not return one number per token and expert"
                raise InputError.at(f"model.config.{_KEY}", what, "write 0: without a balance loss")
            probabilities = layer_logits.float().view(*targets.shape, -1).softmax(dim=-1)
            top = probabilities.topk(self._choices, dim=-1).indices
            choices = torch.zeros_like(probabilities).scatter_(-1, top, 1.0)
            probability_sums.append((probabilities * is_token[..., None]).sum(dim=1))
            row_sums.append((choices * is_token[..., None]).sum(dim=1))
        sums = torch.cat(row_sums, dim=1).detach()  # one tensor, for one all-reduce
        if self.context is not None:
            dist.all_reduce(sums, group=self.context)
        target_count, tokens, *counts = sums.split([part.shape[1] for part in row_sums], dim=1)
        products = [
            count.shape[1] * (count * probability).sum(dim=1)
            for count, probability in zip(counts, probability_sums, strict=True)
        ]
        weight = (target_count / tokens.clamp(min=1).square())[:, 0]
        return self._coefficient / len(self._routers) * (weight * sum(products, torch.zeros_like(weight))).sum()

    def _record(self, index: int, router: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of a router. Its logits are `output`, or element `index` of it."""
        # Stored on the router itself: appending to a list would make each layer compile separately.
        if self._is_recording and torch.is_grad_enabled():
            setattr(router, _LOGITS_ATTRIBUTE, output[index] if isinstance(output, tuple) else output)


def attach_loss(tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """Return `tensor` unchanged. Its backward pass also runs that of the scalar `loss`, with a gradient of 1.

    For a pipeline stage, which computes part of the loss but outputs only hidden states.
    """
    result: torch.Tensor = _AttachedLoss.apply(tensor, loss)
    return result


class _AttachedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = ctx.saved_tensors
        return grad_outputs[0], torch.ones_like(loss)


def _find_routers(model: PreTrainedModel) -> dict[nn.Module, int]:
    """Return the model's routers with the index of the logits in their output, as declared in transformers."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits", [])
    specs = recorded if isinstance(recorded, list) else [recorded]
    return {module: spec.index for spec in specs for module in model.modules() if isinstance(module, spec.target_class)}
