"""How one global batch is run: by one process or by many."""

from artel.parallel.grid import Grid, read_grid
from artel.parallel.layout import Layout, Replicated
from artel.parallel.processes import Processes, device_here, open_processes
from artel.parallel.split import lay_out, split_problems

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
