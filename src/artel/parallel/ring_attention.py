"""Ring attention: each process passes its keys and values around the ring and holds at most two shards at a time.

Each process computes its queries with one process's keys and values at a time, while the next ones arrive. Results are
merged by their log-sum-exp, and the backward pass goes round again with the gradients of keys and values (Liu et al.
2023, "Ring Attention with Blockwise Transformers"). Since each process holds a chunk from either end of the sequence
(`SequenceShard`), each step computes either all queries with the early keys or the late queries with all keys: half of
the full work on every process (Brandon et al. 2023, "Striped Attention", solves the same with stripes).

Use it when the keys and values of a full sequence do not fit next to one layer's other activations. It uses the PyTorch
kernels that return the log-sum-exp: FlashAttention 2 on GPUs, PyTorch's own on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from artel.errors import InputError
from artel.models.attention import AttentionOptions
from artel.parallel.context_exchange import SequenceShard, in_autocast, repeat_heads


@dataclass(frozen=True, slots=True)
class RingAttention:
    """Attends to the keys and values of one process after another. `context_problems` refuses masks and dropout."""

    shard: SequenceShard
    group: str

    def query_ranges(self, length: int) -> Sequence[range]:
        return self.shard.spans(length)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        if options.mask is not None or options.dropout:
            raise ValueError("ring attention supports neither masks nor dropout")
        query, key, value = in_autocast(query, key, value)
        if query.device.type == "cuda" and query.dtype == torch.float32:
            fix = "write train.precision: bf16, or parallel.exchange: gather"
            raise InputError.at("parallel.exchange", "ring: its GPU kernel does not support float32", fix)
        scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
        return _RingAttentionFunction.apply(
            query, key, value, _RingConfig(self.shard, self.group, options.causal, scale)
        )


class _RingConfig(NamedTuple):
    shard: SequenceShard
    group: str
    causal: bool
    scale: float

    def ranges_at_step(self, step: int, length: int) -> tuple[slice, slice, bool]:
        """Return (queries, keys, causal) to compute at a step, out of `length` tokens each.

        The keys come from the process `step` positions before this one.
        """
        all_positions = slice(0, length)
        if not self.causal or step == 0:
            return all_positions, all_positions, self.causal
        if step <= self.shard.rank:  # an earlier process: its early keys precede all queries, its late ones follow them
            return all_positions, slice(0, length // 2), False
        return slice(length // 2, length), all_positions, False


class _RingAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ring: _RingConfig
    ) -> torch.Tensor:
        length = query.shape[2]
        num_key_value_groups = query.shape[1] // key.shape[1]
        query = query.contiguous()
        accumulated = torch.zeros(*query.shape[:3], value.shape[-1], dtype=torch.float32, device=query.device)
        lse = torch.full(query.shape[:3], -torch.inf, device=query.device)  # log-sum-exp of the scores so far
        key_value = [key.contiguous(), value.contiguous()]
        for step in range(ring.shard.size):
            incoming = [_start_send(tensor, ring) for tensor in key_value] if step < ring.shard.size - 1 else []
            queries, keys, causal = ring.ranges_at_step(step, length)
            step_key, step_value = (repeat_heads(tensor[:, :, keys], num_key_value_groups) for tensor in key_value)
            step_output, step_lse, rng_state = _attention_forward(
                query[:, :, queries], step_key, step_value, causal, ring.scale
            )
            old_lse = lse[:, :, queries]
            new_lse = torch.logaddexp(old_lse, step_lse)
            scaled = accumulated[:, :, queries] * (old_lse - new_lse).exp()[..., None]
            accumulated[:, :, queries] = scaled + step_output * (step_lse - new_lse).exp()[..., None]
            lse[:, :, queries] = new_lse
            key_value = [_wait(tensor) for tensor in incoming]
        output = accumulated.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse, *rng_state)
        ctx.ring = ring
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        query, key, value, output, lse, *rng_state = ctx.saved_tensors
        ring: _RingConfig = ctx.ring
        length = query.shape[2]
        num_key_value_groups = query.shape[1] // key.shape[1]
        grad_output = grad_outputs[0].contiguous()
        query_grad = torch.zeros_like(query, dtype=torch.float32)
        key_value = [key.contiguous(), value.contiguous()]
        # Gradients travel with their keys and values, and return to their process after a full round.
        key_value_grads = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in key_value]
        for step in range(ring.shard.size):
            incoming = [_start_send(tensor, ring) for tensor in key_value] if step < ring.shard.size - 1 else []
            queries, keys, causal = ring.ranges_at_step(step, length)
            step_key, step_value = (repeat_heads(tensor[:, :, keys], num_key_value_groups) for tensor in key_value)
            by_query = [tensor[:, :, queries] for tensor in (grad_output, query, output, lse)]
            gradients = _attention_backward(by_query, step_key, step_value, causal, ring.scale, rng_state)
            query_grad[:, :, queries] += gradients[0]
            for grad_sum, gradient in zip(key_value_grads, gradients[1:], strict=True):
                grad_sum[:, :, keys] += gradient.unflatten(1, (-1, num_key_value_groups)).sum(2, dtype=torch.float32)
            key_value_grads = [_wait(_start_send(tensor, ring)) for tensor in key_value_grads]
            key_value = [_wait(tensor) for tensor in incoming]
        key_grad, value_grad = key_value_grads
        return query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype), None


def _start_send(tensor: torch.Tensor, ring: _RingConfig) -> torch.Tensor:
    """Start sending to the next process, and return the tensor being received from the previous one."""
    size, rank = ring.shard.size, ring.shard.rank
    sent, received = [0] * size, [0] * size
    sent[(rank + 1) % size] = received[(rank - 1) % size] = len(tensor)
    return torch.ops._c10d_functional.all_to_all_single(tensor, received, sent, ring.group)


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(tensor)


def _attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return (output, log-sum-exp of each query's scores in float32, state of the random generator of a GPU's kernel).

    Queries, keys and values have the same number of heads.
    """
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return *kernel(query, key, value, 0.0, causal, scale=scale), []
    outputs = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return outputs[0], outputs[1], list(outputs[6:8])


def _attention_backward(
    by_query: list[torch.Tensor],
    key: torch.Tensor,
    value: torch.Tensor,
    causal: bool,
    scale: float,
    rng_state: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values due to these keys and values.

    `by_query`: gradient of the output, queries, output, and log-sum-exp over all keys.
    """
    grad_output, query, output, lse = by_query
    inputs = grad_output, query, key, value, output, lse.contiguous()
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return kernel(*inputs, 0.0, causal, scale=scale)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    # All sequences have the same length, so cumulative lengths are None.
    return kernel(*inputs, None, None, query.shape[2], key.shape[2], 0.0, causal, *rng_state, scale=scale)
