"""Cross-entropy's gradient by the logits: softmax minus target, in as few passes over memory as can be.

Logits are the largest tensor of a training step, and what is done to each of them costs little but reading and writing
it. PyTorch's operators, here, pass over them seven times; on a CPU, where layers are compiled, cpu_slopes.py does it in
one pass and holds no copy: of 2,048 x 16,384 in bf16 on two cores 49 ms, then 9 (benchmarks/NOTES.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from artel.models.targets import IGNORED

# Columns of a block in which the highest logit is looked for on a CPU.
_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Share:
    """This process's ids among those of the processes that share a vocabulary."""

    group: dist.ProcessGroup
    size: int
    first: int
    most: int
    """How many ids a process has; the last may have fewer."""

    @classmethod
    def of(cls, weight: DTensor) -> Share:
        mesh = weight.device_mesh
        most = -(-weight.shape[0] // mesh.size())
        return cls(mesh.get_group(), mesh.size(), mesh.get_local_rank() * most, most)

    def best(self, scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all processes' highest scores, float32 (count,), and their ids here: the highest and its id."""
        found = torch.stack([scores, (ids + self.first).float()])  # exact up to 16 million ids
        everywhere = found.new_empty(self.size, *found.shape)
        dist.all_gather(list(everywhere), found, group=self.group)
        highest, process = everywhere[:, 0].max(dim=0)
        return highest, everywhere[:, 1].gather(0, process[None])[0].long()

    def add_up(self, *numbers: torch.Tensor) -> Iterable[torch.Tensor]:
        """The sum over the processes of each of some tensors of one shape."""
        together = torch.stack(numbers)
        dist.all_reduce(together, group=self.group)
        return together


def slopes(
    logits: torch.Tensor, targets: torch.Tensor, vocabulary: int, share: Share | None, wanted: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(summed loss, likeliest ids, gradient of the summed loss by the logits in their precision) of some positions.

    With `share` the logits are those of its ids; `vocabulary` is how many they are.
    """
    scores = logits.float()
    scores[:, vocabulary:] = -torch.inf  # columns that only fill up
    best, guesses = highest(scores)
    counted = targets != IGNORED
    if share is None:
        here, columns = counted, targets.clamp(min=0)[:, None]
    else:
        best, guesses = share.best(best, guesses)
        place = targets - share.first
        here = (place >= 0) & (place < vocabulary)  # `IGNORED` is below them all
        columns = place.clamp(0, vocabulary - 1)[:, None]
    at_target = scores.gather(1, columns)[:, 0]
    shares = scores.sub_(best[:, None]).exp_()  # in place: these passes over memory are what this loss costs
    total = shares.sum(dim=1)
    if share is not None:
        total, at_target = share.add_up(total, at_target.where(here, 0.0))
    loss = torch.where(counted, best + total.log() - at_target, 0.0).sum()
    if not wanted:
        return loss, guesses, shares
    shares.mul_((counted / total)[:, None])
    shares.scatter_add_(1, columns, -here.to(shares.dtype)[:, None])
    return loss, guesses, shares.to(logits.dtype)


def highest(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest of each row and its place, as `scores.max(dim=1)`: float32 (count,), int64 (count,).

    On a CPU PyTorch looks for a place one number at a time, 37 ms for 2,048 x 16,384; the highest of a block it finds
    with vectors (3 ms), and then a place is looked for among the blocks and in one of them.
    """
    columns = scores.shape[1]
    whole = columns - columns % _BLOCK
    if scores.device.type != "cpu" or not whole:
        return scores.max(dim=1)
    highest = [scores[:, :whole].unflatten(1, (-1, _BLOCK)).amax(dim=2)]
    if whole < columns:
        highest.append(scores[:, whole:].amax(dim=1, keepdim=True))
    best, block = torch.cat(highest, dim=1).max(dim=1)
    places = block[:, None] * _BLOCK + torch.arange(_BLOCK)
    places = places.clamp_(max=columns - 1)  # the last block may be shorter
    found = scores.gather(1, places).argmax(dim=1, keepdim=True)
    return best, places.gather(1, found)[:, 0]
