"""The loss that keeps the experts of a mixture equally busy, in a form that does not depend on how a batch is cut.

A router that prefers a few experts never learns what the others are good for. So to the loss of a layer is added
E · Σ f_e · P_e over its E experts, where f_e is the share of tokens for which expert e is among those chosen, and P_e
the mean of the router's probability for it (Fedus et al. 2021, "Switch Transformers", equations 4 to 6; as in
transformers, f sums to the number of choices, and this is what the loss is when all are equally busy).

Both are means over tokens, and a product of means over a micro-batch changes with the micro-batch. Here they are taken
over one row each ("sequence-wise balance loss": Liu et al. 2024, "DeepSeek-V3", equations 17 to 20), layer by layer;
the loss is the mean over layers, and over rows by their numbers of targets, times the model's `router_aux_loss_coef`.
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
from artel.models.targets import IGNORED

_BALANCES: WeakKeyDictionary[nn.Module, RouterAuxLoss | None] = WeakKeyDictionary()
_KEY = "router_aux_loss_coef"
_SEEN = "_artel_logits"


def balance_of(model: PreTrainedModel) -> RouterAuxLoss | None:
    """The balance loss of a model whose configuration asks for one, the same object for each call; else None.

    A model that is to be taken apart into stages is asked before that, so that all its layers are counted.
    """
    if model not in _BALANCES:
        _BALANCES[model] = _asked_for(model)
    return _BALANCES[model]


def share_balance(model: PreTrainedModel, others: list[PreTrainedModel]) -> None:
    """Give models that are made of the modules of `model` the balance loss that it has."""
    _BALANCES.update(dict.fromkeys(others, balance_of(model)))


class RouterAuxLoss:
    """Watches the routers of one model, and computes the balance loss of what they did."""

    context: dist.ProcessGroup | None = None
    """The processes that share each row, where rows are split over several."""

    def __init__(self, model: PreTrainedModel, coefficient: float, routers: dict[nn.Module, int]) -> None:
        config = model.config.get_text_config()
        self._kind = config.model_type
        self._choices = config.num_experts_per_tok
        self._coefficient = coefficient
        self._routers = list(routers)
        self._watches = False
        for router, index in routers.items():
            router.register_forward_hook(partial(self._see, index))

    @contextmanager
    def watching(self) -> Iterator[list[torch.Tensor]]:
        """When the block has ended, the list has the logits (tokens, experts) of the routers called in it, by layer.

        Not those of calls without gradient, nor of what a backward pass computes again. A block within another takes
        what there is by then, and is the last.
        """
        logits: list[torch.Tensor] = []
        self._watches = True
        try:
            yield logits
        finally:
            self._watches = False
            seen = [router.__dict__.pop(_SEEN, None) for router in self._routers]
            logits += [each for each in seen if each is not None]

    def loss(self, logits: list[torch.Tensor], targets: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
        """The balance loss of a micro-batch's rows, each times its number of targets, summed: a scalar, float32.

        `logits` are those watched. targets int64 (rows, length), `IGNORED` where there is none: a row without any, as
        filler is, has no part in it. real bool (rows, length): where rows have tokens; None: everywhere. With `context`
        all of these are of this process's part of each row, and so is what it finds: the parts add up.
        """
        here = torch.ones_like(targets, dtype=torch.float32) if real is None else real.float()
        weights = (targets != IGNORED).float()
        known = [weights.sum(dim=1, keepdim=True), here.sum(dim=1, keepdim=True)]
        chances = []
        for each in logits:
            if each.numel() != targets.numel() * each.shape[-1]:
                what = f"{self._kind}: its routers give something else than a number for each token and expert"
                raise InputError.at(f"model.config.{_KEY}", what, "write 0: without a balance loss")
            shares = each.float().view(*targets.shape, -1).softmax(dim=-1)
            chosen = torch.zeros_like(shares).scatter_(-1, shares.topk(self._choices, dim=-1).indices, 1.0)
            chances.append((shares * here[..., None]).sum(dim=1))
            known.append((chosen * here[..., None]).sum(dim=1))
        sums = torch.cat(known, dim=1).detach()  # in one, so that processes add them up in one go
        if self.context is not None:
            dist.all_reduce(sums, group=self.context)
        wanted, tokens, *counts = sums.split([each.shape[1] for each in known], dim=1)
        products = [count.shape[1] * (count * chance).sum(dim=1) for count, chance in zip(counts, chances, strict=True)]
        weight = (wanted / tokens.clamp(min=1).square())[:, 0]
        return self._coefficient / len(self._routers) * (weight * sum(products, torch.zeros_like(weight))).sum()

    def _see(self, index: int, router: nn.Module, args: Any, found: Any) -> None:
        """What is called after each router; its logits are `found`, or at `index` of it."""
        # Noted on the router itself: a list that grows would have each layer compiled for itself.
        if self._watches and torch.is_grad_enabled():
            setattr(router, _SEEN, found[index] if isinstance(found, tuple) else found)


def carried(tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """`tensor` as it is; a backward pass through it is one of the scalar `loss` as well, with slope 1.

    For a pipeline's stage, which computes a share of the loss but hands on its layers' output.
    """
    found: torch.Tensor = _Carried.apply(tensor, loss)
    return found


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = ctx.saved_tensors
        return slopes[0], torch.ones_like(loss)


def _asked_for(model: PreTrainedModel) -> RouterAuxLoss | None:
    coefficient = getattr(model.config.get_text_config(), _KEY, None)
    routers = _routers(model)
    if not coefficient or not routers:
        return None
    # Layers that are compiled and computed again may note what their routers did: once, in the forward pass.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    return RouterAuxLoss(model, coefficient, routers)


def _routers(model: PreTrainedModel) -> dict[nn.Module, int]:
    """The model's routers, and where in what each returns its logits are, as the model itself tells transformers."""
    recorded = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits", [])
    specs = recorded if isinstance(recorded, list) else [recorded]
    return {module: spec.index for spec in specs for module in model.modules() if isinstance(module, spec.target_class)}
