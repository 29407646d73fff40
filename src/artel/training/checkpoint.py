"""Checkpoints: everything a run needs to go on, in safetensors and JSON, whole or absent, verified when read.

    checkpoints/step-000001500/model.safetensors       trained parameters and buffers by name, tied ones once
                               optimizer.safetensors   `parameter|state` by name
                               state.json              step, best figure, time spent, digest of the token store
                               checksums.json          an xxh3-128 for each of the three
    checkpoints/latest, best                           relative symlinks

Parameters that are not trained (under adapters, frozen) are those the run began with, and are not written again.
No random state is stored: order and dropout are functions of (seed, step), and start again from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from artel.errors import InputError, Problem
from artel.storage import checksum, new_folder, point, remove_leftovers
from artel.training.optimizer import Optimizer

_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


@dataclass(slots=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    tokens: int = 0
    """Input tokens trained on, without filler."""
    seconds: float = 0.0
    """Wall time in the loop, all starts of the run together."""
    train_seconds: float = 0.0
    """Of these, the time in training steps alone."""
    train_loss: float | None = None
    validation: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int | None = None
    best_validation: dict[str, float] = field(default_factory=dict)
    validations_since_best: int = 0
    stopped_early: bool = False
    store: str = ""
    """Digest of the token store that the run is trained on."""


def save_checkpoint(
    folder: Path, model: PreTrainedModel, optimizer: Optimizer, progress: Progress, *, keep: int, is_best: bool
) -> Path:
    """Write a checkpoint and move the pointers; older ones than the newest `keep` go, `best` stays."""
    path = folder / f"step-{progress.step:09d}"
    with new_folder(path, replace=True) as partial:
        save_file({name: tensor.detach().contiguous() for name, tensor in _tensors(model).items()}, partial / _FILES[0])
        save_file({name: tensor.contiguous() for name, tensor in optimizer.state().items()}, partial / _FILES[1])
        (partial / _FILES[2]).write_bytes(orjson.dumps(asdict(progress), option=orjson.OPT_INDENT_2))
        sums = {name: checksum(partial / name) for name in _FILES}
        (partial / "checksums.json").write_bytes(orjson.dumps(sums, option=orjson.OPT_INDENT_2))
    point(folder / "latest", path)
    if is_best:
        point(folder / "best", path)
    spared = {(folder / name).resolve() for name in ("latest", "best")}
    for old in list_checkpoints(folder)[:-keep]:
        if old.resolve() not in spared:
            shutil.rmtree(old)
    return path


def load_checkpoint(
    folder: Path, model: PreTrainedModel, optimizer: Optimizer, tell: Callable[[str], None]
) -> Progress | None:
    """The newest whole checkpoint, put into model and optimizer; None where there is none.

    A damaged one is named and the one before it taken. Raises InputError when checkpoints exist and none is good.
    """
    remove_leftovers(folder)
    problems = []
    for path in reversed(list_checkpoints(folder)):
        fault = _fault(path)
        if fault is None:
            load_weights(path, model)
            optimizer.load(load_file(path / _FILES[1]))
            return Progress(**orjson.loads((path / _FILES[2]).read_bytes()))
        tell(f"{path} {fault}: the checkpoint before it is taken")
        problems.append(Problem(str(path), fault))
    if problems:
        raise InputError([*problems, Problem(str(folder), "no checkpoint is whole", "begin anew with --restart")])
    return None


def load_weights(path: Path, model: PreTrainedModel) -> None:
    """Put a checkpoint's weights into a model of the same shape."""
    weights = load_file(path / _FILES[0])
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            tensor.copy_(weights[name])


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _fault(path: Path) -> str | None:
    try:
        sums = orjson.loads((path / "checksums.json").read_bytes())
        for name in _FILES:
            if checksum(path / name) != sums[name]:
                return f"is damaged ({name} does not have its checksum)"
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, SafetensorError) as error:
        return f"is damaged ({error})"
    return None


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Trained parameters and buffers by name; a tied parameter has one name only."""
    saved = model.state_dict().keys()  # without buffers that are computed anew
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {**trained, **buffers}
