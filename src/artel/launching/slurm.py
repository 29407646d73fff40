"""Run as a Slurm job: a batch script that requeues the run when its time is over or a node is lost.

srun starts one artel on each node, which starts the processes of that node. So a process that dies is restarted within
the allocation, every process sees all GPUs of its node (GPUs hidden by Slurm from other tasks cannot copy to each other
directly), and the launcher reports which process was lost.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from artel.config.sbatch import check_one_line, format_directive
from artel.errors import InputError, Problem, WorkError
from artel.secrets import hide_secrets

_WARNING_SECONDS = 120  # before the time limit: Slurm then tells the run to save


@dataclass(frozen=True, slots=True)
class Job:
    """Resources and options of the job. None means the cluster's default."""

    nodes: int = 1
    processes: int | None = None
    """Per node; None for one per GPU, or one without GPUs."""
    gpus: int = 0
    """On each node."""
    cpus: int | None = None
    """On each node."""
    time: str | None = None
    partition: str | None = None
    restarts: int = 0
    """Maximum number of restarts of the processes of a node after a failure."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Other options of sbatch by name: {"account": "nlp"}."""
    setup: Sequence[str] = ()
    """Lines of the script before the run, such as `module load cuda`."""


def slurm_script(name: str, values: Sequence[str], folder: Path, job: Job) -> str:
    """Return the batch script of `artel train NAME VALUES…` with the run's folder `folder`.

    Raise InputError if a value contains a secret, because Slurm keeps and shows scripts, or would not stay one word in
    its line.
    """
    secrets = [value for value in values if hide_secrets(value) != value]
    if secrets:
        what = "contains a secret, which the script of the job would show"
        fix = "write ${NAME} instead, and export NAME"
        raise InputError([Problem(value, what, fix) for value in secrets])
    problems: list[Problem] = []
    directives = _directive_lines(folder, job, problems)
    setup = _format_lines(job.setup, "--setup", check_one_line, problems)
    if problems:
        raise InputError(problems)
    lines = ["#!/bin/bash", *(f"#SBATCH --{line}" for line in directives), ""]
    lines += [f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH", *setup]
    step = ["srun", f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    if job.cpus is not None:
        step.append(f"--cpus-per-task={job.cpus}")  # srun does not inherit it from sbatch since Slurm 22.05
    processes = job.processes or job.gpus or 1
    # Quoted: overrides may have blanks, brackets and dollar signs.
    train = [*step, sys.executable, "-m", "artel", "train", name, *values, "--nproc", str(processes)]
    command = shlex.join(train) + f" --max-restarts {job.restarts} --nnodes {job.nodes}"
    if job.nodes > 1:
        # This script runs on the first node of the allocation, which differs each time the job is queued again.
        lines.append("port=$((15000 + SLURM_JOB_ID % 16000))")
        command += ' --rdzv-endpoint "$(hostname):$port"'
    return "\n".join([*lines, "", *_requeue_lines(command)]) + "\n"


def submit(script: str, folder: Path) -> str:
    """Submit the script and return the job ID. Raise InputError without sbatch, WorkError if it fails."""
    if shutil.which("sbatch") is None:
        fix = "run this on a login node of the cluster, or write the script with --dry-run and submit it there"
        raise InputError.at("sbatch", "is not installed here", fix)
    folder.mkdir(parents=True, exist_ok=True)  # Slurm drops a job, and its output, whose folder is missing
    result = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if result.returncode:
        raise WorkError.at("sbatch", result.stderr.strip() or "rejected the job", "check its options with --dry-run")
    return result.stdout.strip().partition(";")[0]


def _directive_lines(folder: Path, job: Job, problems: list[Problem]) -> list[str]:
    run_folder = folder.resolve()
    flags = {
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": job.cpus,
        "gpus-per-node": job.gpus or None,
        "time": job.time,
        "partition": job.partition,
        "open-mode": "append",  # one log for all runs of a requeued job
        "signal": f"B:USR1@{_WARNING_SECONDS}",
    }
    log = f"{run_folder}/".replace("%", "%%") + "slurm-%j.log"
    values: dict[str, tuple[str, Any]] = {"job-name": ("run", run_folder.name), "output": ("run", log)}
    values |= {name: (f"--{name}", value) for name, value in flags.items() if value is not None}
    values |= {name: ("--option", value) for name, value in job.options.items()}
    lines: list[str] = []
    for name, (flag, value) in values.items():
        lines += _format_lines([value], flag, partial(format_directive, name), problems)
    return [*lines, "requeue"]


def _format_lines(texts: Sequence[Any], flag: str, line: Callable[[Any], str], problems: list[Problem]) -> list[str]:
    """Return `line(text)` for each text. For a ValueError add a problem of `flag` instead."""
    lines = []
    for text in texts:
        try:
            lines.append(line(text))
        except ValueError as error:
            what, _, fix = str(error).rpartition("; ")
            problems.append(Problem(flag, what, fix))
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
