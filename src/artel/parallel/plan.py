"""Which strategy a run file asks for."""

from __future__ import annotations

from artel.config import RunConfig
from artel.parallel.deepspeed.engine import DeepSpeedPlan
from artel.parallel.strategy import ParallelPlan
from artel.registry import STRATEGIES


def plan_parallelism(run: RunConfig, world_size: int, on_host: int) -> ParallelPlan:
    """How `world_size` processes, `on_host` of them on each host, share a run.

    Raises InputError where they cannot.
    """
    if run.parallel.deepspeed is not None:
        return DeepSpeedPlan.read(run, world_size, on_host)
    name = run.parallel.data
    plan: ParallelPlan = STRATEGIES[name if isinstance(name, str) else "ddp"].read(run, world_size, on_host)
    return plan
