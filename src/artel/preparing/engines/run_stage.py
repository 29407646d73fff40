"""Who does the tasks of a stage: processes of this machine, or a cluster."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from artel.config import PrepareConfig
from artel.errors import missing_extra
from artel.preparing.engines.local import run_here
from artel.preparing.tasks import Stage, Tasks


def check_engine(wanted: PrepareConfig) -> None:
    """Raise InputError where the engine cannot be had: before any text is read."""
    if wanted.engine == "local":
        return
    if find_spec("datatrove") is None:
        raise missing_extra("datatrove", "cluster", "prepare.engine")
    from artel.preparing.engines import ray as by_ray
    from artel.preparing.engines import slurm as by_slurm

    (by_slurm.check if wanted.engine == "slurm" else by_ray.check)()


def run_stage(tasks: Tasks, stage: Stage, wanted: PrepareConfig, progress: Callable[[int, int], None]) -> None:
    """Do what is left of a stage; `progress` is told how many of how many tasks are done.

    Raises InputError, WorkError.
    """
    if (tasks.workspace.path / "jobs").is_dir() and find_spec("datatrove") is not None:
        from artel.preparing.engines.slurm import cancel_jobs

        cancel_jobs(tasks.workspace)  # those of a start that was killed; its tasks of Ray died with it
    if wanted.engine == "slurm":
        from artel.preparing.engines.slurm import run_by_slurm

        run_by_slurm(tasks, stage, wanted, progress)
    elif wanted.engine == "ray":
        from artel.preparing.engines.ray import run_by_ray

        run_by_ray(tasks, stage, wanted, progress)
    else:
        run_here(tasks, stage, wanted.workers, progress)
