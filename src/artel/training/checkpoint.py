"""Checkpoints: everything a run needs to go on, in safetensors and JSON, whole or absent, verified when read.

    checkpoints/step-000001500/model.safetensors       trained parameters and buffers by name, tied ones once
                               optimizer.safetensors   `parameter|state` by name
                               shard-*.safetensors     in place of both, where processes share them: each one's pieces
                               state.json              step, best figure, time spent, digest of the token store
                               checksums.json          an xxh3-128 for each of these
    checkpoints/latest, best                           relative symlinks

Tensors are named alike whatever the layout, so that any layout goes on from the checkpoint of any other. Pieces are
written and read by torch.distributed.checkpoint, in safetensors: nothing is unpickled.

Parameters that are not trained (under adapters, frozen) are those the run began with, and are not written again.
No random state is stored: order and dropout are functions of (seed, step), and start again from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from artel.errors import InputError, Problem
from artel.storage import checksum, new_folder, point, remove_leftovers
from artel.training.optimizer import Optimizer, Stepper
from artel.training.piece_files import piece_shapes, read_pieces, told_by_first, write_pieces
from artel.training.pieces import trained_tensors

_MODEL, _OPTIMIZER, _STATE, _SUMS = "model.safetensors", "optimizer.safetensors", "state.json", "checksums.json"


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
    folder: Path, optimizer: Stepper, progress: Progress, *, pieces: bool, keep: int, is_best: bool, first: bool
) -> Path:
    """Write a checkpoint and move the pointers; older ones than the newest `keep` go, `best` stays.

    All processes call it, each with its `pieces` where they share the model; the `first` writes what is not shared out.
    """
    path = folder / f"step-{progress.step:09d}"
    if pieces:
        with new_folder(path, replace=True) if first else nullcontext() as partial:
            place = Path(told_by_first(str(partial)))
            write_pieces(place, optimizer.weights() | optimizer.state())
            if first:
                _close(place, progress)
    elif first or optimizer.gathers:
        weights, state = optimizer.weights(), optimizer.state()
        if first:
            with new_folder(path, replace=True) as partial:
                save_file(_contiguous(weights), partial / _MODEL)
                save_file(_contiguous(state), partial / _OPTIMIZER)
                _close(partial, progress)
    if first:
        _point(folder, path, keep, is_best)
    return path


def _close(partial: Path, progress: Progress) -> None:
    (partial / _STATE).write_bytes(orjson.dumps(asdict(progress), option=orjson.OPT_INDENT_2))
    sums = {file.name: checksum(file) for file in sorted(partial.iterdir())}
    (partial / _SUMS).write_bytes(orjson.dumps(sums, option=orjson.OPT_INDENT_2))


def _point(folder: Path, path: Path, keep: int, is_best: bool) -> None:
    point(folder / "latest", path)
    if is_best:
        point(folder / "best", path)
    spared = {(folder / name).resolve() for name in ("latest", "best")}
    for old in list_checkpoints(folder)[:-keep]:
        if old.resolve() not in spared:
            shutil.rmtree(old)


def load_checkpoint(folder: Path, optimizer: Stepper, tell: Callable[[str], None]) -> Progress | None:
    """The newest whole checkpoint, put into the optimizer and its model; None where there is none.

    A damaged one is named and the one before it taken. Raises InputError when checkpoints exist and none is good.
    """
    remove_leftovers(folder)
    problems = []
    for path in reversed(list_checkpoints(folder)):
        fault = _fault(path)
        if fault is None:
            _load(path, optimizer)
            return Progress(**orjson.loads((path / _STATE).read_bytes()))
        tell(f"{path} {fault}: the checkpoint before it is taken")
        problems.append(Problem(str(path), fault))
    if problems:
        raise InputError([*problems, Problem(str(folder), "no checkpoint is whole", "begin anew with --restart")])
    return None


def _load(path: Path, optimizer: Stepper) -> None:
    if optimizer.gathers or ((path / _MODEL).is_file() and not _has_pieces(optimizer.weights())):
        weights, state = _whole(path)
        optimizer.load_weights(weights)
    else:
        assert isinstance(optimizer, Optimizer)
        read_pieces(path, optimizer.weights())
        state = optimizer.places(piece_shapes(path))
        read_pieces(path, state)
    optimizer.load(state)


def load_weights(path: Path, model: PreTrainedModel) -> None:
    """Put a checkpoint's weights into a model of the same shape, which this process has whole."""
    weights = full_weights(path)
    with torch.no_grad():
        for name, tensor in trained_tensors(model).items():
            tensor.copy_(weights[name])


def full_weights(path: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's weights, whole, in the memory of one process, whatever layout wrote it."""
    return load_file(path / _MODEL) if (path / _MODEL).is_file() else _whole(path)[0]


def _whole(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All weights and all of the optimizer's state, whole."""
    if (path / _MODEL).is_file():
        return load_file(path / _MODEL), load_file(path / _OPTIMIZER)
    both = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in piece_shapes(path).items()}
    read_pieces(path, both)
    weights = {name: tensor for name, tensor in both.items() if "|" not in name}
    return weights, {name: tensor for name, tensor in both.items() if "|" in name}


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def _fault(path: Path) -> str | None:
    try:
        sums = orjson.loads((path / _SUMS).read_bytes())
        for name, expected in sums.items():
            if checksum(path / name) != expected:
                return f"is damaged ({name} does not have its checksum)"
        if _STATE not in sums or not any(name.endswith(".safetensors") for name in sums):
            return f"is damaged ({_SUMS} does not name all files)"
    except (OSError, orjson.JSONDecodeError, AttributeError, TypeError, SafetensorError) as error:
        return f"is damaged ({error})"
    return None


def _has_pieces(tensors: dict[str, torch.Tensor]) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
