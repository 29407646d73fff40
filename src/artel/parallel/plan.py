"""Which strategy a run file asks for."""

from __future__ import annotations

from artel.config import RunConfig
from artel.parallel.deepspeed.engine import DeepSpeedPlan
from artel.parallel.parallelize import MeshPlan
from artel.parallel.strategy import ParallelPlan


def plan_parallelism(run: RunConfig, world_size: int, on_host: int) -> ParallelPlan:
    """How `world_size` processes, `on_host` of them on each host, share a run.

    Raises InputError where they cannot.
    """
    plan = MeshPlan if run.parallel.deepspeed is None else DeepSpeedPlan
    return plan.read(run, world_size, on_host)
