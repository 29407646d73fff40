"""Retention of checkpoints, and the check for free disk space."""

from __future__ import annotations

import shutil
from pathlib import Path

from transformers import PreTrainedModel

from artel.config import TrainConfig
from artel.config.schema.run import CheckpointConfig
from artel.errors import InputError
from artel.messages import logger
from artel.storage import discard, disk_errors, replace_link
from artel.training.checkpoint.format import Progress, checkpoint_path, list_checkpoints
from artel.training.optim.local_shards import trained_tensors
from artel.training.optim.optimizer import state_bytes


def commit(folder: Path, progress: Progress, config: CheckpointConfig) -> None:
    """Finish a written checkpoint: move the links `latest` and `best`, and remove old checkpoints.

    Also called when a run resumes, since a kill may have interrupted it.
    """
    replace_link(folder / "latest", checkpoint_path(folder, progress.step))
    if progress.best_step is not None and (best := checkpoint_path(folder, progress.best_step)).is_dir():
        replace_link(folder / "best", best)
    retain(folder, config)


def retain(folder: Path, config: CheckpointConfig) -> None:
    """Remove checkpoints beyond `checkpoint.keep`, but never `latest` or `best`."""
    pointed_to = {(folder / name).resolve() for name in ("latest", "best")}
    for path in list_checkpoints(folder)[: -config.keep]:
        if path.resolve() not in pointed_to:
            discard(path)


def checkpoint_bytes(model: PreTrainedModel, train: TrainConfig, stages: int) -> int:
    """Estimate the bytes of a checkpoint: trained weights and optimizer state, for all `stages` of a pipeline."""
    weights = sum(tensor.numel() * tensor.element_size() for tensor in trained_tensors(model).values())
    return stages * (weights + state_bytes(model, train))


def check_space(folder: Path, expected: int) -> None:
    """Report the size of a checkpoint and the free space. Raise InputError if not even one fits."""
    with disk_errors(folder):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
    logger.info("a checkpoint takes about %s; %s are free in %s", _format_bytes(expected), _format_bytes(free), folder)
    if free < expected:
        message = f"a checkpoint takes about {_format_bytes(expected)}, but only {_format_bytes(free)} are free"
        raise InputError.at(str(folder), message, "free space there, or choose another folder (run=…)")


def _format_bytes(num_bytes: int) -> str:
    """Format bytes: 1,500,000 as 1.5 MB."""
    for unit, unit_bytes in (("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:,.1f} {unit}"
    return f"{num_bytes / 1000:,.1f} kB"
