"""Ring attention: keys and values go round, and no process ever holds more than two parts of them.

Each process computes its queries with one process's keys and values at a time, while the next are on their way; the
results are merged by their log-sum-exp, and the backward pass goes round once more with the gradients of keys and
values (Liu et al. 2023, "Ring Attention with Blockwise Transformers"). With a chunk from either end of the sequence
(`parts.py`) each step computes either all queries with the early keys or the late queries with all keys: half of a full
product, whatever the process (Brandon et al. 2023, "Striped Attention", solves the same by stripes).

It pays where the keys and values of a whole sequence do not fit beside one layer's other activations. The kernels are
those of PyTorch that give the log-sum-exp: FlashAttention 2 on a GPU, PyTorch's own on a processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from artel.errors import InputError
from artel.models.attention import AttentionOptions
from artel.parallel.context.chunks import Part
from artel.parallel.context.gather_ulysses import in_autocast, repeated


@dataclass(frozen=True, slots=True)
class Ring:
    """Keys and values of one process after another; no mask, no window, no dropout (`context_problems` says so)."""

    part: Part
    group: str

    def query_ranges(self, part: int) -> Sequence[range]:
        return self.part.spans(part)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionOptions
    ) -> torch.Tensor:
        if how.mask is not None or how.dropout:
            raise ValueError("ring attention has no mask and no dropout")
        query, key, value = in_autocast(query, key, value)
        if query.device.type == "cuda" and query.dtype == torch.float32:
            fix = "write train.precision: bf16, or parallel.exchange: gather"
            raise InputError.at("parallel.exchange", "ring: its kernel on a GPU has no float32", fix)
        scale = query.shape[-1] ** -0.5 if how.scale is None else how.scale
        return _Ring.apply(query, key, value, _Round(self.part, self.group, how.causal, scale))


class _Round(NamedTuple):
    part: Part
    group: str
    causal: bool
    scale: float

    def seen(self, step: int, length: int) -> tuple[slice, slice, bool]:
        """(queries, keys, whether causal) of `length` tokens each to be computed at a step.

        The keys are then those of the process `step` before this one.
        """
        every = slice(0, length)
        if not self.causal or step == 0:
            return every, every, self.causal
        if step <= self.part.rank:  # of a process before this one: its early keys lie before all, its late ones behind
            return every, slice(0, length // 2), False
        return slice(length // 2, length), every, False


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: _Round) -> torch.Tensor:
        length, copies = query.shape[2], query.shape[1] // key.shape[1]
        query = query.contiguous()
        result = torch.zeros(*query.shape[:3], value.shape[-1], dtype=torch.float32, device=query.device)
        total = torch.full(query.shape[:3], -torch.inf, device=query.device)  # log-sum-exp of the scores so far
        block = [key.contiguous(), value.contiguous()]
        for step in range(ring.part.size):
            coming = [_sent(tensor, ring) for tensor in block] if step < ring.part.size - 1 else []
            queries, keys, causal = ring.seen(step, length)
            this_key, this_value = (repeated(tensor[:, :, keys], copies) for tensor in block)
            output, share, random = _forward(query[:, :, queries], this_key, this_value, causal, ring.scale)
            before = total[:, :, queries]
            after = torch.logaddexp(before, share)
            scaled = result[:, :, queries] * (before - after).exp()[..., None]
            result[:, :, queries] = scaled + output * (share - after).exp()[..., None]
            total[:, :, queries] = after
            block = [_arrived(tensor) for tensor in coming]
        output = result.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, total, *random)
        ctx.ring = ring
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value, result, total, *random = ctx.saved_tensors
        ring: _Round = ctx.ring
        length, copies = query.shape[2], query.shape[1] // key.shape[1]
        grad_output = grad_outputs[0].contiguous()
        of_query = torch.zeros_like(query, dtype=torch.float32)
        block = [key.contiguous(), value.contiguous()]
        # Gradients go round with the keys and values that they belong to, and are at home after a whole round.
        of_block = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in block]
        for step in range(ring.part.size):
            coming = [_sent(tensor, ring) for tensor in block] if step < ring.part.size - 1 else []
            queries, keys, causal = ring.seen(step, length)
            this_key, this_value = (repeated(tensor[:, :, keys], copies) for tensor in block)
            of_queries = [tensor[:, :, queries] for tensor in (grad_output, query, result, total)]
            gradients = _backward(of_queries, this_key, this_value, causal, ring.scale, random)
            of_query[:, :, queries] += gradients[0]
            for sums, part in zip(of_block, gradients[1:], strict=True):
                sums[:, :, keys] += part.unflatten(1, (-1, copies)).sum(2, dtype=torch.float32)
            of_block = [_arrived(_sent(tensor, ring)) for tensor in of_block]
            block = [_arrived(tensor) for tensor in coming]
        of_key, of_value = of_block
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None


def _sent(block: torch.Tensor, ring: _Round) -> torch.Tensor:
    """On its way to the next process, and that of the process before this one on its way here."""
    size, rank = ring.part.size, ring.part.rank
    there, here = [0] * size, [0] * size
    there[(rank + 1) % size] = here[(rank - 1) % size] = len(block)
    return torch.ops._c10d_functional.all_to_all_single(block, here, there, ring.group)


def _arrived(block: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(block)


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """(attention's result, the log-sum-exp of each query's scores, what a GPU's kernel knows of its random numbers).

    All have as many heads; the log-sum-exp is float32.
    """
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return *kernel(query, key, value, 0.0, causal, scale=scale), []
    outputs = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return outputs[0], outputs[1], list(outputs[6:8])


def _backward(
    of_queries: list[torch.Tensor],
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float,
    random: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The share of these keys and values in the gradients of queries, keys and values.

    `of_queries`: of the queries the gradient by the result, themselves, the result and the log-sum-exp over all keys.
    """
    grad_output, query, result, total = of_queries
    inputs = grad_output, query, key, value, result, total.contiguous()
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(*inputs, 0.0, causal, scale=scale)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    # All sequences are of one length, so that their ends need not be told.
    return kernel(*inputs, None, None, query.shape[2], key.shape[2], 0.0, causal, *random, scale=scale)
