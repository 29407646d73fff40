"""The tasks of a stage as a job array of Slurm, submitted by datatrove and waited for here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datatrove.executor.slurm import SlurmPipelineExecutor  # type: ignore[import-untyped]
from datatrove.utils.logging import logger  # type: ignore[import-untyped]

from artel.config import PrepareConfig, SlurmConfig
from artel.config.sbatch import quoted
from artel.errors import InputError, WorkError
from artel.preparing.engines.cluster import UNSEEN_SECONDS, Watch, Work, lost, new_work
from artel.preparing.tasks import Stage, Tasks
from artel.preparing.workspace import Workspace
from artel.storage import write_file

_PROCESSES = 64
_JOB_FILE = "slurm-job"
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
          "PREEMPTED", "REVOKED"}  # fmt: skip
# Why a job waits that will not start by waiting, as Slurm says it.
_HOPELESS = {"BadConstraints", "JobHeldAdmin", "JobHeldUser", "launch_failed_requeued_held", "PartitionTimeLimit",
             "PartitionNodeLimit", "InvalidAccount", "InvalidQOS", "DependencyNeverSatisfied"}  # fmt: skip
_REFUSED = "write partition, time, memory and options as the cluster has them (scontrol show partition)"
_CANCEL_SECONDS = 60
_SILENT_SECONDS = 1800


def check() -> None:
    """Raise InputError where no job can be submitted."""
    if missing := [name for name in ("sbatch", "scontrol", "scancel") if shutil.which(name) is None]:
        what = f"slurm: there is no {missing[0]} on this machine"
        fix = "start artel on a login node of the cluster; or write prepare.engine: local"
        raise InputError.at("prepare.engine", what, fix)


def run_by_slurm(tasks: Tasks, stage: Stage, wanted: PrepareConfig, progress: Callable[[int, int], None]) -> None:
    """Submit what is left of a stage and wait until it is done. Raises InputError, WorkError.

    However it ends, none of its jobs is left in the queue.
    """
    work = new_work(tasks, stage, wanted.slurm.cpus)
    processes = min(_PROCESSES if wanted.workers == "auto" else wanted.workers, len(work.numbers))
    array = Array(work, -(-processes // wanted.slurm.cpus), wanted.slurm)
    job = _Job(array.submit())
    try:
        write_file(Path(work.folder, _JOB_FILE), job.number)
        _wait(work, job, Watch(tasks, work, progress))
    finally:
        job.cancel()
        Path(work.folder, _JOB_FILE).unlink(missing_ok=True)


def cancel_jobs(workspace: Workspace) -> None:
    """End what an earlier starter submitted and, being killed, left in the queue."""
    for file in workspace.path.glob(f"jobs/*/{_JOB_FILE}"):
        if shutil.which("scancel") is not None:
            _Job(file.read_text()).cancel()
        file.unlink()


class Array(SlurmPipelineExecutor):
    """datatrove's job array, without its further job that adds up statistics, and with the cluster's own partition."""

    def __init__(self, work: Work, jobs: int, wanted: SlurmConfig) -> None:
        # No `srun`: there is nothing to spread, and it would inherit limits of a job in which the starter may stand.
        here = f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"
        super().__init__(
            [work], tasks=jobs, time=wanted.time, partition=wanted.partition, cpus_per_task=wanted.cpus,
            job_name=f"artel-{work.stage}", qos="", env_command="\n".join([here, *wanted.setup]),
            sbatch_args={"mem-per-cpu": f"{-(-wanted.memory // 2**20)}M", **wanted.options}, max_array_size=-1,
            logging_dir=work.folder, with_srun=False,
        )  # fmt: skip

    def get_sbatch_args(self, max_array: int = 1) -> dict[str, Any]:
        wanted: dict[str, Any] = super().get_sbatch_args(max_array)
        return {name: quoted(str(value)) for name, value in wanted.items() if name != "partition" or value}

    def launch_merge_stats(self) -> None:
        pass

    def submit(self) -> str:
        """The number of the job. Raises InputError where Slurm refuses it."""
        with _silence():
            try:
                self.launch_job()
            except ValueError as error:  # of the path of its logs; what else goes into the script is checked before
                fix = "choose another folder for stores (data.store, ARTEL_CACHE)"
                raise InputError.at("data.store", str(error), fix) from None
            except subprocess.CalledProcessError:
                script = self.logging_dir.resolve_paths("launch_script.slurm")
                told = _run("sbatch", "--test-only", script).stderr.strip().splitlines()
                what = f"Slurm refuses the job {script}: {told[-1].removeprefix('sbatch: error: ') if told else ''}"
                raise InputError.at("prepare.slurm", what, _REFUSED) from None
        return str(self.job_id)


class _Job:
    """A job array: what Slurm says of its elements."""

    def __init__(self, number: str) -> None:
        self.number = number
        self.states: dict[str, str] = {}
        """The last known state of each element that was seen, also when Slurm has forgotten it."""
        self._waits_for: set[str] = set()
        self._answered = time.monotonic()

    def has_ended(self) -> bool:
        """Whether no element waits or runs. Raises WorkError when Slurm is silent for long."""
        done = _run("scontrol", "show", "job", "--oneliner", self.number)
        if done.returncode and "Invalid job id" not in done.stderr:
            if time.monotonic() - self._answered > _SILENT_SECONDS:
                what = f"Slurm has not answered for {_SILENT_SECONDS // 60} minutes: {done.stderr.strip()}"
                raise WorkError.at("prepare.engine", what, "run the same command when it does")
            return False
        self._answered = time.monotonic()
        found = re.findall(r"^JobId=(\d+) .*? JobState=(\w+) Reason=(\S+)", done.stdout, re.MULTILINE)
        self.states |= {element: state for element, state, _ in found}
        self._waits_for = {reason for _, state, reason in found if state == "PENDING"}
        return all(state in _ENDED for _, state, _ in found)

    def check(self) -> None:
        """Raise WorkError where it waits for what will not come."""
        for reason in self._waits_for & _HOPELESS:
            raise WorkError.at("prepare.slurm", f"the job {self.number} cannot start: {reason}", _REFUSED)

    def failures(self) -> list[str]:
        return sorted({state for state in self.states.values() if state in _ENDED - {"COMPLETED"}})

    def cancel(self) -> None:
        """End it, where it has not ended, and wait until its processes are gone: up to a minute."""
        _run("scancel", self.number)
        until = time.monotonic() + _CANCEL_SECONDS
        while not self.has_ended() and time.monotonic() < until:
            time.sleep(1)


def _wait(work: Work, job: _Job, watch: Watch) -> None:
    """Until all results are there. Raises what tasks raised, and WorkError when the job ended without them."""
    ended: float | None = None
    while missing := watch.missing():
        if ended is None:
            ended = time.monotonic() if job.has_ended() else None
            job.check()
        elif job.failures() or time.monotonic() > ended + UNSEEN_SECONDS:
            states = " and ".join(job.failures()) or "COMPLETED"
            raise lost(work, missing, f"the job {job.number} ended as {states}", _remedy(job.failures()))


def _remedy(failures: list[str]) -> str:
    if "TIMEOUT" in failures:
        return "raise prepare.slurm.time"
    if "OUT_OF_MEMORY" in failures:
        return "raise prepare.slurm.memory"
    return "mend what it tells"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "LC_ALL": "C"})
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", "no answer within 60 seconds")


@contextmanager
def _silence() -> Iterator[None]:
    """datatrove tells of each job on standard error; who waits is told by us."""
    logger.disable("datatrove")
    try:
        yield
    finally:
        logger.enable("datatrove")
