"""`artel launch`: check a command, have a launcher submit it, and follow the job later by its record in the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from artel.config import LaunchConfig, Overrides, RunConfig, RunFile, read_run_file
from artel.errors import InputError, Problem
from artel.launching.job import Job, Launcher
from artel.launching.quiet_libraries import quiet_libraries
from artel.launching.read_run import validate_run_file
from artel.messages import logger
from artel.plugins import load_plugin
from artel.registry import LAUNCHERS
from artel.secrets import hide_secrets
from artel.storage import write_file

_COMMANDS = (("train",), ("prepare",), ("evaluate",), ("generate",), ("data", "mine"))


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that was submitted, as RUN/launch/job.json records it."""

    launcher: Launcher
    folder: Path
    """The run's folder."""
    job: str
    """The job's id at the backend."""


def make_job(name: str, overrides: Overrides, command: Sequence[str]) -> Job:
    """Return the job of a run, or of another command with the `launch` section of that run.

    Raise InputError with all problems of the run, and for a command that cannot be launched.
    """
    _check_secrets({word: word for word in (*overrides.words, *command)})
    file = read_run_file(name)
    config = validate_run_file(file, overrides, here=False)
    launch = config.launch
    words = [word for word in overrides.words if not word.startswith("launch.")]
    if not command:
        command = ("train", name, *words)
        _check_run(config)
    elif not any(tuple(command[: len(known)]) == known for known in _COMMANDS):
        known = ", ".join(" ".join(words) for words in _COMMANDS)
        raise InputError.at(command[0], "cannot be launched", f"write one of: {known}")
    elif launch.nodes > 1 and command[0] != "train":
        raise InputError.at("launch.nodes", f"is {launch.nodes}, but artel {command[0]} runs on one node", "write 1")
    elif command[0] == "generate" and "--prompts" not in command:
        raise InputError.at("generate", "would wait for prompts at a terminal", "add --prompts FILE --out FILE")
    launcher: type[Launcher] = LAUNCHERS[launch.to or ""]
    files = {} if launcher.sees_disk else _file_text(name, file)
    hang_timeout = config.train.hang_timeout if command[0] == "train" else None
    job = Job(Path(config.run), tuple(command), launch, files, config.plugins, hang_timeout)
    _check_secrets(job.files)
    return job


def find_launcher(launch: LaunchConfig) -> Launcher:
    """Return the launcher of a `launch` section. Log its keys that this launcher has no use for."""
    launcher: Launcher = LAUNCHERS[launch.to or ""](launch)
    for key in launcher.without.keys() & launch.model_fields_set:
        if getattr(launch, key):
            logger.info("launch.%s has no effect with %s: %s", key, launch.to, launcher.without[key])
    return launcher


def submit(launcher: Launcher, text: str, job: Job) -> Submission:
    """Write the description into the run's folder, submit it and record the job there."""
    write_file(job.folder / "launch" / launcher.file, text)
    job_id = launcher.submit(text, job)
    launch = job.launch.model_dump(mode="json", by_alias=True, exclude_unset=True)
    record = {"job": job_id, "plugins": job.plugins, "launch": launch}
    write_file(_record_file(job.folder), orjson.dumps(record, option=orjson.OPT_INDENT_2))
    return Submission(launcher, job.folder, job_id)


def open_submission(name: str) -> Submission:
    """Return the newest job of a run, by its folder or run file. Raise InputError if none was submitted from here."""
    folder = Path(name) if Path(name).is_dir() else Path(read_run_file(name).run().run)
    try:
        record: dict[str, Any] = orjson.loads(_record_file(folder).read_bytes())
    except FileNotFoundError:
        fix = "submit it: artel launch NAME RUN; or name the folder of the run on the machine that did"
        raise InputError.at(str(folder), "has no job that was submitted from here", fix) from None
    for plugin in record["plugins"]:  # one of them may have the launcher
        load_plugin(plugin)
    launch = LaunchConfig.model_validate(record["launch"])
    return Submission(LAUNCHERS[launch.to or ""](launch), folder, record["job"])


def _record_file(folder: Path) -> Path:
    return folder / "launch" / "job.json"


def _file_text(name: str, file: RunFile) -> dict[str, str]:
    """Return the run file for a machine that does not see it; nothing for a recipe, which is part of artel."""
    return {name: Path(file.name).read_text(encoding="utf-8-sig")} if Path(name).is_file() else {}


def _check_secrets(texts: Mapping[str, str]) -> None:
    """Raise InputError for texts with a secret: backends keep and show descriptions of jobs."""
    fix = "write ${NAME} instead, export NAME, and add it to launch.secrets"
    secrets = [where for where, text in texts.items() if hide_secrets(text) != text]
    if secrets:
        raise InputError(
            Problem(where, "has a secret, which the job's description would show", fix) for where in secrets
        )


def _check_run(config: RunConfig) -> None:
    """Check the run before it is queued. The devices of the job's machines are unknown here."""
    quiet_libraries()
    from artel.planning import StartConditions, check_run

    launch = config.launch
    check_run(config, StartConditions(launch.nodes * launch.processes, launch.processes, trains_here=False))
