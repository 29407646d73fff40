"""Engines that run the tasks of a stage: processes of this machine, Slurm, or Ray."""

from __future__ import annotations

from collections.abc import Callable

from artel.config import PrepareConfig
from artel.preparing.engines.local import run_locally
from artel.preparing.tasks import Stage, Tasks


def check_engine(prepare: PrepareConfig) -> None:
    """Raise InputError if the engine cannot be used, before any text is read."""
    if prepare.engine == "local":
        return
    from artel.preparing.engines import ray, slurm

    (slurm.check if prepare.engine == "slurm" else ray.check)()


def run_stage(tasks: Tasks, stage: Stage, prepare: PrepareConfig, progress: Callable[[int, int], None]) -> None:
    """Run the unfinished tasks of a stage. Calls `progress` with (finished tasks, all tasks).

    Raise InputError if the settings or the input do not allow the tasks, WorkError if one fails otherwise.
    """
    if (tasks.workspace.path / "jobs").is_dir():
        from artel.preparing.engines.slurm import cancel_jobs

        cancel_jobs(tasks.workspace)  # left by a killed process; Ray tasks end with their process
    if prepare.engine == "slurm":
        from artel.preparing.engines.slurm import run_on_slurm

        run_on_slurm(tasks, stage, prepare, progress)
    elif prepare.engine == "ray":
        from artel.preparing.engines.ray import run_on_ray

        run_on_ray(tasks, stage, prepare, progress)
    else:
        run_locally(tasks, stage, prepare.workers, progress)
