"""Cross-entropy of rows of logits and its gradient (softmax minus target), also for a sharded vocabulary.

Logits are the largest tensor of a training step, and moving them costs more than computing with them. One kernel reads
them and writes the gradient in their place: C++ on a CPU, Triton on a GPU. PyTorch's operators do the same elsewhere.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from artel.integers import ceil_div
from artel.models import IGNORED
from artel.models.cpu.cross_entropy import cpu_rows, supports_logits
from artel.models.cross_entropy_rows import RowFunction, Rows, define_row_operators, torch_rows


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

    def combine(self, statistics: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the statistics of all ids, float32 (4, count), and the most likely ids, from those of each shard."""
        maxima, exp_sums, at_target, weighted_sums = statistics
        local = torch.stack([maxima, (columns + self.first_id).float()])  # exact up to 16 million ids
        gathered = local.new_empty(self.size, *local.shape)
        dist.all_gather(list(gathered), local, group=self.group)
        best, process = gathered[:, 0].max(dim=0)
        shift = maxima - best
        factor = shift.exp()
        sums = torch.stack([exp_sums * factor, at_target, (weighted_sums + shift * exp_sums) * factor])
        dist.all_reduce(sums, group=self.group)
        return torch.cat([best[None], sums]), gathered[:, 1].gather(0, process[None])[0].long()


class RowLosses(NamedTuple):
    """Losses of rows of logits, each (count,)."""

    losses: torch.Tensor
    """Cross-entropy in nats, float32; 0 without a target."""
    guesses: torch.Tensor
    """Most likely ids, int64."""
    entropies: torch.Tensor
    """Entropy of the softmax in nats, float32."""


def row_function(device_type: str, dtype: torch.dtype) -> RowFunction:
    """Return the fastest implementation for logits of this dtype on this type of device.

    For a GPU it is Triton's without a test if this machine has none, to plan a run for another machine.
    """
    if supports_logits(device_type, dtype):
        return cpu_rows
    if device_type == "cuda" and (not torch.cuda.is_available() or _triton_works()):
        return gpu_rows
    return torch_rows


def _compute_on_gpu(rows: Rows, *, with_statistics: bool, with_grad: bool) -> None:
    from artel.models.triton_cross_entropy import launch  # PyTorch for CPUs comes without Triton

    launch(rows, with_statistics=with_statistics, with_grad=with_grad)


gpu_rows = define_row_operators("gpu_cross_entropy", _compute_on_gpu)


@cache
def _triton_works() -> bool:
    """True if Triton can build and run the kernel, for which it needs a C compiler. Warn once if it cannot."""
    try:
        logits, targets = torch.zeros(1, 8, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
        cross_entropy_(logits, targets, compute=gpu_rows, vocabulary=8)
    except Exception as error:  # Triton's and its compilers' own errors
        reason = " ".join(str(error).split())[:300]
        warnings.warn(f"Triton does not work, PyTorch's slower operators do the same: {reason}", stacklevel=2)
        return False
    return True


def cross_entropy_(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    compute: RowFunction,
    vocabulary: int,
    shard: VocabularyShard | None = None,
    factors: torch.Tensor | None = None,
    soft_cap: float = 0.0,
    needs_grad: bool = True,
) -> RowLosses:
    """Compute the cross-entropy of each row of logits, and replace the logits by their gradient.

    logits (count, width): the first `vocabulary` columns are ids, with `shard` its own; the rest is padding of 0. With
    `needs_grad` they are overwritten by the gradient of the sum of factor * loss. targets int64 (count,), or `IGNORED`.
    factors float32 (count,); None for 1. `soft_cap` c replaces each logit x by c * tanh(x / c), unless it is 0.

    Raise IndexError for targets out of range. On a GPU their loss is NaN instead: raising would wait for the GPU.
    """
    first_id, num_ids = (0, vocabulary) if shard is None else (shard.first_id, shard.vocabulary)
    statistics = torch.empty(4, len(targets), device=logits.device)
    guesses = torch.empty_like(targets)
    rows = Rows(logits, targets, factors, statistics, guesses, vocabulary, first_id, num_ids, soft_cap)
    compute(rows, with_statistics=True, with_grad=needs_grad and shard is None)
    if shard is not None:
        statistics[:], guesses = shard.combine(statistics, guesses)
        if needs_grad:
            compute(rows, with_statistics=False, with_grad=True)
    maxima, exp_sums, at_target, weighted_sums = statistics
    log_sums = exp_sums.log()
    losses = (maxima - at_target + log_sums).where(targets != IGNORED, 0.0)
    return RowLosses(losses, guesses, log_sums - weighted_sums / exp_sums)
