"""How processes that share each sequence compute attention over all of it: by gathering, or giving heads for parts.

    gather    each gathers the keys and values of all, and computes its own part's queries. The gradients of keys and
              values are summed where they came from. (Llama 3: Dubey et al. 2024, section 3.3.2.)
    ulysses   each gives all but its share of the heads for the whole sequence of that share, before the kernel and back
              after it (Jacobs et al. 2023, "DeepSpeed Ulysses").

Collectives are PyTorch's functional ones, which can be compiled. All processes must come here with the same layers in
the same order, as they do when layers are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from artel.models.attention import AttentionOptions, attend
from artel.parallel.context.chunks import Part


@dataclass(frozen=True, slots=True)
class Gather:
    """Keys and values of all processes, queries of this one."""

    part: Part
    group: str
    """The name of the process group."""

    def query_ranges(self, part: int) -> Sequence[range]:
        return self.part.spans(part)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionOptions
    ) -> torch.Tensor:
        query, key, value = in_autocast(query, key, value)
        both = torch.cat([key, value], dim=-1)  # one collective instead of two
        every = _Gathered.apply(both[None], self.part.size, self.group)
        keys, values = self.part.joined(every).split([key.shape[-1], value.shape[-1]], dim=-1)
        return attend(query, keys, values, how, self.part.spans(query.shape[2]))


@dataclass(frozen=True, slots=True)
class Ulysses:
    """A share of the heads, of the whole sequence."""

    part: Part
    group: str

    def query_ranges(self, part: int) -> Sequence[range]:
        return (range(part * self.part.size),)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: AttentionOptions
    ) -> torch.Tensor:
        size = self.part.size
        query, key, value = in_autocast(query, key, value)
        # Fewer heads of keys than processes: each is sent to all whose queries look at it.
        copies = math.lcm(key.shape[1], size) // key.shape[1]
        shares = [_shares(each, size) for each in (query, repeated(key, copies), repeated(value, copies))]
        flat = torch.cat([share.flatten(1) for share in shares], dim=1)  # one collective instead of three
        lengths = [share[0].numel() for share in shares]
        pieces = _Exchanged.apply(flat, self.group).split(lengths, dim=1)
        query, key, value = (
            self.part.joined(piece.view_as(share)) for piece, share in zip(pieces, shares, strict=True)
        )
        mixed = self.part.cut(attend(query, key, value, how)).contiguous()
        return _Exchanged.apply(mixed, self.group).movedim(0, 1).flatten(1, 2)


def in_autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """In the precision that autocast would give the kernel: half as much to send as what rotary embeddings leave."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]


def repeated(heads: torch.Tensor, copies: int) -> torch.Tensor:
    """Each head `copies` times: (rows, heads, …) -> (rows, heads x copies, …)."""
    return heads if copies == 1 else heads.repeat_interleave(copies, dim=1)


def _shares(heads: torch.Tensor, size: int) -> torch.Tensor:
    """What each process gets: (rows, heads, part, width) -> (size, rows, heads / size, part, width)."""
    return heads.unflatten(1, (size, -1)).movedim(1, 0)


class _Gathered(torch.autograd.Function):
    """(1, …) of each process -> (size, …); each gets the sum of the gradients by what it gave."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, size: int, group: str) -> torch.Tensor:
        ctx.size, ctx.group = size, group
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(local.contiguous(), size, group)
        return torch.ops._c10d_functional.wait_tensor(gathered)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor, None, None]:
        grad_output = grad_outputs[0].contiguous()
        gathered = torch.ops._c10d_functional.reduce_scatter_tensor(grad_output, "sum", ctx.size, ctx.group)
        return torch.ops._c10d_functional.wait_tensor(gathered), None, None


class _Exchanged(torch.autograd.Function):
    """(size, …): piece i goes to process i, and piece i of the result came from it; so do the gradients."""

    @staticmethod
    def forward(ctx: Any, pieces: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return _exchanged(pieces, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor, None]:
        return _exchanged(grad_outputs[0].contiguous(), ctx.group), None


def _exchanged(pieces: torch.Tensor, group: str) -> torch.Tensor:
    each = [1] * len(pieces)
    return torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_to_all_single(pieces, each, each, group)
    )
