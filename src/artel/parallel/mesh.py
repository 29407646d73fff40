"""The processes of a run as a grid of named dimensions: which of them share what.

    pipeline   stages of the model, one after another
    copies     whole copies of what follows, each with a batch of its own (ddp; across hosts under hsdp)
    shard      processes that share one copy of weights, gradients and optimizer state, each with a batch of its own
    context    processes that share each sequence
    tensor     processes that share each layer's matrices

The first varies slowest: neighbours in the last dimension, which speak most, are on one host. Experts are shared by
`expert` neighbours among those that share the batch (copies and shard).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from artel.config.schema.run import ParallelConfig
from artel.errors import InputError, Problem

Mode = Literal["ddp", "zero1", "zero2", "fsdp", "hsdp"]
NAMES = ("pipeline", "copies", "shard", "context", "tensor")


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """How many processes each dimension has, and what those that share the batch do with weights."""

    mode: Mode
    pipeline: int = 1
    copies: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in NAMES)

    @property
    def dp_degree(self) -> int:
        """Processes among which a global batch is shared out."""
        return self.copies * self.shard

    @property
    def is_plain(self) -> bool:
        """Whether each process holds the whole model: alone, or as DistributedDataParallel."""
        return self.mode == "ddp" and self.copies == self.world_size

    def dp_rank(self, rank: int) -> int:
        """Which share of a global batch a process takes."""
        return rank // (self.context * self.tensor) % self.dp_degree

    def is_reporting_rank(self, rank: int) -> bool:
        """Whether a process is the one of those that take the same share whose figures count."""
        return rank % (self.context * self.tensor) == 0 and rank // (self.world_size // self.pipeline) == 0

    def mesh(self, device: str) -> DeviceMesh:
        """Process groups of all dimensions; every process of the run must ask for it at the same time."""
        return init_device_mesh(device, self.sizes, mesh_dim_names=NAMES)


def read_parallel_dims(wanted: ParallelConfig, world_size: int, here: int) -> ParallelDims:
    """The grid of `world` processes, `here` of them on each host. Raises InputError where they do not divide."""
    fixed = wanted.pipeline * wanted.context * wanted.tensor
    problems = []
    if world_size % fixed:
        named = [f"{name} {getattr(wanted, name)}" for name in ("pipeline", "context", "tensor")]
        problems.append(
            Problem("parallel", f"{world_size} processes are no multiple of {' x '.join(named)} = {fixed}",
                    f"start {fixed * max(1, round(world_size / fixed))} processes, or write smaller numbers")
        )  # fmt: skip
        raise InputError(problems)
    dp_degree = world_size // fixed
    mode: Mode = "ddp" if isinstance(wanted.data, int) or wanted.data == "auto" else wanted.data
    if wanted.data == "auto" and (wanted.expert > 1 or wanted.offload != "none"):
        mode = "fsdp"
    shard = {"ddp": 1, "hsdp": 0}.get(mode, dp_degree)
    if mode == "hsdp":
        on_host = max(1, here // (wanted.context * wanted.tensor))
        shard = min(on_host, dp_degree) if wanted.shard == "auto" else wanted.shard
        if dp_degree % shard:
            problems.append(
                Problem("parallel.shard", f"{dp_degree} processes that share the batch are no multiple of {shard}",
                        f"write one of: {_divisors(dp_degree)}")
            )  # fmt: skip
    elif wanted.shard != "auto":
        problems.append(Problem("parallel.shard", f"{mode} has no copies of a shard", "write data: hsdp with it"))
    if wanted.offload != "none" and mode == "ddp":
        problems.append(
            Problem("parallel.offload", f"{wanted.offload} needs weights in shards", "write data: fsdp with it")
        )
    if wanted.expert > 1 and mode == "ddp":
        problems.append(Problem("parallel.expert", "needs weights in shards", "write data: fsdp with it"))
    if wanted.expert > 1 and not problems and dp_degree % wanted.expert:
        what = f"{dp_degree} processes that share the batch are no multiple of {wanted.expert}"
        problems.append(Problem("parallel.expert", what, f"write one of: {_divisors(dp_degree)}"))
    if problems:
        raise InputError(problems)
    return ParallelDims(mode, wanted.pipeline, dp_degree // shard, shard, wanted.context, wanted.tensor, wanted.expert)


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
