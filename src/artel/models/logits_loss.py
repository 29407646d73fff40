"""Any loss of a model's logits, and whatever else is made of them, for some thousand positions at a time.

`loss.py` knows the gradient of the cross-entropy. Here PyTorch finds that of any loss, from the logits of one chunk of
positions, in the forward pass: logits are neither kept nor computed twice, and there are never those of all positions.
A head that is sharded by vocabulary is applied by all processes, each to its own ids; every process is given the logits
of all ids of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from artel.models.loss import ChunkedHead, Products, head_arguments
from artel.models.output_head import hidden_states_as_logits, output_head
from artel.models.profiler_ranges import profiler_range

LossOfLogits = Callable[[torch.Tensor, slice], torch.Tensor]
"""(logits, float32 (count, vocabulary); which of the positions) → sums, float32 (numbers,), the first is the loss."""

# Of float32 logits at a time: the loss makes about eight tensors of that size.
_CHUNK_BYTES = {"cpu": 16 * 2**20, "cuda": 64 * 2**20}


class PositionLogits:
    """The logits that a model gives at some positions, without gradient, computed chunk by chunk when they are read.

    The model's output head must be there as long as it is read: under FSDP its weights are gathered while the model is
    run.
    """

    def __init__(self, model: PreTrainedModel, inputs: dict[str, Any], places: torch.Tensor) -> None:
        """Runs `model` with `inputs`; `places`, int64 (count,), are the positions in the flattened rows."""
        with torch.no_grad():
            self._outputs, head = _at_places(model, inputs, places)
            self._head = None
            if head is not None:
                self._head = ChunkedHead(*_arguments(self._outputs, head), (False, False, False))

    def read(self, chunk: slice) -> torch.Tensor:
        """float32 (count, vocabulary)."""
        with torch.no_grad(), torch.autocast(self._outputs.device.type, enabled=False):
            return self._outputs[chunk].float() if self._head is None else self._head.logits(chunk)

    def chunks(self) -> Iterator[slice]:
        """Pieces of the positions, in order, whose logits fit into memory."""
        if self._head is not None:
            return self._head.chunks()
        return (slice(start, start + 128) for start in range(0, len(self._outputs), 128))


def loss_of_logits(
    model: PreTrainedModel, inputs: dict[str, Any], places: torch.Tensor, loss: LossOfLogits, numbers: int
) -> torch.Tensor:
    """Call `model` with `inputs`: sums of `loss` over the positions, float32 (`numbers`,). The first has a gradient.

    `places`, int64 (count,), are the positions in the flattened rows. A model without a plain output head gives all its
    logits at once.
    """
    outputs, head = _at_places(model, inputs, places)
    with profiler_range("artel: loss"):
        if head is None:
            return loss(outputs.float(), slice(0, len(outputs)))
        sums: torch.Tensor = _LossOfLogits.apply(*_arguments(outputs, head), loss, numbers)
        return sums


def _at_places(
    model: PreTrainedModel, inputs: dict[str, Any], places: torch.Tensor
) -> tuple[torch.Tensor, torch.nn.Linear | None]:
    """What the model gives at the positions, (count, …): hidden states and the head to apply; or logits, and None."""
    head = output_head(model)
    with hidden_states_as_logits(head):
        outputs = model(**inputs).logits
    return outputs.flatten(0, 1)[places], head


def _arguments(
    hidden: torch.Tensor, head: torch.nn.Linear
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Products]:
    """What the head's products are computed of: hidden states, weight, bias, and how."""
    chunk_bytes = _CHUNK_BYTES.get(hidden.device.type, 2**24)
    no_targets = hidden.new_empty(0)
    states, weight, bias, _, products = head_arguments(hidden, head.weight, head.bias, no_targets, False, chunk_bytes)
    if products.shard is not None:  # a chunk has the logits of all processes
        products = replace(products, chunk_bytes=chunk_bytes // products.shard.size)
    return states, weight, bias, products


class _LossOfLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        products: Products,
        loss: LossOfLogits,
        numbers: int,
    ) -> torch.Tensor:
        total = torch.zeros(numbers, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head = ChunkedHead(hidden, weight, bias, products, ctx.needs_input_grad[:3])
            for chunk in head.chunks():
                logits = head.logits(chunk)
                if not head.needs_grad:
                    total += loss(logits, chunk)
                    continue
                with torch.enable_grad():
                    sums = loss(logits.requires_grad_(), chunk)
                    (grad,) = torch.autograd.grad(sums[0], logits)
                total += sums.detach()
                head.add_whole(chunk, grad)
                del logits, sums, grad  # before the next chunk's are there
            ctx.grads = head.gradients()
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the backward pass of this loss runs once only, and it has run")
        grads, ctx.grads = ctx.grads, None
        return *(None if grad is None else grad.mul_(grad_output[0]) for grad in grads), None, None, None
