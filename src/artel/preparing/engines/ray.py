"""Run the tasks of a stage on a running Ray cluster."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from artel.config import PrepareConfig
from artel.errors import InputError, Problem, WorkError, missing_extra
from artel.preparing.engines.cluster import (
    FIX_SHARED_DISK,
    VISIBILITY_SECONDS,
    Submission,
    create_submission,
    lost_tasks_error,
    rank_command,
    wait_for_results,
)
from artel.preparing.tasks import Stage, Tasks

_START_SECONDS = 120


def check() -> None:
    """Raise InputError if Ray is not installed or no cluster can be reached."""
    if find_spec("ray") is None:
        raise missing_extra("ray", "cluster", "prepare.engine")
    with _connect():
        pass


def run_on_ray(tasks: Tasks, stage: Stage, prepare: PrepareConfig, progress: Callable[[int, int], None]) -> None:
    """Run the unfinished tasks of a stage, each on one CPU.

    Ray ends the tasks when this process ends, for any reason. Raise InputError if no cluster can be reached or a node
    lacks artel or the workspace, and WorkError if tasks end without a result. Errors of tasks are raised here.
    """
    submission = create_submission(tasks, stage)
    with _connect() as ray:
        _check_nodes(ray, submission)
        cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        num_ranks = min(cpus if prepare.workers == "auto" else prepare.workers, len(submission.task_indices))
        # Ray restarts a rank if its node is lost. No memory is requested: Ray guesses the memory of a node, and a task
        # that does not fit waits forever.
        run_rank = ray.remote(num_cpus=1)(_run_rank)
        running = [run_rank.remote(submission, rank, num_ranks) for rank in range(num_ranks)]
        failures: list[str] = []
        end_time: float | None = None
        while True:
            finished, running = ray.wait(running, num_returns=len(running), timeout=0) if running else ([], [])
            failures += filter(None, map(partial(_failure_message, ray), finished))
            if not running:
                end_time = end_time or time.monotonic()
            num_missing = wait_for_results(tasks, submission, progress)  # counted after the ranks were checked
            if not num_missing:
                break
            if end_time is not None and (failures or time.monotonic() > end_time + VISIBILITY_SECONDS):
                reason = f"the Ray tasks ended: {failures[0]}" if failures else "the Ray tasks ended"
                raise lost_tasks_error(submission, num_missing, reason, "fix what the log reports")


def _run_rank(submission: Submission, rank: int, num_ranks: int) -> int:
    """Run a rank on a node, in a process that ends with this one. Return its exit status."""
    with Path(submission.folder, "logs", f"ray_{rank}.log").open("ab") as log:
        command = [*rank_command(submission), str(rank), str(num_ranks)]
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode


def _failure_message(ray: Any, task: Any) -> str | None:
    """Return the failure of a finished Ray task in one line; None if it succeeded."""
    try:
        status = ray.get(task)
    except ray.exceptions.RayError as error:
        return str(error).strip().splitlines()[-1]
    return f"a rank ended with status {status}" if status else None


@contextmanager
def _connect() -> Iterator[Any]:
    """Connect to the Ray cluster inside the block. Yield the module ray."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
    import ray

    try:
        try:
            ray.init("auto", log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError) as error:
            what = f"ray: no Ray cluster can be reached from this machine: {str(error).splitlines()[0]}"
            fix = (
                "start one (here `ray start --head`, on the others `ray start --address=THIS_MACHINE:6379`), or "
                "set its address: export RAY_ADDRESS=HEAD:6379"
            )
            raise InputError.at("prepare.engine", what, fix) from None
        yield ray
    finally:
        ray.shutdown()


def _check_nodes(ray: Any, submission: Submission) -> None:
    """Raise InputError if a node does not see the workspace or lacks artel, WorkError if no node has a CPU."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def probe(file: str) -> tuple[bool, bool]:
        # Ray sends this function by value, so it also runs on nodes without artel.
        return Path(file).is_file(), find_spec("artel") is not None

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    if not nodes:
        raise WorkError.at("prepare.engine", "no node of the Ray cluster has a CPU", "start nodes with CPUs")
    remote_probe = ray.remote(num_cpus=0, max_retries=0)(probe)
    answers = []
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        answers.append(remote_probe.options(scheduling_strategy=strategy).remote(f"{submission.workspace}/plan.json"))
    problems = []
    for node, answer in zip(nodes, answers, strict=True):
        name = f"the node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        try:
            is_visible, has_artel = ray.get(answer, timeout=_START_SECONDS)
        except ray.exceptions.RayError:
            continue  # the node left the cluster: another one runs its tasks
        if not is_visible:
            problems.append(Problem("data.store", f"{name} does not see {submission.workspace}", FIX_SHARED_DISK))
        if not has_artel:
            fix = "install the same version of artel in the environment in which Ray runs on that node"
            problems.append(Problem("prepare.engine", f"artel is not installed on {name}", fix))
    if problems:
        raise InputError(problems)
