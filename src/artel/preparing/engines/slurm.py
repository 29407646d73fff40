"""Run the tasks of a stage as a Slurm job array."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from artel.config import PrepareConfig, SlurmConfig
from artel.config.sbatch import format_directive
from artel.errors import InputError, WorkError
from artel.integers import ceil_div
from artel.preparing.engines.cluster import (
    VISIBILITY_SECONDS,
    Submission,
    create_submission,
    lost_tasks_error,
    rank_command,
    wait_for_results,
)
from artel.preparing.tasks import Stage, Tasks
from artel.preparing.workspace import Workspace
from artel.storage import write_file

_MAX_PROCESSES = 64
_TIME_LIMIT = "24:00:00"  # of a job, unless prepare.slurm.options has another
_JOB_FILE = "slurm-job"
_END_STATES = frozenset(
    "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE PREEMPTED REVOKED".split()
)
# Slurm's reasons of pending jobs that will never start.
_FATAL_REASONS = frozenset(
    "BadConstraints JobHeldAdmin JobHeldUser launch_failed_requeued_held PartitionTimeLimit PartitionNodeLimit "
    "InvalidAccount InvalidQOS DependencyNeverSatisfied".split()
)
_FIX_REJECTED = "set memory and options (partition, time …) that the cluster allows (scontrol show partition)"
_CANCEL_SECONDS = 60
_MAX_SILENT_SECONDS = 1800


def check() -> None:
    """Raise InputError if no job can be submitted."""
    if missing := [name for name in ("sbatch", "scontrol", "scancel") if shutil.which(name) is None]:
        what = f"slurm: {missing[0]} is not installed on this machine"
        fix = "start artel on a login node of the cluster; or set prepare.engine: local"
        raise InputError.at("prepare.engine", what, fix)


def run_on_slurm(tasks: Tasks, stage: Stage, prepare: PrepareConfig, progress: Callable[[int, int], None]) -> None:
    """Submit the unfinished tasks of a stage and wait for them. No job stays in the queue, even after an error.

    Raise InputError if Slurm rejects the job, and WorkError if it cannot start or ends without all results. Errors of
    tasks are raised here.
    """
    submission = create_submission(tasks, stage, prepare.slurm.cpus)
    max_processes = _MAX_PROCESSES if prepare.workers == "auto" else prepare.workers
    num_processes = min(max_processes, len(submission.task_indices))
    num_ranks = ceil_div(num_processes, prepare.slurm.cpus)
    job_id = _submit(submission, job_script(submission, num_ranks, prepare.slurm))
    job = _Job(job_id)
    try:
        write_file(Path(submission.folder, _JOB_FILE), job_id)
        _wait_for_job(tasks, submission, job, progress)
    finally:
        job.cancel()
        Path(submission.folder, _JOB_FILE).unlink(missing_ok=True)


def cancel_jobs(workspace: Workspace) -> None:
    """Cancel jobs that a killed process left in the queue."""
    for file in workspace.path.glob(f"jobs/*/{_JOB_FILE}"):
        if shutil.which("scancel") is not None:
            _Job(file.read_text()).cancel()
        file.unlink()


def job_script(submission: Submission, num_ranks: int, slurm: SlurmConfig) -> str:
    """Return the batch script of a job array with one rank per array task.

    Raise InputError for a path that sbatch cannot read.
    """
    options: dict[str, object] = {
        "job-name": f"artel-{submission.stage}",
        "array": f"0-{num_ranks - 1}",
        "nodes": 1,
        "cpus-per-task": slurm.cpus,
        "mem-per-cpu": f"{ceil_div(slurm.memory, 2**20)}M",
        "time": _TIME_LIMIT,
        "output": f"{submission.folder}/logs/%A_%a.log",
        **slurm.options,
    }
    try:
        directives = [f"#SBATCH --{format_directive(name, value)}" for name, value in options.items()]
    except ValueError as error:  # a path for the log; everything else is checked before
        fix = "choose another folder for stores (data.store, ARTEL_CACHE)"
        raise InputError.at("data.store", str(error), fix) from None
    # No `srun`: it would inherit limits of a job in which this process runs.
    lines = [
        "#!/bin/bash",
        *directives,
        "#SBATCH --requeue",
        f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH",
        *slurm.setup,
        "set -xe",
        f'{shlex.join(rank_command(submission, python="python"))} "$SLURM_ARRAY_TASK_ID" {num_ranks}',
    ]
    return "\n".join(lines) + "\n"


def _submit(submission: Submission, script: str) -> str:
    """Submit the job and return its id. Raise InputError if Slurm rejects it."""
    file = Path(submission.folder, "job.sbatch")
    file.write_text(script)
    result = _run_command("sbatch", "--parsable", str(file))
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [""]
        what = f"Slurm rejected the job {file}: {lines[-1].removeprefix('sbatch: error: ')}"
        raise InputError.at("prepare.slurm", what, _FIX_REJECTED)
    return result.stdout.strip().splitlines()[-1].partition(";")[0]  # ID, or ID;CLUSTER


class _Job:
    """A job array and its state in Slurm."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.states: dict[str, str] = {}
        """The last known state of each array task, also after Slurm has forgotten it."""
        self._pending_reasons: set[str] = set()
        self._last_answer = time.monotonic()

    def has_ended(self) -> bool:
        """True if no array task is pending or running.

        Raise WorkError if Slurm has not answered for 30 minutes (`_MAX_SILENT_SECONDS`).
        """
        result = _run_command("scontrol", "show", "job", "--oneliner", self.job_id)
        if result.returncode and "Invalid job id" not in result.stderr:
            if time.monotonic() - self._last_answer > _MAX_SILENT_SECONDS:
                what = f"Slurm has not answered for {_MAX_SILENT_SECONDS // 60} minutes: {result.stderr.strip()}"
                raise WorkError.at("prepare.engine", what, "run the same command when Slurm answers again")
            return False
        self._last_answer = time.monotonic()
        array_tasks = re.findall(r"^JobId=(\d+) .*? JobState=(\w+) Reason=(\S+)", result.stdout, re.MULTILINE)
        self.states |= {task_id: state for task_id, state, _ in array_tasks}
        self._pending_reasons = {reason for _, state, reason in array_tasks if state == "PENDING"}
        return all(state in _END_STATES for _, state, _ in array_tasks)

    def check(self) -> None:
        """Raise WorkError if the job will never start."""
        for reason in self._pending_reasons & _FATAL_REASONS:
            raise WorkError.at("prepare.slurm", f"the job {self.job_id} cannot start: {reason}", _FIX_REJECTED)

    def failed_states(self) -> list[str]:
        return sorted({state for state in self.states.values() if state in _END_STATES - {"COMPLETED"}})

    def cancel(self) -> None:
        """Cancel the job if it has not ended, and wait up to a minute until its processes are gone."""
        _run_command("scancel", self.job_id)
        deadline = time.monotonic() + _CANCEL_SECONDS
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(1)


def _wait_for_job(tasks: Tasks, submission: Submission, job: _Job, progress: Callable[[int, int], None]) -> None:
    """Wait for all results.

    Raise the errors of tasks, and WorkError if the job cannot start or ended without all results.
    """
    end_time: float | None = None
    while num_missing := wait_for_results(tasks, submission, progress):
        if end_time is None:
            end_time = time.monotonic() if job.has_ended() else None
            job.check()
        elif job.failed_states() or time.monotonic() > end_time + VISIBILITY_SECONDS:
            states = " and ".join(job.failed_states()) or "COMPLETED"
            raise lost_tasks_error(
                submission, num_missing, f"the job {job.job_id} ended as {states}", _find_fix(job.failed_states())
            )


def _find_fix(failed_states: list[str]) -> str:
    if "TIMEOUT" in failed_states:
        return 'write a longer time: prepare.slurm.options: {time: "48:00:00"}'
    if "OUT_OF_MEMORY" in failed_states:
        return "raise prepare.slurm.memory"
    return "fix what the log reports"


def _run_command(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "LC_ALL": "C"})
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "no answer within 60 seconds")
