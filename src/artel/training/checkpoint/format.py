"""Checkpoints: everything a run needs to go on, in safetensors and JSON, whole or absent, verified when read.

    checkpoints/step-000001500/model.safetensors       trained parameters and buffers by name, tied ones once
                               optimizer.safetensors   `parameter|state` by name
                               shard-*.safetensors     in place of both, where processes share them: each one's pieces
                               callbacks.safetensors   `callbacks/class/name`, of callbacks that have a state
                               state.json              step, best figure, time spent, digest of the token store
                               run.yaml                the run file, every key of it
                               versions.json           of artel, Python, torch and transformers
                               checksums.json          an xxh3-128 for each of these
    checkpoints/latest, best                           relative symlinks

Tensors are named alike whatever the layout, so that any layout goes on from the checkpoint of any other. Pieces are
written and read by torch.distributed.checkpoint, in safetensors: nothing is unpickled.

Parameters that are not trained (under adapters, frozen) are those the run began with, and are not written again.
No random state is stored: order and dropout are functions of (seed, step), and start again from there.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

import artel
from artel.errors import ArtelError, InputError, Problem, WorkError
from artel.models.flops import tokens_a_second
from artel.parallel import OptimizerProtocol
from artel.storage import check_regular_in, checksum, new_folder, remove_leftovers
from artel.training.checkpoint.items import CALLBACKS, MODEL, OPTIMIZER, CheckpointItems, Tensors, is_of_callback
from artel.training.checkpoint.sharded_files import piece_shapes, read_pieces, told_by_first, write_pieces
from artel.training.optim.local_shards import trained_tensors
from artel.training.optim.optimizer import Optimizer
from artel.training.run_folder import written_checkpoints

_MODEL, _OPTIMIZER, _CALLBACKS = f"{MODEL}.safetensors", f"{OPTIMIZER}.safetensors", f"{CALLBACKS}.safetensors"
_STATE, SUMS, RUN_FILE, _VERSIONS = "state.json", "checksums.json", "run.yaml", "versions.json"


@dataclass(slots=True)
class Progress:
    """Where a run stands."""

    step: int = 0
    tokens: int = 0
    """Input tokens trained on, without filler."""
    seconds: float = 0.0
    """Wall time from the loading of the model on, all starts of the run together."""
    train_seconds: float = 0.0
    """Of these, the time in training steps alone."""
    first_steps_tokens: int = 0
    first_steps_seconds: float = 0.0
    """Part of `tokens` and `train_seconds` in the first step of every start, which compiles and allocates memory."""
    train_loss: float | None = None
    validation: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_figure: str = ""
    """The `checkpoint.best` that `best` is of."""
    best_step: int | None = None
    best_validation: dict[str, float] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    """What the newest validation chose for the use of the model (`Objective.calibration`)."""
    best_calibration: dict[str, Any] = field(default_factory=dict)
    validations_since_best: int = 0
    stopped_early: bool = False
    run: str = ""
    """Id of the run, as in the mark of its folder."""
    store: str = ""
    """Digest of the token store that the run is trained on."""
    losses: list[float] = field(default_factory=list)
    """Of the newest good steps, oldest first: what a spike is measured by; empty where none is looked for."""
    bad_in_a_row: int = 0
    """Bad steps since the newest good one."""
    warmup: int | None = None
    """Steps of warmup as the run began; a change of its length does not change them. Under `train.budget`, where warmup
    is a fraction of the time, None until it is over."""
    share: float = 0.0
    """Under `train.budget`: of the time for steps so much, from 0 to 1, had passed at the newest step, whose learning
    rate went by it. 0 as long as it is not known whether the budget suffices."""
    share_of: float | None = None
    """The budget in seconds by which `share` was reckoned."""
    end: dict[str, list[float]] = field(default_factory=dict)
    """Under `train.budget`: what the parts of the run's end take, as `Budget.end` has them."""
    spent_budget: float | None = None
    """The budget in seconds to whose end the run has come."""

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the run so far: the one definition for terminal, page, JSON, model card and plan.

        Input tokens without padding per second of training steps, without the first step of every start unless there
        are no others. None before the first step.
        """
        tokens, seconds = self.tokens - self.first_steps_tokens, self.train_seconds - self.first_steps_seconds
        return tokens_a_second(tokens, seconds) or tokens_a_second(self.tokens, self.train_seconds)


@dataclass(frozen=True, slots=True)
class Content:
    """What a checkpoint is made of."""

    items: dict[str, Tensors]
    """Item -> its tensors by name; the names of all items differ (the optimizer's are `parameter|state`)."""
    progress: Progress
    run_file: str


def write_whole(path: Path, content: Content) -> None:
    """Write a checkpoint from one process, which has all of it. Raises WorkError or InputError of the disk."""
    with new_folder(path, replace=True) as partial:
        for item, tensors in content.items.items():
            save_file(_contiguous(tensors), partial / f"{item}.safetensors")
        _close(partial, content)


def write_shared(path: Path, content: Content, *, first: bool, group: dist.ProcessGroup | None) -> None:
    """Write a checkpoint of whose model and optimizer each process has pieces; all of a group call it.

    Of the callbacks' states those of the first process are written. Raises WorkError or InputError of the disk on
    every process, except where the first one alone fails at its end.
    """
    with ExitStack() as stack:
        refused: ArtelError | None = None
        partial = None
        if first:
            try:
                partial = stack.enter_context(new_folder(path, replace=True))
            except ArtelError as error:
                refused = error
        place = told_by_first(str(partial) if partial is not None else None, group)
        if refused is not None:
            raise refused
        if place is None:
            raise WorkError.at(str(path), "the first process could not make the folder")
        write_pieces(Path(place), content.items[MODEL] | content.items[OPTIMIZER], group)
        if first:
            if CALLBACKS in content.items:
                save_file(_contiguous(content.items[CALLBACKS]), Path(place) / _CALLBACKS)
            _close(Path(place), content)


def _close(partial: Path, content: Content) -> None:
    (partial / _STATE).write_bytes(orjson.dumps(asdict(content.progress), option=orjson.OPT_INDENT_2))
    (partial / RUN_FILE).write_text(content.run_file, encoding="utf-8")
    versions = {
        "artel": artel.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (partial / _VERSIONS).write_bytes(orjson.dumps(versions, option=orjson.OPT_INDENT_2))
    sums = {file.name: checksum(file) for file in sorted(partial.iterdir())}
    (partial / SUMS).write_bytes(orjson.dumps(sums, option=orjson.OPT_INDENT_2))


def load_checkpoint(folder: Path, items: CheckpointItems, tell: Callable[[str], None]) -> Progress | None:
    """The newest whole checkpoint, put into the model, the optimizer and the callbacks; None where there is none.

    A damaged one is named and the one before it taken. Raises InputError when checkpoints exist and none is good.
    """
    remove_leftovers(folder)
    problems = []
    for path in reversed(list_checkpoints(folder)):
        fault = fault_of(path)
        if fault is None:
            try:
                progress = read_progress(path)
                if path.name != f"step-{progress.step:09d}":
                    raise ValueError(f"{_STATE} is of step {progress.step}")
                of_callbacks = load_file(path / _CALLBACKS) if (path / _CALLBACKS).is_file() else {}
                _load(path, items.optimizer)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:  # with its checksums, and yet not what is written: each reader's own kinds
                if (
                    items.optimizer.saves_collectively
                ):  # all processes load it together: it may be that one of them is gone
                    raise
                fault = f"is damaged ({' '.join(str(error).split())[:300] or type(error).__name__})"
            else:
                items.load_callbacks(of_callbacks)
                return progress
        tell(f"{path} {fault}: the checkpoint before it is taken")
        problems.append(Problem(str(path), fault))
    if problems:
        raise InputError([*problems, Problem(str(folder), "no checkpoint is whole", "begin anew with --restart")])
    return None


def read_progress(path: Path) -> Progress:
    """Where the run stood when a checkpoint was written. Raises ValueError or TypeError where that cannot be read."""
    progress, usual = Progress(**orjson.loads((path / _STATE).read_bytes())), Progress()
    for each in fields(Progress):
        value, like = getattr(progress, each.name), getattr(usual, each.name)
        if not isinstance(value, int | float | None if like is None else type(like)):
            raise TypeError(f"{_STATE}: {each.name} is {str(value)[:100]}")
    return progress


def _load(path: Path, optimizer: OptimizerProtocol) -> None:
    if optimizer.saves_collectively or ((path / _MODEL).is_file() and not _has_pieces(optimizer.weights())):
        weights, state = _whole(path)
        optimizer.load_weights(weights)
    else:
        assert isinstance(optimizer, Optimizer)
        read_pieces(path, optimizer.weights())
        state = optimizer.allocate_state(piece_shapes(path))
        read_pieces(path, state)
    optimizer.load(state)


def load_weights(path: Path, model: PreTrainedModel) -> None:
    """Put a checkpoint's weights into a model of the same shape, which this process has whole."""
    weights = full_weights(path)
    with torch.no_grad():
        for name, tensor in trained_tensors(model).items():
            tensor.copy_(weights[name])


def full_weights(path: Path) -> Tensors:
    """A checkpoint's weights, whole, in the memory of one process, whatever layout wrote it."""
    return load_file(path / _MODEL) if (path / _MODEL).is_file() else _whole_pieces(path, _is_weight)


def _whole(path: Path) -> tuple[Tensors, Tensors]:
    """All weights and all of the optimizer's state, whole."""
    if (path / _MODEL).is_file():
        return load_file(path / _MODEL), load_file(path / _OPTIMIZER)
    both = _whole_pieces(path, lambda name: not is_of_callback(name))
    weights = {name: tensor for name, tensor in both.items() if _is_weight(name)}
    return weights, {name: tensor for name, tensor in both.items() if not _is_weight(name)}


def _whole_pieces(path: Path, chosen: Callable[[str], bool]) -> Tensors:
    """The chosen tensors of a sharded checkpoint, each whole."""
    shapes = {name: stored for name, stored in piece_shapes(path).items() if chosen(name)}
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    read_pieces(path, tensors)
    return tensors


def _is_weight(name: str) -> bool:
    """Whether a checkpoint's tensor is one of the model's; the optimizer's have a kind after the parameter's name."""
    return "|" not in name and not is_of_callback(name)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step-{step:09d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """All checkpoints, oldest first."""
    return written_checkpoints(folder)


def fault_of(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, as words after its name. Raises InputError where they cannot be read."""
    try:
        check_regular_in(path)
    except InputError as error:
        return f"is damaged ({error.problems[0].where} {error.problems[0].what})"
    try:
        sums = orjson.loads((path / SUMS).read_bytes())
        for name, expected in sums.items():
            if Path(name).name != name:
                return f"is damaged ({SUMS} names {name}, which is no file of it)"
            if checksum(path / name) != expected:
                return f"is damaged ({name} does not have its checksum)"
        if _STATE not in sums or not any(name.endswith(".safetensors") for name in sums):
            return f"is damaged ({SUMS} does not name all files)"
    except PermissionError as error:  # no damage, and nothing to be begun anew for
        fix = f"give yourself the right to read it: chmod -R u+rX {path}"
        raise InputError.at(str(path), f"cannot be read: {error.strerror}", fix) from None
    except (OSError, ValueError, AttributeError, TypeError, SafetensorError) as error:
        return f"is damaged ({error})"
    return None


def _has_pieces(tensors: Tensors) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def _contiguous(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
