"""Losses other than cross-entropy, computed from the logits of a few thousand positions at a time.

`loss.py` knows the gradient of cross-entropy. Here autograd finds the gradient of any loss of the logits of one chunk,
already in the forward pass: logits are neither saved nor computed twice, and never exist for all positions at once.
With a head sharded by vocabulary, each process computes the logits of its own ids and then gathers those of all ids of
the chunk.

`target_log_probs` gives preference losses the log-probability of each target, with its own gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from artel.models.compile import has_compiled_layers
from artel.models.cross_entropy_grad import row_entropies
from artel.models.forward_pass import profiler_range
from artel.models.loss import ChunkedHead, HeadSettings, head_arguments
from artel.models.output_head import hidden_states_as_logits, output_head

LogitsLoss = Callable[[torch.Tensor, slice], torch.Tensor]
"""(logits, float32 (count, vocabulary); their slice of the positions) → sums, float32 (size,), the loss first."""

# Bytes of float32 logits at a time. The loss allocates about eight tensors of that size.
_CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 64 * 2**20}


class PositionLogits:
    """A model's logits at some positions, without gradient, computed chunk by chunk as they are read.

    The output head must stay available until then: under FSDP its weights are gathered only while the model runs.
    """

    def __init__(self, model: PreTrainedModel, inputs: dict[str, Any], positions: torch.Tensor) -> None:
        """Run `model` on `inputs`. `positions`, int64 (count,): indices into the flattened rows."""
        with torch.no_grad():
            self._outputs, head = _run_at_positions(model, inputs, positions)
            self._head = None
            if head is not None:
                self._head = ChunkedHead(*_chunked_head_arguments(self._outputs, head), (False, False, False))

    def read(self, chunk: slice) -> torch.Tensor:
        """Return the logits of a chunk, float32 (count, vocabulary)."""
        with torch.no_grad(), torch.autocast(self._outputs.device.type, enabled=False):
            return self._outputs[chunk].float() if self._head is None else self._head.logits(chunk)

    def chunks(self) -> Iterator[slice]:
        """Yield slices of the positions, in order, whose logits fit into memory."""
        if self._head is not None:
            return self._head.chunks()
        return (slice(start, start + 128) for start in range(0, len(self._outputs), 128))


def loss_of_logits(
    model: PreTrainedModel, inputs: dict[str, Any], positions: torch.Tensor, loss: LogitsLoss, num_sums: int
) -> torch.Tensor:
    """Run `model` on `inputs` and return the sums of `loss` over the positions, float32 (`num_sums`,).

    Only the first sum has a gradient. `positions`, int64 (count,): indices into the flattened rows. A model without a
    plain output head computes all its logits at once.
    """
    outputs, head = _run_at_positions(model, inputs, positions)
    with profiler_range("artel: loss"):
        if head is None:
            return loss(outputs.float(), slice(0, len(outputs)))
        sums: torch.Tensor = _LogitsLoss.apply(*_chunked_head_arguments(outputs, head), loss, num_sums)
        return sums


def _run_at_positions(
    model: PreTrainedModel, inputs: dict[str, Any], positions: torch.Tensor
) -> tuple[torch.Tensor, torch.nn.Linear | None]:
    """Return the hidden states at the positions and the head to apply, or the logits and None; (count, …)."""
    head = output_head(model)
    with hidden_states_as_logits(head):
        outputs = model(**inputs).logits
    return outputs.flatten(0, 1)[positions], head


def _chunked_head_arguments(
    hidden: torch.Tensor, head: torch.nn.Linear
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, HeadSettings]:
    """Return the first arguments of `ChunkedHead`: hidden states, weight, bias, settings of the head's matmul."""
    chunk_bytes = _CHUNK_BYTES.get(hidden.device.type, 2**24)
    no_targets = hidden.new_empty(0)
    states, weight, bias, _, settings = head_arguments(hidden, head.weight, head.bias, no_targets, False, chunk_bytes)
    if settings.shard is not None:  # a chunk has the logits of all processes
        settings = replace(settings, chunk_bytes=chunk_bytes // settings.shard.size)
    return states, weight, bias, settings


class _LogitsLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        settings: HeadSettings,
        loss: LogitsLoss,
        num_sums: int,
    ) -> torch.Tensor:
        loss_sums = torch.zeros(num_sums, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head = ChunkedHead(hidden, weight, bias, settings, ctx.needs_input_grad[:3])
            for chunk in head.chunks():
                logits = head.logits(chunk)
                if not head.needs_grad:
                    loss_sums += loss(logits, chunk)
                    continue
                with torch.enable_grad():
                    sums = loss(logits.requires_grad_(), chunk)
                    (grad,) = torch.autograd.grad(sums[0], logits)
                loss_sums += sums.detach()
                head.add_full(chunk, grad)
                del logits, sums, grad  # free them before the next chunk
            ctx.grads = head.gradients()
        return loss_sums

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the backward pass of this loss can run only once")
        grads, ctx.grads = ctx.grads, None
        return *(None if grad is None else grad.mul_(grad_output[0]) for grad in grads), None, None, None


def target_log_probs(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    targets: torch.Tensor,
    positions: torch.Tensor,
    *,
    with_entropies: bool = False,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `model` on `inputs`. Return (log-probability of each target, entropy of the prediction), in nats.

    Both are float32 (count,). Entropies have no gradient; None without `with_entropies`, as they take twice as long as
    the log-probabilities.

    targets int64 (count,). `positions`, int64 (count,): indices into the flattened rows that predict the targets. One
    position may predict several. `temperature`: divides the logits.
    """
    outputs, head = _run_at_positions(model, inputs, positions)
    bias: torch.Tensor | None = None if head is None else head.bias
    if temperature != 1:  # of hidden states and bias, which is the same and needs no logits
        outputs, bias = outputs / temperature, None if bias is None else bias / temperature
    with profiler_range("artel: loss"):
        if head is None:
            logits = outputs.float()
            entropies = row_entropies(logits.detach(), None) if with_entropies else None
            return -F.cross_entropy(logits, targets, reduction="none"), entropies
        compiled = has_compiled_layers(model)
        return linear_log_probs(outputs, head.weight, bias, targets, compiled=compiled, with_entropies=with_entropies)


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
    """Return (log-probability of each target, 0 where there is none; entropy at each position), in nats.

    Both are float32 (count,); arguments as for `linear_cross_entropy`. In that function the gradient is known up to one
    common factor. Here every position has a different factor, known only in the backward pass. With a frozen head, the
    forward pass computes the gradient of hidden for a factor of 1. Otherwise the backward pass computes the logits
    again, since the gradient of weight is a sum over positions. Entropies have no gradient; None without
    `with_entropies`.
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
        settings: HeadSettings,
        with_entropies: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_hidden, *head_needs = ctx.needs_input_grad[:3]
        ctx.computes_again = any(head_needs)
        log_probs = torch.empty(len(targets), device=hidden.device)
        entropies = torch.empty(len(targets) if with_entropies else 0, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head = ChunkedHead(hidden, weight, bias, settings, (needs_hidden and not ctx.computes_again, False, False))
            for chunk in head.chunks():
                losses, _, grad_logits = head.losses(chunk, targets[chunk], entropies if with_entropies else None)
                log_probs[chunk] = -losses
                head.add(chunk, grad_logits)
                del grad_logits
            ctx.grad_hidden = head.gradients()[0]
        if ctx.computes_again:
            ctx.save_for_backward(hidden, weight, bias, targets)
            ctx.settings = settings
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        factors = -grad_output[:, None]
        if not ctx.computes_again:
            return (ctx.grad_hidden * factors).to(ctx.grad_hidden.dtype), None, None, None, None, None
        hidden, weight, bias, targets = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            head = ChunkedHead(hidden, weight, bias, ctx.settings, ctx.needs_input_grad[:3])
            for chunk in head.chunks():
                _, _, grad_logits = head.losses(chunk, targets[chunk])
                grad_logits[: len(factors[chunk])].mul_(factors[chunk])
                head.add(chunk, grad_logits)
                del grad_logits
            return *head.gradients(), None, None, None
