"""The folder of a run: the names of what is written there, in one place, and whether a run file still describes it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from artel.config import RunConfig, load_run, result_differences
from artel.errors import InputError, Problem
from artel.preparing.run_mark import (
    begin_new_run,
    check_claim,
    check_model_is_artels,
    check_own_checkpoints,
    check_own_weights,
    check_there,
    claim,
    foreign_in_model,
    has_weights,
    identity,
    note_model,
    note_weights,
    original_of,
)
from artel.storage import checksum, disk_errors, remove_leftovers, write_file


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def validation(self) -> Path:
        """What the figures of the newest validation leave out: tables, a confusion matrix."""
        return self.path / "validation.json"

    @property
    def tracker_runs(self) -> Path:
        """The ids of the runs of other packages that this run goes on with: W&B's, MLflow's, trackio's."""
        return self.path / "tracker_runs.json"

    @property
    def bad_steps(self) -> Path:
        """A line for each step that was NaN, infinite or a spike."""
        return self.path / "bad_steps.jsonl"

    @property
    def starts(self) -> Path:
        """A line for each start of the run: when, from which step, on what, and what was chosen."""
        return self.path / "starts.jsonl"

    @property
    def ranks(self) -> Path:
        """A small file for each process, which it writes again every few seconds: it lives, and where it stands."""
        return self.path / "ranks"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def last_checkpoint(self) -> str:
        """For people: `step 300`, or nothing where no checkpoint is written yet."""
        written = written_checkpoints(self.checkpoints)
        return f"step {int(written[-1].name.removeprefix('step-')):,}" if written else ""

    @property
    def how_to_continue(self) -> str:
        """For people: what is kept of a run that was stopped, and how to continue."""
        if step := self.last_checkpoint:
            return f"the same command resumes from the last checkpoint ({step})"
        return "no checkpoint is written yet: the same command starts again, with the text prepared so far"

    @property
    def before(self) -> Path:
        """What the model said of each sample before training."""
        return self.path / "before-training.safetensors"

    @property
    def teacher(self) -> Path:
        """Where the outputs of the run's teacher are kept."""
        return self.path / "teacher.json"

    @property
    def micro_batches(self) -> Path:
        """What was found to fit into memory, so that a run goes on bit for bit as it began."""
        return self.path / "micro_batches"

    @property
    def plan(self) -> Path:
        """What `artel plan` said before the run began, and later what was measured."""
        return self.path / "plan.json"

    @property
    def choice(self) -> Path:
        """What `model.auto` expected of the model that it chose, and once the run is done what was reached."""
        return self.path / "choice.json"

    @property
    def profile(self) -> Path:
        """Where the time of a few steps went."""
        return self.path / "profile"

    @property
    def hangs(self) -> Path:
        """Where the threads of a process stood that got no further."""
        return self.path / "hangs"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def lock(self) -> Path:
        """Held by who leads the run: a launcher, or its only process."""
        return self.path / ".lock"

    @property
    def processes_lock(self) -> Path:
        """Held by every process of the run together, also when its launcher has been killed."""
        return self.path / ".lock-processes"

    def check_claim(self) -> None:
        """Raise InputError where the folder has what artel would write over and did not make. Writes nothing."""
        check_claim(self.path)

    def claim(self, original: Path | None = None) -> str:
        """Make the folder, and mark it as a run's. Returns a note about a copy. Raises InputError as `check_claim`."""
        return claim(self.path, original)

    def check_model_is_artels(self) -> None:
        """Raise InputError where files of a user lie in `model`: it is about to be removed, or replaced."""
        check_model_is_artels(self.path)

    def foreign_in_model(self) -> list[Path]:
        """What lies in `model` and artel did not write."""
        return foreign_in_model(self.path)

    def note_model(self, names: Iterable[str]) -> None:
        """Remember which files artel has written into `model`."""
        note_model(self.path, names)

    def identity(self) -> str:
        """What tells this folder from one that is made anew in its place."""
        return identity(self.path)

    def check_there(self, its_identity: str) -> None:
        """Raise WorkError where the folder was removed, moved or made anew."""
        check_there(self.path, its_identity)

    def note_weights(self) -> None:
        """Record digests of the weights in `model`."""
        note_weights(self.path)

    @property
    def original(self) -> Path | None:
        """The folder that this one is a copy of, before it is claimed."""
        return original_of(self.path)

    def check_own_checkpoints(self) -> None:
        """Raise InputError for checkpoints of another run."""
        check_own_checkpoints(self.path, written_checkpoints(self.checkpoints))

    @property
    def is_complete(self) -> bool:
        """True if the run has ended, and the weights of its model are there."""
        return self.result.is_file() and has_weights(self.path)

    def newest_model(self) -> Path | None:
        """Return `model` unless it lacks weights or a checkpoint is newer, as in a run made longer.

        Raises InputError if these are the weights of another model.
        """
        if not has_weights(self.path) or not (self.is_complete or not (self.checkpoints / "latest").exists()):
            return None
        check_own_weights(self.path)
        return self.model

    def restore_config(self) -> Path | None:
        """Write a missing config.yaml again from the newest checkpoint, and return that file; else None.

        Raises InputError for a run that is complete and has no checkpoint either: nothing says how it was trained.
        """
        if self.config.is_file():
            return None
        saved = self.newest_run_file()
        if saved is not None:
            write_file(self.config, saved.read_bytes())
        elif self.result.is_file():
            what = "is gone, and so are the checkpoints: nothing says how this run was trained"
            raise InputError.at(str(self.config), what, "put it back, or begin anew with --restart")
        return saved

    def newest_run_file(self) -> Path | None:
        """The run file in the newest checkpoint where it is undamaged; None without such a checkpoint."""
        for path in reversed(written_checkpoints(self.checkpoints)):
            file = path / "run.yaml"
            with suppress(OSError, ValueError, AttributeError):
                if orjson.loads((path / "checksums.json").read_bytes()).get(file.name) == checksum(file):
                    return file
        return None

    def check_config(self, config: RunConfig) -> None:
        """Raise InputError if config.yaml describes another model than the checkpoints do: it was exchanged.

        Names of files and folders may change, since texts and base models are moved.
        """
        saved = self.newest_run_file()
        changed = [] if saved is None else result_differences(load_run(str(saved)), config)
        fix = f"put the run's own back: cp {saved} {self.config}"
        problems = [
            Problem(str(self.config), f"describes another model than {saved} ({line})", fix)
            for line in changed
            if line.startswith(("objective:", "model.")) and not line.startswith("model.from:")
        ]
        if problems:
            raise InputError(problems)

    @property
    def secret(self) -> Path:
        """By which the hosts of the run know what is theirs; nobody else's to read, and the same for ever."""
        return self.path / ".secret"

    def read_result(self) -> dict[str, Any]:
        """result.json. Raises InputError where it is damaged."""
        try:
            result = orjson.loads(self.result.read_bytes())
            if isinstance(result, dict):
                return result
            what = "is not an object"
        except (OSError, ValueError) as error:
            what = str(error)
        fix = "remove it: the same command writes it again from the last checkpoint"
        raise InputError.at(str(self.result), f"is damaged: {what}", fix)

    def empty(self) -> None:
        """Remove what an earlier run wrote here, and nothing else that may lie in the folder, which is claimed.

        `plan` stays, without what was measured: it is that of the run that begins. Of `checkpoints` the checkpoints
        are removed, also where it is a link to another disk; any other link alone is.
        Raises InputError where a user's files lie in `model`.
        """
        self.check_model_is_artels()
        with disk_errors(self.path):
            for path in [
                *written_checkpoints(self.checkpoints),
                self.checkpoints / "latest",
                self.checkpoints / "best",
            ]:
                _remove(path)
            remove_leftovers(self.checkpoints)
            if not self.checkpoints.is_symlink() and self.checkpoints.is_dir() and not any(self.checkpoints.iterdir()):
                self.checkpoints.rmdir()
            folders = (self.model, self.profile, self.micro_batches, self.hangs, self.ranks)
            of_trackers = (self.path / "tensorboard", self.path / "wandb", self.tracker_runs)
            files = (
                self.config,
                self.ledger,
                self.metrics,
                self.samples,
                self.bad_steps,
                self.starts,
                self.result,
                self.before,
                self.teacher,
                self.choice,
            )
            for path in (*folders, *of_trackers, *files):
                _remove(path)
            _forget_measured(self.plan)
            begin_new_run(self.path)


