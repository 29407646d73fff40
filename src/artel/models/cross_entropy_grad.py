"""Cross-entropy and its gradient with respect to the logits (softmax minus target), in few passes over memory.

Logits are the largest tensor of a training step, and moving them costs more than computing with them. PyTorch's
operators make seven passes here. On a CPU with compiled layers, cpu/cross_entropy.py needs one pass and no copy: 9 ms
instead of 49 for 2,048 x 16,384 in bf16 on two cores (benchmarks/NOTES.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from artel.integers import ceil_div
from artel.models import IGNORED

_ENTROPY_LOGITS = {"cpu": 2**22, "cuda": 2**26}  # logits that are copied to float32 at a time
_BLOCK = 128  # columns per block in `row_max` on a CPU


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This process's ids of a vocabulary that is sharded over a process group."""

    group: dist.ProcessGroup
    size: int
    first_id: int
    max_ids: int
    """Ids per process. The last one may have fewer."""
    vocabulary: int
    """Ids of all processes."""

    @classmethod
    def from_weight(cls, weight: DTensor) -> VocabularyShard:
        mesh = weight.device_mesh
        max_ids = ceil_div(weight.shape[0], mesh.size())
        return cls(mesh.get_group(), mesh.size(), mesh.get_local_rank() * max_ids, max_ids, weight.shape[0])

    def all_gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather the logits of all ids, (count, vocabulary), from the local (count, ids)."""
        local = F.pad(logits, (0, self.max_ids - logits.shape[1])).contiguous()
        shards = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(shards, local, group=self.group)
        return torch.cat(shards, dim=1)[:, : self.vocabulary]

    def all_reduce_max(self, scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the maximum over all processes and its id, from the local maximum, float32 (count,), and its id."""
        local = torch.stack([scores, (ids + self.first_id).float()])  # exact up to 16 million ids
        stacked = local.new_empty(self.size, *local.shape)
        dist.all_gather(list(stacked), local, group=self.group)
        best, process = stacked[:, 0].max(dim=0)
        return best, stacked[:, 1].gather(0, process[None])[0].long()

    def all_reduce_sum(self, *tensors: torch.Tensor) -> Iterable[torch.Tensor]:
        """Sum each tensor over the processes. All have the same shape."""
        stacked = torch.stack(tensors)
        dist.all_reduce(stacked, group=self.group)
        return stacked


def cross_entropy_with_grad(
    logits: torch.Tensor, targets: torch.Tensor, vocabulary: int, shard: VocabularyShard | None, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss of each row in nats, most likely ids, gradient of the summed loss, in the logits' dtype).

    logits (count, columns): the first `vocabulary` columns are ids, the rest is padding. targets int64 (count,), or
    `IGNORED`. With `shard` the logits are those of its ids.
    """
    scores = logits.float()
    scores[:, vocabulary:] = -torch.inf
    maxima, guesses = row_max(scores)
    has_target = targets != IGNORED
    if shard is None:
        is_local, columns = has_target, targets.clamp(min=0)[:, None]
    else:
        maxima, guesses = shard.all_reduce_max(maxima, guesses)
        local = targets - shard.first_id
        is_local = (local >= 0) & (local < vocabulary)  # `IGNORED` is negative
        columns = local.clamp(0, vocabulary - 1)[:, None]
    at_target = scores.gather(1, columns)[:, 0]
    exponentials = scores.sub_(maxima[:, None]).exp_()  # in place: memory traffic dominates the cost
    exp_sums = exponentials.sum(dim=1)
    if shard is not None:
        exp_sums, at_target = shard.all_reduce_sum(exp_sums, at_target.where(is_local, 0.0))
    losses = torch.where(has_target, maxima + exp_sums.log() - at_target, 0.0)
    if not needs_grad:
        return losses, guesses, exponentials
    grad = exponentials.mul_((has_target / exp_sums)[:, None])
    grad.scatter_add_(1, columns, -is_local.to(grad.dtype)[:, None])
    return losses, guesses, grad.to(logits.dtype)


def row_entropies(logits: torch.Tensor, shard: VocabularyShard | None) -> torch.Tensor:
    """Return the entropy of softmax(logits) of each row in nats, float32 (count,), without gradient.

    logits (count, ids). With `shard` they are those of its ids, and the entropy covers the ids of all processes.
    """
    rows = max(1, _ENTROPY_LOGITS.get(logits.device.type, 2**22) // logits.shape[1])
    chunks = [_moments(chunk) for chunk in logits.detach().split(rows)]
    maxima, exp_sums, weighted = torch.cat(chunks, dim=1)
    if shard is not None:
        highest, _ = shard.all_reduce_max(maxima, torch.zeros_like(maxima))
        shift = maxima - highest
        exp_sums, weighted = shard.all_reduce_sum(exp_sums * shift.exp(), (weighted + shift * exp_sums) * shift.exp())
    return exp_sums.log() - weighted / exp_sums


def _moments(logits: torch.Tensor) -> torch.Tensor:
    """Return float32 (3, count): the maximum of each row, and the sums of exp(d) and d exp(d), d = logit - maximum."""
    scores = logits.float()
    best = scores.amax(dim=1)
    scores = (scores - best[:, None]).clamp_(min=-1e4)  # a logit of -inf must give 0, not NaN
    exponentials = scores.exp()
    return torch.stack([best, exponentials.sum(dim=1), torch.linalg.vecdot(exponentials, scores)])


def row_max(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the maximum of each row and its column, like `scores.max(dim=1)`: float32 (count,), int64 (count,).

    On a CPU PyTorch searches the column one number at a time: 37 ms for 2,048 x 16,384. The maximum of each block uses
    vector instructions (3 ms); the column is then searched among the blocks and within one of them.
    """
    columns = scores.shape[1]
    blocked_columns = columns - columns % _BLOCK
    if scores.device.type != "cpu" or not blocked_columns:
        return scores.max(dim=1)
    block_max = [scores[:, :blocked_columns].unflatten(1, (-1, _BLOCK)).amax(dim=2)]
    if blocked_columns < columns:
        block_max.append(scores[:, blocked_columns:].amax(dim=1, keepdim=True))
    best, block = torch.cat(block_max, dim=1).max(dim=1)
    candidates = block[:, None] * _BLOCK + torch.arange(_BLOCK)
    candidates = candidates.clamp_(max=columns - 1)  # the last block may be shorter
    winner = scores.gather(1, candidates).argmax(dim=1, keepdim=True)
    return best, candidates.gather(1, winner)[:, 0]
