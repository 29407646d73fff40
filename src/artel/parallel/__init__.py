"""How one global batch is run: by one process or by many."""

from artel.parallel.data_parallel import DataParallel, ParallelStrategy
from artel.parallel.mesh import ParallelDims, read_parallel_dims
from artel.parallel.parallelize import parallelize, split_problems
from artel.parallel.process_group import World, join_world, local_device

__all__ = [
    "DataParallel",
    "ParallelDims",
    "ParallelStrategy",
    "World",
    "join_world",
    "local_device",
    "parallelize",
    "read_parallel_dims",
    "split_problems",
]
