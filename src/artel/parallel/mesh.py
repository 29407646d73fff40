"""The processes of a run as a mesh of named dimensions.

    pipeline       stages of the model, one after another
    dp_replicate   replicas of the dimensions below, each with its fraction of the batch (ddp; hosts under hsdp)
    dp_shard       processes that shard one replica's weights, gradients and optimizer state, each with its fraction of
                   the batch
    context        processes that shard each sequence
    tensor         processes that shard each layer's matrices

The first dimension varies slowest, so that neighbours in the last one, which communicate most, are on one host. Experts
are sharded over `expert` neighbours within dp_replicate and dp_shard.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from artel.config.schema.run import ParallelConfig
from artel.errors import InputError, Problem

ADVISED_MODES = ("ddp", "zero2", "fsdp", "hsdp")
"""Values of `parallel.data` that advice tries. zero1 takes as much memory as zero2, plus more for gradients."""
NAMES = ("pipeline", "dp_replicate", "dp_shard", "context", "tensor")


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Size of each mesh dimension, and the data-parallel mode."""

    mode: str
    """`parallel.data` in the run file: ddp, zero1, zero2, fsdp or hsdp. A plugin's name shards like fsdp."""
    pipeline: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
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
        """Number of data-parallel ranks: each runs a fraction of every global batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def holds_full_model(self) -> bool:
        """True if each process holds the full model: a single process, or DistributedDataParallel."""
        return self.mode == "ddp" and self.dp_replicate == self.world_size

    @property
    def sums_replica_gradients(self) -> bool:
        """True if DistributedDataParallel sums the gradients of replicas, each with all weights of its stage."""
        return self.mode == "ddp" and self.dp_replicate > 1

    @property
    def reshard_after_forward(self) -> bool:
        """True if gathered weights are freed after the forward pass, and gathered again for the backward pass."""
        return self.mode not in ("ddp", "zero1", "zero2")

    @property
    def reduces_once(self) -> bool:
        """True if gradients are reduced once per step, after the last micro-batch."""
        return self.mode in ("ddp", "zero1")

    def dp_rank(self, rank: int) -> int:
        """Return the data-parallel rank of a process. Processes that run the same samples have the same one."""
        return rank // (self.context * self.tensor) % self.dp_degree

    def is_reporting_rank(self, rank: int) -> bool:
        """True for the one process per data-parallel rank whose counts are summed."""
        return rank % (self.context * self.tensor) == 0 and rank // (self.world_size // self.pipeline) == 0

    def mesh(self, device: str) -> DeviceMesh:
        """Create the process groups of all dimensions. Collective: every process must call it."""
        return init_device_mesh(device, self.sizes, mesh_dim_names=NAMES)


def read_parallel_dims(config: ParallelConfig, world_size: int, on_host: int) -> ParallelDims:
    """Return the mesh of `world_size` processes, `on_host` of them on each host.

    Raise InputError if the sizes do not divide `world_size`, or cannot be combined.
    """
    fixed = config.pipeline * config.context * config.tensor
    if world_size % fixed:
        factors = [f"{name} {getattr(config, name)}" for name in ("pipeline", "context", "tensor")]
        what = f"{world_size} processes are not a multiple of {' x '.join(factors)} = {fixed}"
        fix = f"start {fixed * max(1, round(world_size / fixed))} processes, or use smaller numbers"
        raise InputError.at("parallel", what, fix)
    problems = []
    dp_degree = world_size // fixed
    mode = "ddp" if isinstance(config.data, int) or config.data == "auto" else config.data
    if config.data == "auto" and (config.expert > 1 or config.offload != "none"):
        mode = "fsdp"
    shard = {"ddp": 1, "hsdp": 0}.get(mode, dp_degree)
    if mode == "hsdp":
        ranks_on_host = max(1, on_host // (config.context * config.tensor))
        shard = min(ranks_on_host, dp_degree) if config.shard == "auto" else config.shard
        if dp_degree % shard:
            what = f"{dp_degree} data-parallel processes are not a multiple of {shard}"
            problems.append(Problem("parallel.shard", what, f"write one of: {format_divisors(dp_degree)}"))
    elif config.shard != "auto":
        problems.append(Problem("parallel.shard", f"{mode} does not replicate shards", "write data: hsdp with it"))
    if config.offload != "none" and mode == "ddp":
        problems.append(
            Problem("parallel.offload", f"{config.offload} needs weights in shards", "write data: fsdp with it")
        )
    if config.expert > 1 and mode == "ddp":
        problems.append(Problem("parallel.expert", "needs weights in shards", "write data: fsdp with it"))
    if config.expert > 1 and not problems and dp_degree % config.expert:
        what = f"{dp_degree} data-parallel processes are not a multiple of {config.expert}"
        problems.append(Problem("parallel.expert", what, f"write one of: {format_divisors(dp_degree)}"))
    if problems:
        raise InputError(problems)
    return ParallelDims(mode, config.pipeline, dp_degree // shard, shard, config.context, config.tensor, config.expert)


def format_divisors(number: int) -> str:
    """Return the divisors of a number as text, for messages."""
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
