"""How one global batch is run: by one process or by many."""

from artel.parallel.data_parallel import Layout, Replicated
from artel.parallel.mesh import Grid, read_grid
from artel.parallel.parallelize import lay_out, split_problems
from artel.parallel.process_group import Processes, device_here, open_processes

__all__ = [
    "Grid",
    "Layout",
    "Processes",
    "Replicated",
    "device_here",
    "lay_out",
    "open_processes",
    "read_grid",
    "split_problems",
]
