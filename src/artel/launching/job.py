"""A job of `artel launch`, and the interface of launchers, which submit it to a cluster or a cloud."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from artel.config import LaunchConfig
from artel.errors import InputError, WorkError

NODE_VARIABLES = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")
PORT = 29500
"""Port of the rendezvous on the first node."""
_FOLDER = "/tmp/artel"  # for run files, on the machine of the job
_FILE_VARIABLE = "ARTEL_LAUNCH_FILE"


@dataclass(frozen=True, slots=True)
class Job:
    """A command of artel with what it needs, before a launcher describes it to its backend."""

    folder: Path
    """The run's folder on this machine. The job is recorded in it."""
    command: Sequence[str]
    """Words after `artel`, e.g. ("train", "run.yaml", "train.steps=3")."""
    launch: LaunchConfig
    files: Mapping[str, str] = field(default_factory=dict)
    """Text of the run file by its name in `command`, for machines that do not see this disk. At most one."""
    plugins: Sequence[str] = ()
    """Modules of the run that may register the launcher."""
    hang_timeout: float | None = None
    """Seconds without progress after which a process of the run ends itself. None if the command has no watchdog."""

    @property
    def trains(self) -> bool:
        return self.command[0] == "train"

    @property
    def name(self) -> str:
        """Name of the job: lowercase letters, digits and hyphens, at most 40, as Kubernetes allows."""
        name = re.sub(r"[^a-z0-9]+", "-", self.folder.name.lower()).strip("-")
        if not name:
            return f"artel-{hashlib.sha256(self.folder.name.encode()).hexdigest()[:8]}"
        return (name if name[0].isalpha() else f"run-{name}")[:40].rstrip("-")

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the job: those of `launch`, and the run file."""
        return {
            **self.launch.environment,
            **dict.fromkeys([_FILE_VARIABLE] if self.files else [], *self.files.values()),
        }

    def words(self) -> list[str]:
        """Return the command. `artel train` also gets its processes and restarts; the nodes come from PET_NNODES …"""
        words = [_remote_path(word) if word in self.files else word for word in self.command]
        if self.trains:
            words += ["--nproc", str(self.launch.processes), "--max-restarts", str(self.launch.max_restarts)]
        return words

    def shell(self, *lines: str) -> str:
        """Return a shell script for a machine that does not see this disk. `lines` come before the command."""
        script = ["set -e", *lines]
        for name in self.files:
            path = shlex.quote(_remote_path(name))
            script.append(f'mkdir -p {_FOLDER} && printf %s "${_FILE_VARIABLE}" > {path}')
        script += [f"cd {shlex.quote(folder)}" for folder in list(self.launch.mounts.values())[:1]]
        return "\n".join([*script, *self.launch.setup, f"exec artel {shlex.join(self.words())}"]) + "\n"


def _remote_path(name: str) -> str:
    return f"{_FOLDER}/{Path(name).name}"


class Launcher:
    """Base class of launchers. Each describes a job in the words of its backend, submits it and follows it."""

    file: ClassVar[str]
    """Name of the description in RUN/launch."""
    sees_disk: ClassVar[bool] = False
    """True if the job's machines see the disk of this one under the same paths."""
    without: ClassVar[Mapping[str, str]] = {}
    """Keys of `launch` that the backend has no use for, each with what to use instead."""

    def __init__(self, launch: LaunchConfig) -> None:
        self.launch = launch

    def describe(self, job: Job) -> str:
        """Return the text that `submit` submits. Raise InputError if the backend cannot run the job."""
        raise NotImplementedError

    def submit(self, text: str, job: Job) -> str:
        """Submit a description and return the id of the job. Raise InputError or WorkError if that fails."""
        raise NotImplementedError

    def status(self, job_id: str) -> str:
        """Return the state of a job in a few words, as the backend calls it."""
        raise NotImplementedError

    def show_logs(self, job_id: str, folder: Path, follow: bool) -> None:
        """Print the output of a job on standard output. `follow`: until it ends."""
        raise NotImplementedError

    def cancel(self, job_id: str) -> None:
        """End a job. It gets a signal first, and saves."""
        raise NotImplementedError


def dump_yaml(*documents: Any) -> str:
    """Return documents as YAML for people: keys in their order, texts of several lines as they are."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def run_tool(
    *command: str,
    text: str = "",
    fix: str = "",
    advice: str = "fix what it reports; --dry-run prints the description of the job",
    show: bool = False,
) -> str:
    """Run the command line of a backend and return its output. `text`: its input. `show`: print its output instead.

    Raise InputError with `fix` if the program is not installed, and WorkError with `advice` if it fails.
    """
    program = command[0]
    if shutil.which(program) is None:
        raise InputError.at(program, "is not installed here", fix or f"install {program}")
    result = subprocess.run(
        command, input=text, stdout=None if show else subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["it printed no message"]
        where, what = shlex.join(command[:3]), f"failed: {lines[-1]}"
        raise WorkError.at(where, what, advice)
    return result.stdout or ""


def read_secrets(names: Sequence[str]) -> dict[str, str]:
    """Return the values of secret variables. Raise InputError if one is not exported here."""
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise InputError.at("launch.secrets", f"{', '.join(missing)} is not set here", f"export {missing[0]}=…")
    return {name: os.environ[name] for name in names}
