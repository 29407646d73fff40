"""Log-probabilities of targets, each with a gradient of its own, and entropies: without the logits of all positions.

What preferences are computed from. `loss.py` has the head's products for some thousand positions at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from artel.models.compile import has_compiled_layers
from artel.models.cross_entropy_grad import row_entropies
from artel.models.loss import ChunkedHead, Products, head_arguments
from artel.models.output_head import hidden_states_as_logits, output_head
from artel.models.profiler_ranges import profiler_range


def target_log_probs(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    targets: torch.Tensor,
    places: torch.Tensor,
    *,
    with_entropies: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call `model` with `inputs`: (log-probability of each target, entropy where it is predicted), in nats.

    Both are float32 (count,). Entropies have no gradient; None unless they are asked for: they take twice as long as
    the log-probabilities.

    targets int64 (count,); `places`, int64 (count,), are the positions in the flattened rows that predict them. A
    position may predict several.
    """
    head = output_head(model)
    with hidden_states_as_logits(head):
        outputs = model(**inputs).logits
    with profiler_range("artel: loss"):
        outputs = outputs.flatten(0, 1)[places]
        if head is None:
            logits = outputs.float()
            entropies = row_entropies(logits.detach(), None) if with_entropies else None
            return -F.cross_entropy(logits, targets, reduction="none"), entropies
        compiled = has_compiled_layers(model)
        return linear_log_probs(
            outputs, head.weight, head.bias, targets, compiled=compiled, with_entropies=with_entropies
        )


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    compiled: bool = False,
    chunk_bytes: int | None = None,
    with_entropies: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log-probability of each target, 0 where there is none; entropy at each position), in nats, float32 (count,).

    Arguments are those of `linear_cross_entropy`. Its gradient is known but for one factor; here each position has a
    factor of its own, which only the backward pass brings. With a frozen head the forward pass computes the gradient of
    hidden for a factor of 1. Otherwise the backward pass computes the logits again, since the gradient of weight is a
    sum over positions. Entropies have no gradient; None without `with_entropies`.
    """
    arguments = head_arguments(hidden, weight, bias, targets, compiled, chunk_bytes)
    log_probs, entropies = _LinearLogProbs.apply(*arguments, with_entropies)
    return log_probs, entropies if with_entropies else None


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        products: Products,
        with_entropies: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_hidden, *needs_of_head = ctx.needs_input_grad[:3]
        ctx.computes_again = any(needs_of_head)
        log_probs = torch.empty(len(targets), device=hidden.device)
        entropies = torch.empty(len(targets) if with_entropies else 0, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head = ChunkedHead(hidden, weight, bias, products, (needs_hidden and not ctx.computes_again, False, False))
            for chunk in head.chunks():
                losses, _, grad_logits = head.losses(chunk, targets[chunk], entropies if with_entropies else None)
                log_probs[chunk] = -losses
                head.add(chunk, grad_logits)
                del grad_logits
            ctx.grad_hidden = head.gradients()[0]
        if ctx.computes_again:
            ctx.save_for_backward(hidden, weight, bias, targets)
            ctx.products = products
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        factors = -grad_output[:, None]
        if not ctx.computes_again:
            return (ctx.grad_hidden * factors).to(ctx.grad_hidden.dtype), None, None, None, None, None
        hidden, weight, bias, targets = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            head = ChunkedHead(hidden, weight, bias, ctx.products, ctx.needs_input_grad[:3])
            for chunk in head.chunks():
                _, _, grad_logits = head.losses(chunk, targets[chunk])
                grad_logits[: len(factors[chunk])].mul_(factors[chunk])
                head.add(chunk, grad_logits)
                del grad_logits
            return *head.gradients(), None, None, None
