"""Who does the tasks of a stage: processes of this machine, or a cluster."""

from __future__ import annotations

from collections.abc import Callable

from artel.config import PrepareConfig
from artel.preparing.local import run_here
from artel.preparing.tasks import Stage, Tasks


def run_stage(tasks: Tasks, stage: Stage, wanted: PrepareConfig, progress: Callable[[int, int], None]) -> None:
    """Do what is left of a stage; `progress` is told how many of how many tasks are done.

    Raises InputError, WorkError.
    """
    run_here(tasks, stage, wanted.workers, progress)
