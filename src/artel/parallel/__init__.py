"""Parallel strategies: how one global batch runs on one process or many."""

from artel.config import RunConfig
from artel.parallel.data_parallel import DataParallel
from artel.parallel.deepspeed.engine import DeepSpeedPlan
from artel.parallel.mesh import ParallelDims, read_parallel_dims
from artel.parallel.process_group import World, join_world, local_device
from artel.parallel.strategy import OptimizerProtocol, ParallelPlan, ParallelStrategy
from artel.registry import STRATEGIES

__all__ = [
    "DataParallel",
    "OptimizerProtocol",
    "ParallelDims",
    "ParallelPlan",
    "ParallelStrategy",
    "World",
    "join_world",
    "local_device",
    "plan_parallelism",
    "read_parallel_dims",
]


def plan_parallelism(config: RunConfig, world_size: int, on_host: int) -> ParallelPlan:
    """Return the plan for `world_size` processes, `on_host` of them on each host. Raise InputError if there is none."""
    if config.parallel.deepspeed is not None:
        return DeepSpeedPlan.read(config, world_size, on_host)
    name = config.parallel.data
    plan: ParallelPlan = STRATEGIES[name if isinstance(name, str) else "ddp"].read(config, world_size, on_host)
    return plan
