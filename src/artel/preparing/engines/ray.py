"""Runs the tasks of a stage as tasks of Ray, by datatrove, on a running cluster."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datatrove.executor.ray import RayPipelineExecutor  # type: ignore[import-untyped]
from datatrove.utils.logging import logger  # type: ignore[import-untyped]

from artel.config import PrepareConfig
from artel.errors import InputError, Problem, WorkError
from artel.preparing.engines.cluster import (
    FIX_SHARED_DISK,
    UNSEEN_SECONDS,
    Work,
    lost_tasks,
    new_work,
    wait_for_results,
)
from artel.preparing.tasks import Stage, Tasks

_START_SECONDS = 120
_END_SECONDS = 30


def check() -> None:
    """Raise InputError if Ray is not installed or no cluster can be reached."""
    if find_spec("ray") is None:
        raise InputError.at("prepare.engine", "ray: the package ray is not installed", "pip install ray")
    with _connected():
        pass


def run_by_ray(tasks: Tasks, stage: Stage, config: PrepareConfig, progress: Callable[[int, int], None]) -> None:
    """Run the unfinished tasks of a stage, each on one CPU. Raises InputError, WorkError.

    Ray ends the tasks when this process ends, for whatever reason.
    """
    work = new_work(tasks, stage)
    with _connected() as ray:
        _check_nodes(ray, work)
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        count = min(cpus if config.workers == "auto" else config.workers, len(work.numbers))
        # No memory is requested: Ray guesses the memory of a node, and a task that does not fit waits forever.
        executor = RayPipelineExecutor([work], tasks=count, workers=count, mem_per_cpu_gb=0, logging_dir=work.folder)
        failures: list[Exception] = []
        thread = threading.Thread(target=_run, args=(executor, failures), daemon=True)
        thread.start()
        ended: float | None = None
        while True:
            if ended is None and not thread.is_alive():
                ended = time.monotonic()
            if not (missing := wait_for_results(tasks, work, progress)):
                break
            if ended is None:
                continue
            if failures or Path(work.folder, "killed").exists() or time.monotonic() > ended + UNSEEN_SECONDS:
                reason = f": {failures[0]}" if failures else ""
                raise lost_tasks(work, missing, f"the tasks of Ray ended{reason}", "fix what the log reports")
        thread.join(_END_SECONDS)


def _run(executor: RayPipelineExecutor, failures: list[Exception]) -> None:
    try:
        executor.run()
    except Exception as error:
        failures.append(error)


@contextmanager
def _connected() -> Iterator[Any]:
    """The module ray, connected to its cluster for the length of the block."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    import ray

    logger.disable("datatrove")
    try:
        try:
            ray.init("auto", log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError) as error:
            what = f"ray: no cluster of Ray is reached from this machine: {str(error).splitlines()[0]}"
            fix = (
                "start one (here `ray start --head`, on the others `ray start --address=THIS_MACHINE:6379`), and where "
                "it is not found name it: export RAY_ADDRESS=HEAD:6379"
            )
            raise InputError.at("prepare.engine", what, fix) from None
        yield ray
    finally:
        ray.shutdown()
        logger.enable("datatrove")


def _check_nodes(ray: Any, work: Work) -> None:
    """Raise InputError if a node does not see the workspace or lacks artel, WorkError if no node has a CPU."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def look(file: str) -> tuple[bool, list[str]]:
        # Ray sends this function by value, so that it runs also where artel is not installed.
        return Path(file).is_file(), [name for name in ("artel", "datatrove") if find_spec(name) is None]

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    if not nodes:
        raise WorkError.at("prepare.engine", "no node of the cluster of Ray has a CPU", "start some")
    remote_look = ray.remote(num_cpus=0, max_retries=0)(look)
    answers = []
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        answers.append(remote_look.options(scheduling_strategy=strategy).remote(f"{work.workspace}/plan.json"))
    problems = []
    for node, answer in zip(nodes, answers, strict=True):
        name = f"the node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        try:
            is_seen, missing = ray.get(answer, timeout=_START_SECONDS)
        except ray.exceptions.RayError:
            continue  # the node left the cluster: another one runs its tasks
        if not is_seen:
            problems.append(Problem("data.store", f"{name} does not see {work.workspace}", FIX_SHARED_DISK))
        if missing:
            fix = "install the same artel, with its extra `cluster`, in the environment in which Ray is started there"
            problems.append(Problem("prepare.engine", f"{name} has no package {' and no '.join(missing)}", fix))
    if problems:
        raise InputError(problems)
