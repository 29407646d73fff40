"""The folder of a run: the names of what is written there, in one place, and whether it may be gone on with."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from artel.config import RunConfig, dump_run, load_run, result_differences
from artel.errors import InputError, Problem
from artel.storage import disk_errors, write_file


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
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def before(self) -> Path:
        """What the model said of each sample before training."""
        return self.path / "before-training.safetensors"

    @property
    def micro_batches(self) -> Path:
        """What was found to fit into memory, so that a run goes on bit for bit as it began."""
        return self.path / "micro_batches"

    @property
    def profile(self) -> Path:
        """Where the time of a few steps went."""
        return self.path / "profile"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    def empty(self) -> None:
        """Remove what an earlier run wrote here, and nothing else that may lie in the folder."""
        with disk_errors(self.path):
            for path in (self.checkpoints, self.model, self.profile, self.micro_batches, self.path / "tensorboard"):
                if path.exists():
                    shutil.rmtree(path)
            for path in (self.config, self.ledger, self.metrics, self.samples, self.result, self.before):
                path.unlink(missing_ok=True)


def check_same_run(config: RunConfig) -> None:
    """Refuse to go on with a run whose file has changed in what shapes the result, and show the difference.

    Also writes RUN/config.yaml. Called once, by the first process, before the others start.
    """
    folder = RunFolder(Path(config.run))
    if any(folder.checkpoints.glob("step-*")) and folder.config.is_file():
        changed = result_differences(load_run(str(folder.config)), config)
        if changed:
            remedy = "set it back, choose another folder (run=…), or begin anew with --restart"
            raise InputError([Problem(f"{folder.config}", f"the run began with {line}", remedy) for line in changed])
    write_file(folder.config, dump_run(config))
