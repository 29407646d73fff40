"""The folder of a run: the names of its files, and checks that a run file still describes it."""

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
    assign_new_id,
    check_checkpoint_ownership,
    check_claim,
    check_model_ownership,
    check_not_moved,
    check_weight_ownership,
    claim_folder,
    find_original,
    foreign_model_files,
    has_weights,
    read_run_id,
    record_model_files,
    record_weights,
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
        """Details of the newest validation beyond its metrics: tables, a confusion matrix."""
        return self.path / "validation.json"

    @property
    def tracker_runs(self) -> Path:
        """Ids of this run in W&B, MLflow and trackio."""
        return self.path / "tracker_runs.json"

    @property
    def bad_steps(self) -> Path:
        """A line for each step that was NaN, infinite or a spike."""
        return self.path / "bad_steps.jsonl"

    @property
    def starts(self) -> Path:
        """A line for each start of the run: time, first step, environment and choices."""
        return self.path / "starts.jsonl"

    @property
    def ranks(self) -> Path:
        """A status file for each process, rewritten every few seconds."""
        return self.path / "ranks"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def last_checkpoint(self) -> str:
        """`step 300`, for messages. Empty before the first checkpoint."""
        checkpoints = written_checkpoints(self.checkpoints)
        return f"step {int(checkpoints[-1].name.removeprefix('step-')):,}" if checkpoints else ""

    @property
    def continue_hint(self) -> str:
        """Message for a stopped run: how to continue it, and from which checkpoint."""
        if step := self.last_checkpoint:
            return f"the same command resumes from the last checkpoint ({step})"
        return "no checkpoint is written yet: the same command starts again, with the text prepared so far"

    @property
    def engine(self) -> Path:
        """The weights that a server has loaded to write the newest round (`policy.engine`)."""
        return self.path / "engine"

    @property
    def rollouts(self) -> Path:
        """A file per round of a run that learns from rewards: its answers and their rewards."""
        return self.path / "rollouts"

    @property
    def reference_outputs(self) -> Path:
        """Outputs of the untrained model for each sample."""
        return self.path / "before-training.safetensors"

    @property
    def teacher(self) -> Path:
        """Location of the teacher's outputs."""
        return self.path / "teacher.json"

    @property
    def micro_batches(self) -> Path:
        """Micro-batches found to fit into memory, so that a run resumes bit for bit."""
        return self.path / "micro_batches"

    @property
    def plan(self) -> Path:
        """The plan made before the run, and later the measurements."""
        return self.path / "plan.json"

    @property
    def choice(self) -> Path:
        """Values expected of the model chosen by `model.auto`, and the results of the finished run."""
        return self.path / "choice.json"

    @property
    def profile(self) -> Path:
        """Profile of a few steps."""
        return self.path / "profile"

    @property
    def hangs(self) -> Path:
        """Stacks of processes that hung."""
        return self.path / "hangs"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def lock(self) -> Path:
        """Locked by the launcher, or by the only process."""
        return self.path / ".lock"

    @property
    def processes_lock(self) -> Path:
        """Locked by all processes of the run together, even if their launcher was killed."""
        return self.path / ".lock-processes"

    def check_claim(self) -> None:
        """Raise InputError if artel would overwrite user files. Writes nothing."""
        check_claim(self.path)

    def claim(self, original: Path | None = None) -> str:
        """Create the folder and mark it as a run's. Return a note about a copy. Raise InputError like `check_claim`."""
        return claim_folder(self.path, original)

    def check_model_ownership(self) -> None:
        """Raise InputError if `model`, about to be removed or replaced, has user files."""
        check_model_ownership(self.path)

    def foreign_model_files(self) -> list[Path]:
        """Return the files in `model` that artel did not write."""
        return foreign_model_files(self.path)

    def record_model_files(self, names: Iterable[str]) -> None:
        """Record which files artel has written into `model`."""
        record_model_files(self.path, names)

    def identity(self) -> str:
        """Return an identifier that changes if the folder is replaced by a new one."""
        return read_run_id(self.path)

    def check_not_moved(self, expected: str) -> None:
        """Raise WorkError if the folder no longer has the expected identity: it was removed, moved or replaced."""
        check_not_moved(self.path, expected)

    def record_weights(self) -> None:
        """Record digests of the weights in `model`."""
        record_weights(self.path)

    @property
    def original(self) -> Path | None:
        """The folder that this one was copied from, until it is claimed."""
        return find_original(self.path)

    def check_checkpoint_ownership(self) -> None:
        """Raise InputError for checkpoints of another run."""
        check_checkpoint_ownership(self.path, written_checkpoints(self.checkpoints))

    @property
    def is_complete(self) -> bool:
        """True if the run has ended and its model has weights."""
        return self.result.is_file() and has_weights(self.path)

    def newest_model(self) -> Path | None:
        """Return `model`, or None if it lacks weights or a checkpoint is newer, as in a run made longer.

        Raise InputError if the weights there are of another model.
        """
        if not has_weights(self.path) or not (self.is_complete or not (self.checkpoints / "latest").exists()):
            return None
        check_weight_ownership(self.path)
        return self.model

    def restore_config(self) -> Path | None:
        """Restore a missing config.yaml from the newest checkpoint, and return the checkpoint's file, or None.

        Raise InputError for a complete run without a checkpoint: nothing says how it was trained.
        """
        if self.config.is_file():
            return None
        saved = self.newest_run_file()
        if saved is not None:
            write_file(self.config, saved.read_bytes())
        elif self.result.is_file():
            message = "is gone, and so are the checkpoints: the settings of this run are unknown"
            raise InputError.at(str(self.config), message, "restore it, or start over with --restart")
        return saved

    def newest_run_file(self) -> Path | None:
        """Return the run file of the newest checkpoint that has an undamaged one, or None."""
        for path in reversed(written_checkpoints(self.checkpoints)):
            file = path / "run.yaml"
            with suppress(OSError, ValueError, AttributeError):
                if orjson.loads((path / "checksums.json").read_bytes()).get(file.name) == checksum(file):
                    return file
        return None

    def check_config(self, config: RunConfig) -> None:
        """Raise InputError if config.yaml describes a different model than the checkpoints.

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
        """Secret that authenticates the hosts of the run. Readable by the owner only, and never changed."""
        return self.path / ".secret"

    def read_result(self) -> dict[str, Any]:
        """Return result.json. Raise InputError if it is damaged."""
        try:
            result = orjson.loads(self.result.read_bytes())
            if isinstance(result, dict):
                return result
            message = "is not an object"
        except (OSError, ValueError) as error:
            message = str(error)
        fix = "remove it: the same command writes it again from the last checkpoint"
        raise InputError.at(str(self.result), f"is damaged: {message}", fix)

    def empty(self) -> None:
        """Remove everything that an earlier run wrote, but no other files. The folder must be claimed.

        `plan` stays, without measurements, since it belongs to the new run. If `checkpoints` is a link to another
        disk, the checkpoints there are removed; other links are removed themselves. Raise InputError if `model` has
        user files.
        """
        self.check_model_ownership()
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
            folders = (self.model, self.engine, self.rollouts, self.profile, self.micro_batches, self.hangs, self.ranks)
            tracker_files = (self.path / "tensorboard", self.path / "wandb", self.tracker_runs)
            files = (
                self.config,
                self.ledger,
                self.metrics,
                self.samples,
                self.bad_steps,
                self.starts,
                self.result,
                self.reference_outputs,
                self.teacher,
                self.choice,
            )
            for path in (*folders, *tracker_files, *files):
                _remove(path)
            _remove_measurements(self.plan)
            assign_new_id(self.path)


def written_checkpoints(folder: Path) -> list[Path]:
    """Return all folders in `checkpoints` that are named like a checkpoint, oldest first."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d{9,}", path.name) and path.is_dir())


