"""Run as a Slurm job: a batch script that requeues the run when its time is over or a node is lost.

srun starts one artel on each node, which starts the processes of that node. So a process that dies is restarted within
the allocation, every process sees all GPUs of its node (GPUs hidden by Slurm from other tasks cannot copy to each other
directly), and the launcher reports which process was lost.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from artel.config import Section
from artel.config.sbatch import check_one_line, format_directive
from artel.errors import InputError, Problem, WorkError
from artel.integers import ceil_div
from artel.launching.job import Job, Launcher, read_secrets, run_tool

_WARNING_SECONDS = 120  # before the time limit: Slurm then tells the run to save


class SlurmSettings(Section):
    """Other options of its jobs."""

    options: dict[str, str] = Field(default={}, description="Other options of sbatch, e.g. {account: nlp, qos: high}.")


class Slurm(Launcher):
    """Submits a batch script. It needs no run file of its own: the nodes see the disk of this machine."""

    file = "job.sbatch"
    sees_disk = True
    without: ClassVar = {
        "image": "load what the run needs with launch.setup",
        "mounts": "Slurm's nodes see the disk of this machine under the same paths",
    }

    def describe(self, job: Job) -> str:
        """Return the batch script. Raise InputError if a value would not stay one word in its line."""
        launch = self.launch
        problems: list[Problem] = []
        directives = _directive_lines(job, self.launch.settings(SlurmSettings).options, problems)
        setup = _format_lines(launch.setup, "launch.setup", check_one_line, problems)
        exports = [f"export {name}={shlex.quote(value)}" for name, value in launch.environment.items()]
        exports = _format_lines(exports, "launch.environment", check_one_line, problems)
        if problems:
            raise InputError(problems)
        lines = ["#!/bin/bash", *(f"#SBATCH --{line}" for line in directives), ""]
        lines += [f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH", *exports, *setup]
        step = ["srun", f"--nodes={launch.nodes}", f"--ntasks={launch.nodes}", "--ntasks-per-node=1"]
        step.append("--kill-on-bad-exit=1")
        if launch.cpus is not None:
            step.append(f"--cpus-per-task={launch.cpus}")  # srun does not inherit it from sbatch since Slurm 22.05
        # Quoted: overrides may have blanks, brackets and dollar signs.
        command = shlex.join([*step, sys.executable, "-m", "artel", *job.words()])
        if job.trains:
            command += f" --nnodes {launch.nodes}"
        if launch.nodes > 1:
            # This script runs on the first node of the allocation, which differs each time the job is queued again.
            lines.append("port=$((15000 + SLURM_JOB_ID % 16000))")
            command += ' --rdzv-endpoint "$(hostname):$port"'
        return "\n".join([*lines, "", *_requeue_lines(command)]) + "\n"

    def submit(self, text: str, job: Job) -> str:
        read_secrets(self.launch.secrets)  # sbatch hands the variables of this process on to the job
        fix = "run this on a login node of the cluster, or write the script with --dry-run and submit it there"
        return run_tool("sbatch", "--parsable", text=text, fix=fix).strip().partition(";")[0]

    def status(self, job_id: str) -> str:
        """Ask the controller, and the accounting database once the controller has forgotten the job."""
        try:
            found = re.search(r"JobState=(\w+)", run_tool("scontrol", "show", "job", "--oneliner", job_id))
        except WorkError:
            found = re.match(r"\s*(\w+)", run_tool("sacct", "-X", "-n", "-o", "State", "-j", job_id))
        return found[1] if found else "unknown"

    def show_logs(self, job_id: str, folder: Path, follow: bool) -> None:
        file = log_file(folder, job_id)
        if not file.exists():
            raise InputError.at(str(file), "does not exist yet", "the job has not started; see artel launch status")
        subprocess.run(["tail", "-n", "+1", *(["-F"] if follow else []), str(file)], check=False)

    def cancel(self, job_id: str) -> None:
        run_tool("scancel", job_id)


def log_file(folder: Path, job_id: str) -> Path:
    """Return the log of a job: one for all its starts."""
    return folder / f"slurm-{job_id}.log"


def _directive_lines(job: Job, options: dict[str, str], problems: list[Problem]) -> list[str]:
    launch, run_folder = job.launch, job.folder.resolve()
    keys = {
        "nodes": ("nodes", launch.nodes),
        "ntasks-per-node": ("nodes", 1),
        "cpus-per-task": ("cpus", launch.cpus),
        "gpus-per-node": ("gpus", launch.gpus or None),
        "mem": ("memory", launch.memory and f"{ceil_div(launch.memory, 2**20)}M"),
        "time": ("time", launch.time and _format_time(launch.time)),
        "partition": ("queue", launch.queue),
        "open-mode": ("slurm", "append"),  # one log for all runs of a requeued job
        "signal": ("slurm", f"B:USR1@{_WARNING_SECONDS}"),
    }
    log = str(log_file(Path(f"{run_folder}".replace("%", "%%")), "%j"))
    values: dict[str, tuple[str, Any]] = {"job-name": ("run", run_folder.name), "output": ("run", log)}
    values |= {name: (f"launch.{key}", value) for name, (key, value) in keys.items() if value is not None}
    values |= {name: ("launch.slurm.options", value) for name, value in options.items()}
    lines: list[str] = []
    for name, (key, value) in values.items():
        lines += _format_lines([value], key, partial(format_directive, name), problems)
    return [*lines, "requeue"]


def _format_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def _format_lines(texts: Sequence[Any], key: str, line: Callable[[Any], str], problems: list[Problem]) -> list[str]:
    """Return `line(text)` for each text. For a ValueError add a problem of `key` instead."""
    lines = []
    for text in texts:
        try:
            lines.append(line(text))
        except ValueError as error:
            what, _, fix = str(error).rpartition("; ")
            problems.append(Problem(key, what, fix))
    return lines


def _requeue_lines(command: str) -> list[str]:
    """Return shell lines that run the step. On Slurm's warning it saves and stops, and the job is requeued."""
    return [
        "# Before the time is over Slurm sends USR1 to this shell alone: the step saves and stops, and the job is",
        "# queued again. artel resumes from the last checkpoint, and does nothing when the run is complete.",
        "warned=",
        """trap 'warned=yes; kill -USR1 "$step"' USR1""",
        f"{command} &",
        "step=$!",
        'wait "$step"',
        "status=$?",
        'while kill -0 "$step" 2>/dev/null; do  # the signal ended the waiting, not the step',
        '    wait "$step"',
        "    status=$?",
        "done",
        'if [ -n "$warned" ] && [ "$status" -ne 0 ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$status"',
    ]
