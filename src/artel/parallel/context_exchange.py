"""Shards of sequences, and two exchanges that compute attention over the full sequence.

    gather    every process gathers the keys and values of all, and computes the queries of its own shard. The gradients
              of keys and values return to their processes and are summed there (Llama 3: Dubey et al. 2024, section
              3.3.2).
    ulysses   before the kernel, every process gets the full sequence for a fraction of the heads and sends away its
              shard of the other heads. After the kernel it sends them back (Jacobs et al. 2023, "DeepSpeed Ulysses").

The third exchange is `ring_attention.py`. Collectives are PyTorch's functional ones, which can be compiled. All
processes must call them for the same layers in the same order, as they do when layers are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from artel.models.attention import AttentionOptions, attend


@dataclass(frozen=True, slots=True)
class SequenceShard:
    """The shard of each sequence held by process `rank` of `size`.

    Under a causal mask, late tokens attend to more tokens than early ones. So the sequence is cut into 2n chunks for n
    processes, and process i holds chunks i and 2n - 1 - i. All such pairs have the same work. Without a causal mask
    each process holds one chunk of n.
    """

    rank: int
    size: int
    balanced: bool
    """True if the shard is a chunk from either end, to balance the work under a causal mask."""

    @property
    def multiple(self) -> int:
        """Number that must divide the length of a sequence."""
        return 2 * self.size if self.balanced else self.size

    def spans(self, length: int) -> Sequence[range]:
        """Return the ranges of positions of this shard. `length`: tokens in the shard."""
        if not self.balanced:
            return (range(self.rank * length, (self.rank + 1) * length),)
        chunk = length // 2
        first, last = self.rank, 2 * self.size - 1 - self.rank
        return range(first * chunk, (first + 1) * chunk), range(last * chunk, (last + 1) * chunk)

    def positions(self, length: int, device: torch.device | None = None) -> torch.Tensor:
        """Return the positions of `spans` as an int64 tensor (length,)."""
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in self.spans(length)])

    def join(self, shards: torch.Tensor) -> torch.Tensor:
        """All shards (size, rows, heads, shard length, width) -> the sequence (rows, heads, length, width)."""
        if self.balanced:
            early, late = shards.unflatten(3, (2, -1)).unbind(3)
            shards = torch.cat([early, late.flip(0)])
        return shards.movedim(0, 2).flatten(2, 3)

    def split(self, sequence: torch.Tensor) -> torch.Tensor:
        """Inverse of `join`: (rows, heads, length, width) -> (size, rows, heads, shard length, width)."""
        chunks = sequence.unflatten(2, (self.multiple, -1)).movedim(2, 0)
        if not self.balanced:
            return chunks
        early, late = chunks.chunk(2)
        return torch.stack([early, late.flip(0)], dim=3).flatten(3, 4)


@dataclass(frozen=True, slots=True)
class Gather:
    """Keys and values of all processes, queries of this one."""

    shard: SequenceShard
    group: str
    """Name of the process group."""

    def query_ranges(self, length: int) -> Sequence[range]:
        return self.shard.spans(length)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        query, key, value = in_autocast(query, key, value)
        key_value = torch.cat([key, value], dim=-1)  # one collective instead of two
        gathered = _AllGather.apply(key_value[None], self.shard.size, self.group)
        keys, values = self.shard.join(gathered).split([key.shape[-1], value.shape[-1]], dim=-1)
        return attend(query, keys, values, options, self.shard.spans(query.shape[2]))


@dataclass(frozen=True, slots=True)
class Ulysses:
    """A fraction of the heads, over the full sequence."""

    shard: SequenceShard
    group: str

    def query_ranges(self, length: int) -> Sequence[range]:
        return (range(length * self.shard.size),)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        size = self.shard.size
        query, key, value = in_autocast(query, key, value)
        # With fewer key heads than processes, send each to every process whose queries use it.
        copies = math.lcm(key.shape[1], size) // key.shape[1]
        key, value = repeat_heads(key, copies), repeat_heads(value, copies)
        by_process = [_split_by_process(heads, size) for heads in (query, key, value)]
        flat = torch.cat([heads.flatten(1) for heads in by_process], dim=1)  # one collective instead of three
        lengths = [heads[0].numel() for heads in by_process]
        received = _AllToAll.apply(flat, self.group).split(lengths, dim=1)
        query, key, value = (
            self.shard.join(flat_heads.view_as(heads)) for flat_heads, heads in zip(received, by_process, strict=True)
        )
        output = self.shard.split(attend(query, key, value, options)).contiguous()
        return _AllToAll.apply(output, self.group).movedim(0, 1).flatten(1, 2)


def in_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast to the precision that autocast gives the kernel. Rotary embeddings are float32: twice as much to send."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]


def repeat_heads(heads: torch.Tensor, copies: int) -> torch.Tensor:
    """Repeat each head `copies` times: (rows, heads, …) -> (rows, heads x copies, …)."""
    return heads if copies == 1 else heads.repeat_interleave(copies, dim=1)


def _split_by_process(heads: torch.Tensor, size: int) -> torch.Tensor:
    """Heads by receiving process: (rows, heads, length, width) -> (size, rows, heads / size, length, width)."""
    return heads.unflatten(1, (size, -1)).movedim(1, 0)


class _AllGather(torch.autograd.Function):
    """(1, …) from each process -> (size, …) on all. Each process gets the sum of the gradients of its own tensor."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, size: int, group: str) -> torch.Tensor:
        ctx.size = size
        ctx.group = group
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(local.contiguous(), size, group)
        return torch.ops._c10d_functional.wait_tensor(gathered)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor, None, None]:
        grad_output = grad_outputs[0].contiguous()
        scattered = torch.ops._c10d_functional.reduce_scatter_tensor(grad_output, "sum", ctx.size, ctx.group)
        return torch.ops._c10d_functional.wait_tensor(scattered), None, None


class _AllToAll(torch.autograd.Function):
    """(size, …): row i goes to process i, and row i of the result comes from it. Gradients return the same way."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(rows, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor, None]:
        return _all_to_all(grad_outputs[0].contiguous(), ctx.group), None


def _all_to_all(rows: torch.Tensor, group: str) -> torch.Tensor:
    sizes = [1] * len(rows)
    return torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_to_all_single(rows, sizes, sizes, group)
    )
