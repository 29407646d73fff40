"""The tasks of a stage as tasks of Ray, by datatrove, on a cluster that is there."""

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
from artel.preparing.engines.cluster import SHARED, UNSEEN_SECONDS, Watch, Work, lost, new_work
from artel.preparing.tasks import Stage, Tasks

_START_SECONDS = 120
_END_SECONDS = 30


def check() -> None:
    """Raise InputError where there is no Ray, or no cluster of it to be reached."""
    if find_spec("ray") is None:
        raise InputError.at("prepare.engine", "ray: the package ray is not installed", "pip install ray")
    with _connected():
        pass


def run_by_ray(tasks: Tasks, stage: Stage, wanted: PrepareConfig, progress: Callable[[int, int], None]) -> None:
    """Do what is left of a stage, each task on one CPU. Raises InputError, WorkError.

    Ray ends the tasks when their starter ends, however it does.
    """
    work = new_work(tasks, stage)
    with _connected() as ray:
        _check_nodes(ray, work)
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        count = min(cpus if wanted.workers == "auto" else wanted.workers, len(work.numbers))
        # No memory is asked for: what Ray counts as a node's memory is a guess, and a task it has no room for waits
        # for ever.
        executor = RayPipelineExecutor([work], tasks=count, workers=count, mem_per_cpu_gb=0, logging_dir=work.folder)
        failures: list[Exception] = []
        thread = threading.Thread(target=_run, args=(executor, failures), daemon=True)
        thread.start()
        watch = Watch(tasks, work, progress)
        ended: float | None = None
        while True:
            if ended is None and not thread.is_alive():
                ended = time.monotonic()
            if not (missing := watch.missing()):
                break
            if ended is None:
                continue
            if failures or Path(work.folder, "killed").exists() or time.monotonic() > ended + UNSEEN_SECONDS:
                told = f": {failures[0]}" if failures else ""
                raise lost(work, missing, f"the tasks of Ray ended{told}", "mend what it tells")
        thread.join(_END_SECONDS)


def _run(executor: RayPipelineExecutor, failures: list[Exception]) -> None:
    try:
        executor.run()
    except Exception as error:
        failures.append(error)


@contextmanager
def _connected() -> Iterator[Any]:
    """Ray, connected to its cluster for the length of the block."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked for it
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
    """Raise InputError where a node that would work does not see the workspace, or has no artel."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def look(file: str) -> tuple[bool, list[str]]:
        # It travels by itself: artel need not be there to tell that it is not.
        return Path(file).is_file(), [name for name in ("artel", "datatrove") if find_spec(name) is None]

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    asked = [ray.remote(num_cpus=0, max_retries=0)(look)
             .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
             .remote(f"{work.workspace}/plan.json") for node in nodes]  # fmt: skip
    problems = []
    for node, answer in zip(nodes, asked, strict=True):
        name = f"the node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        try:
            is_seen, missing = ray.get(answer, timeout=_START_SECONDS)
        except ray.exceptions.RayError:
            continue  # it went away meanwhile: its work goes to another
        if not is_seen:
            problems.append(Problem("data.store", f"{name} does not see {work.workspace}", SHARED))
        if missing:
            fix = "install the same artel, with its extra `cluster`, in the environment in which Ray is started there"
            problems.append(Problem("prepare.engine", f"{name} has no package {' and no '.join(missing)}", fix))
    if problems:
        raise InputError(problems)
    if not nodes:
        raise WorkError.at("prepare.engine", "no node of the cluster of Ray has a CPU", "start some")
