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

from artel.models.cross_entropy import cross_entropy_, row_function
from artel.models.cross_entropy_rows import bound
from artel.models.forward_pass import profiler_range
from artel.models.loss import ChunkedHead, HeadSettings, effective_device, head_arguments
from artel.models.output_head import OutputHead, hidden_states_as_logits, output_head

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
            self._head, self._soft_cap = None, 0.0 if head is None else head.soft_cap
            if head is not None:
                self._head = ChunkedHead(*_chunked_head_arguments(self._outputs, head), (False, False, False))

    def read(self, chunk: slice) -> torch.Tensor:
        """Return the logits of a chunk, float32 (count, vocabulary)."""
        with torch.no_grad(), torch.autocast(self._outputs.device.type, enabled=False):
            logits = self._outputs[chunk].float() if self._head is None else self._head.logits(chunk)
            return bound(logits, self._soft_cap)

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
) -> tuple[torch.Tensor, OutputHead | None]:
    """Return the hidden states at the positions and the head to apply, or the logits and None; (count, …)."""
    head = output_head(model)
    with hidden_states_as_logits(head):
        outputs = model(**inputs).logits
    # Positions may repeat, and on a GPU only the gradient of an index adds repeated rows in a fixed order.
    return outputs.flatten(0, 1)[positions], head


def _chunked_head_arguments(
    hidden: torch.Tensor, head: OutputHead
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, HeadSettings]:
    """Return the first arguments of `ChunkedHead`: hidden states, weight, bias, settings of the head's matmul."""
    no_targets = hidden.new_empty(0)
    linear = head.linear
    states, weight, bias, _, settings = head_arguments(
        hidden, linear.weight, linear.bias, no_targets, head.soft_cap, None
    )
    # A chunk has the float32 logits of all processes.
    num_shards = 1 if settings.shard is None else settings.shard.size
    chunk_bytes = _CHUNK_BYTES.get(effective_device(hidden), 2**24) * settings.dtype.itemsize // 4 // num_shards
    return states, weight, bias, replace(settings, chunk_bytes=chunk_bytes)


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
                    loss_sums += loss(bound(logits, settings.soft_cap), chunk)
                    continue
                with torch.enable_grad():
                    sums = loss(bound(logits.requires_grad_(), settings.soft_cap), chunk)
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
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `model` on `inputs`. Return (log-probability of each target, entropy of the prediction), in nats.

    Both are float32 (count,). Entropies have no gradient.

    targets int64 (count,). `positions`, int64 (count,): indices into the flattened rows that predict the targets. One
    position may predict several. `temperature`: divides the logits.
    """
    outputs, head = _run_at_positions(model, inputs, positions)
    with profiler_range("artel: loss"):
        if head is None:
            logits = outputs.float() / temperature
            compute, vocabulary = row_function(effective_device(logits), logits.dtype), logits.shape[1]
            losses = cross_entropy_(logits.detach(), targets, compute=compute, vocabulary=vocabulary, needs_grad=False)
            return -F.cross_entropy(logits, targets, reduction="none"), losses.entropies
        bias: torch.Tensor | None = head.linear.bias
        # Dividing hidden states, bias and bound is the same as dividing the logits.
        if temperature != 1:
            outputs, bias = outputs / temperature, None if bias is None else bias / temperature
        soft_cap = head.soft_cap / temperature
        return linear_log_probs(outputs, head.linear.weight, bias, targets, soft_cap=soft_cap)


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    soft_cap: float = 0.0,
    chunk_bytes: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probability of each target, 0 where there is none; entropy at each position), in nats.

    Both are float32 (count,); arguments as for `linear_cross_entropy`. In that function the gradient is known up to one
    common factor. Here every position has a different factor, known only in the backward pass. With a frozen head, the
    forward pass computes the gradient of hidden for a factor of 1. Otherwise the backward pass computes the logits
    again, since the gradient of weight is a sum over positions. Entropies have no gradient.
    """
    arguments = head_arguments(hidden, weight, bias, targets, soft_cap, chunk_bytes)
    log_probs, entropies = _LinearLogProbs.apply(*arguments)
    return log_probs, entropies


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        settings: HeadSettings,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        needs_hidden, *head_needs = ctx.needs_input_grad[:3]
        ctx.computes_again = any(head_needs)
        log_probs = torch.empty(len(targets), device=hidden.device)
        entropies = torch.empty_like(log_probs)
        with torch.autocast(hidden.device.type, enabled=False):
            head = ChunkedHead(hidden, weight, bias, settings, (needs_hidden and not ctx.computes_again, False, False))
            for chunk in head.chunks():
                result, grad_logits = head.losses(chunk, targets[chunk])
                log_probs[chunk], entropies[chunk] = -result.losses, result.entropies
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
        factors = -grad_output
        if not ctx.computes_again:
            return (ctx.grad_hidden * factors[:, None]).to(ctx.grad_hidden.dtype), None, None, None, None
        hidden, weight, bias, targets = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            head = ChunkedHead(hidden, weight, bias, ctx.settings, ctx.needs_input_grad[:3])
            for chunk in head.chunks():
                _, grad_logits = head.losses(chunk, targets[chunk], factors[chunk])
                head.add(chunk, grad_logits)
                del grad_logits
            return *head.gradients(), None, None