def written_checkpoints(folder: Path) -> list[Path]:
    """The folders in `checkpoints` that have the name of a checkpoint, oldest first."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{9,}", path.name) and path.is_dir())


def _forget_measured(plan: Path) -> None:
    with suppress(OSError, ValueError, AttributeError):  # no plan, or a damaged one
        content = orjson.loads(plan.read_bytes())
        if content.pop("measured", None) is not None:
            write_file(plan, orjson.dumps(content, option=orjson.OPT_INDENT_2))


def _remove(path: Path) -> None:
    """A file, a link, or a folder with all in it; nothing where nothing is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_done(config: RunConfig) -> bool:
    """Whether the run is complete, as long as `config` says."""
    folder = RunFolder(Path(config.run))
    return folder.is_complete and not (
        folder.config.is_file() and differs_in_length(load_run(str(folder.config)), config)
    )


_LENGTH = frozenset(("train.epochs", "train.steps", "train.tokens", "train.budget"))


def differs_in_length(before: RunConfig, config: RunConfig) -> bool:
    """Whether how long the run is differs, and nothing else that shapes the result."""
    changed = {line.partition(":")[0] for line in result_differences(before, config)}
    return bool(changed) and changed <= _LENGTH


def check_same(file: Path, config: RunConfig, instead: str) -> None:
    """Raise InputError where a run file differs from `config` in what shapes the result; `instead` is a way out."""
    remedy = f"set it back, {instead}, or begin anew with --restart"
    changed = result_differences(load_run(str(file)), config)
    if changed:
        fixes = ["" for _ in changed[1:]] + [remedy]  # once, below the last difference
        raise InputError(
            [Problem(str(file), f"the run began with {line}", fix) for line, fix in zip(changed, fixes, strict=True)]
        )
