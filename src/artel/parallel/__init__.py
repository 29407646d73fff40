"""How one global batch is run: by one process or by many."""

from artel.parallel.data_parallel import DataParallel
from artel.parallel.mesh import ParallelDims, read_parallel_dims
from artel.parallel.plan import plan_parallelism
from artel.parallel.process_group import World, join_world, local_device
from artel.parallel.strategy import OptimizerProtocol, ParallelPlan, ParallelStrategy

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
