"""From a whole model to what each process holds of it, in the order in which the ways of splitting stand inside one
another: matrices, sequences, experts, then weights."""

from __future__ import annotations

from transformers import PreTrainedModel

from artel.config.sections import ParallelConfig
from artel.models.device import autocast_dtype
from artel.objectives import Objective
from artel.parallel.grid import Grid
from artel.parallel.layout import Layout, Replicated
from artel.parallel.processes import Processes
from artel.parallel.sharded import Sharded, batch_mesh, shard


def lay_out(
    model: PreTrainedModel,
    objective: Objective,
    processes: Processes,
    precision: str,
    grid: Grid,
    wanted: ParallelConfig,
) -> Layout:
    """The model, spread over the processes of `grid` as `wanted` says; all of them call it."""
    if grid.is_plain:
        return Replicated(model, objective, processes, precision)
    mesh = grid.mesh(processes.device.type)
    shard(model, batch_mesh(mesh, grid), grid, dtype=autocast_dtype(precision), offload=wanted.offload)
    return Sharded(model, objective, processes, precision, grid)