def _remove_measurements(plan: Path) -> None:
    with suppress(OSError, ValueError, AttributeError):  # no plan, or a damaged one
        content = orjson.loads(plan.read_bytes())
        if content.pop("measured", None) is not None:
            write_file(plan, orjson.dumps(content, option=orjson.OPT_INDENT_2))


def _remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_done(config: RunConfig) -> bool:
    """True if the run is complete, with the length that `config` asks for."""
    folder = RunFolder(Path(config.run))
    return folder.is_complete and not (
        folder.config.is_file() and differs_in_length(load_run(str(folder.config)), config)
    )


_LENGTH_KEYS = frozenset(("train.epochs", "train.steps", "train.tokens", "train.budget"))


def differs_in_length(old_config: RunConfig, config: RunConfig) -> bool:
    """True if the length of the run differs, but nothing else that affects the result."""
    changed_keys = {line.partition(":")[0] for line in result_differences(old_config, config)}
    return bool(changed_keys) and changed_keys <= _LENGTH_KEYS


def check_same(file: Path, config: RunConfig, alternative: str) -> None:
    """Raise InputError if a run file differs from `config` in keys that affect the result. `alternative`: a fix."""
    remedy = f"change it back, {alternative}, or start over with --restart"
    differences = result_differences(load_run(str(file)), config)
    if differences:
        fixes = ["" for _ in differences[1:]] + [remedy]  # only after the last difference
        raise InputError(
            [
                Problem(str(file), f"the run began with {line}", fix)
                for line, fix in zip(differences, fixes, strict=True)
            ]
        )
