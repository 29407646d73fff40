"""Checkpoints: everything a run needs to resume, in safetensors and JSON. Written as a whole, verified when read.

    checkpoints/step-000001500/model.safetensors       trained parameters and buffers by name, tied ones once
                               optimizer.safetensors   `parameter|state` by name; `parameter|ema` with `train.ema`
                               shard-*.safetensors     replace both if they are sharded: each process's shards
                               callbacks.safetensors   `callbacks/class/name`, for callbacks that have a state
                               state.json              step, best metric, time spent, digest of the token store
                               run.yaml                the run file with every key
                               versions.json           artel, Python, torch and transformers
                               checksums.json          xxh3-128 of each of these files
    checkpoints/latest, best                           relative symlinks

Tensor names do not depend on the parallel layout, so any layout can resume from a checkpoint of any other.
torch.distributed.checkpoint writes and reads the shards as safetensors: nothing is unpickled.

Parameters that are not trained (frozen, or under adapters) are not saved: a resumed run loads them from the base model
again. No random state is stored, since order and dropout are functions of (seed, step).
"""

from __future__ import annotations

import platform
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson
import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

import artel
from artel.errors import ArtelError, InputError, Problem, WorkError
from artel.messages import logger
from artel.models.flops import token_rate
from artel.storage import check_regular, check_regular_in, checksum, new_folder, remove_leftovers
from artel.training.checkpoint.items import FIRST_RANK_FILES, CheckpointItem, Tensors, exported_tensors, find_item
from artel.training.checkpoint.sharded_files import broadcast_from_first, read_shards, stored_shapes, write_shards
from artel.training.optim.local_shards import trained_tensors
from artel.training.run_folder import written_checkpoints

_STATE, SUMS, RUN_FILE, _VERSIONS = "state.json", "checksums.json", "run.yaml", "versions.json"


@dataclass(slots=True)
class Progress:
    """Progress of a run, as saved in state.json."""

    step: int = 0
    tokens: int = 0
    """Input tokens trained on, without padding."""
    seconds: float = 0.0
    """Wall time since the model began to load, over all starts of the run."""
    train_seconds: float = 0.0
    """Seconds of training steps, included in `seconds`."""
    first_steps_tokens: int = 0
    first_steps_seconds: float = 0.0
    """Tokens and seconds of the first step of every start, which compiles and allocates memory."""
    train_loss: float | None = None
    validation: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_figure: str = ""
    """Name of the metric `best`, as in `checkpoint.best`."""
    best_step: int | None = None
    best_validation: dict[str, float] = field(default_factory=dict)
    calibration: dict[str, Any] = field(default_factory=dict)
    """Values chosen by the newest validation for using the model (`Objective.calibration`)."""
    best_calibration: dict[str, Any] = field(default_factory=dict)
    validations_since_best: int = 0
    stopped_early: bool = False
    run: str = ""
    """Id of the run, as in its folder."""
    store: str = ""
    """Digest of the run's token store."""
    losses: list[float] = field(default_factory=list)
    """Losses of the newest good steps, oldest first, for detecting spikes. Empty if `train.spike` is not set."""
    bad_in_a_row: int = 0
    """Bad steps since the newest good one."""
    warmup: int | None = None
    """Warmup steps at the start of the run. Changing the length keeps them. With `train.budget`, where warmup is a
    fraction of the time, None until it is over."""
    share: float = 0.0
    """With `train.budget`: fraction of the time for steps used at the newest step. Sets its learning rate. 0 until the
    budget is known to be long enough."""
    share_of: float | None = None
    """The budget in seconds that `share` refers to."""
    end: dict[str, list[float]] = field(default_factory=dict)
    """With `train.budget`: duration of each phase of the run's end (`Budget.end`)."""
    spent_budget: float | None = None
    """The budget in seconds, once the run has used it up."""

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the run so far. Terminal, page, JSON, model card and plan all show this number.

        Input tokens without padding per second of training steps. Ignores the first step of every start, unless there
        are no other steps. None before the first step.
        """
        tokens, seconds = self.tokens - self.first_steps_tokens, self.train_seconds - self.first_steps_seconds
        return token_rate(tokens, seconds) or token_rate(self.tokens, self.train_seconds)


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """Content of a checkpoint."""

    items: dict[str, Tensors]
    """File name without suffix -> its tensors by name. Tensor names are unique over all files."""
    progress: Progress
    run_file: str


def write_full(path: Path, content: CheckpointContent) -> None:
    """Write a checkpoint from one process that holds all tensors. Raise WorkError or InputError if the disk refuses."""
    with new_folder(path, replace=True) as partial:
        for file, tensors in content.items.items():
            save_file(_contiguous(tensors), partial / f"{file}.safetensors")
        _write_metadata(partial, content)


def write_sharded(path: Path, content: CheckpointContent, *, is_first: bool, group: dist.ProcessGroup | None) -> None:
    """Write a checkpoint whose items are sharded. Collective. Rank 0 writes `FIRST_RANK_FILES`.

    If the disk refuses, raise WorkError or InputError on every process; on the first one only if it fails at the end.
    """
    with ExitStack() as stack:
        refusal: ArtelError | None = None
        partial = None
        if is_first:
            try:
                partial = stack.enter_context(new_folder(path, replace=True))
            except ArtelError as error:
                refusal = error
        shared_path = broadcast_from_first(str(partial) if partial is not None else None, group)
        if refusal is not None:
            raise refusal
        if shared_path is None:
            raise WorkError.at(str(path), "the first process could not make the folder")
        files = content.items
        shards = {
            name: tensor for file in files if file not in FIRST_RANK_FILES for name, tensor in files[file].items()
        }
        write_shards(Path(shared_path), shards, group)
        if is_first:
            for file in files.keys() & FIRST_RANK_FILES:
                save_file(_contiguous(files[file]), Path(shared_path) / f"{file}.safetensors")
            _write_metadata(Path(shared_path), content)


def _write_metadata(partial: Path, content: CheckpointContent) -> None:
    """Write all files but the tensors. Checksums come last."""
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


def load_checkpoint(folder: Path, items: list[CheckpointItem]) -> Progress | None:
    """Load the newest undamaged checkpoint into the items of a run. Return its progress, or None without checkpoints.

    Log each damaged checkpoint and try the one before it. Raise InputError if all are damaged.
    """
    remove_leftovers(folder)
    problems = []
    for path in reversed(list_checkpoints(folder)):
        fault = find_damage(path)
        if fault is None:
            try:
                progress = read_progress(path)
                if path.name != f"step-{progress.step:09d}":
                    raise ValueError(f"{_STATE} is of step {progress.step}")
                tensors = _read_tensors(path, items)
            except (torch.OutOfMemoryError, MemoryError):
                raise
            except Exception as error:  # checksums are right but the content is not; readers raise all types
                fault = f"is damaged ({' '.join(str(error).split())[:300] or type(error).__name__})"
            else:
                for item, item_tensors in zip(items, tensors, strict=True):
                    item.load(item_tensors)
                return progress
        logger.info("%s %s: using the checkpoint before it", path, fault)
        problems.append(Problem(str(path), fault))
    if problems:
        raise InputError([*problems, Problem(str(folder), "no checkpoint is complete", "start over with --restart")])
    return None


def read_progress(path: Path) -> Progress:
    """Return the progress saved in a checkpoint. Raise InputError, ValueError or TypeError if it cannot be read."""
    check_regular(path / _STATE)
    progress, default = Progress(**orjson.loads((path / _STATE).read_bytes())), Progress()
    for progress_field in fields(Progress):
        name = progress_field.name
        value, default_value = getattr(progress, name), getattr(default, name)
        if not isinstance(value, int | float | None if default_value is None else type(default_value)):
            raise TypeError(f"{_STATE}: {name} is {str(value)[:100]}")
    return progress


def _read_tensors(path: Path, items: list[CheckpointItem]) -> list[Tensors]:
    """Return the tensors of each item. Reads weights into the model itself, unless they were gathered for saving."""
    shapes: dict[type[CheckpointItem], dict[str, tuple[torch.Size, torch.dtype]]] = {type(item): {} for item in items}
    for name, stored in stored_shapes(path).items():
        shapes[find_item(name)][name] = stored
    tensors = [item.allocate(shapes[type(item)]) for item in items]
    read_shards(path, {name: tensor for item_tensors in tensors for name, tensor in item_tensors.items()})
    return tensors


def load_weights(path: Path, model: PreTrainedModel) -> None:
    """Load a checkpoint's weights, as `full_weights`, into a model that this process holds in full."""
    stored = exported_tensors(stored_shapes(path))
    read_shards(path, {stored[name]: tensor for name, tensor in trained_tensors(model).items()})


def full_weights(path: Path) -> Tensors:
    """Return a checkpoint's full weights in the memory of one process, whatever layout wrote it.

    With `train.ema` these are the averages, with which the run is evaluated.
    """
    shapes = stored_shapes(path)
    weights = exported_tensors(shapes)
    tensors = {name: torch.empty(shapes[name][0], dtype=shapes[name][1]) for name in weights.values()}
    read_shards(path, tensors)
    return {weight: tensors[name] for weight, name in weights.items()}


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return folder / f"step-{step:09d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Return all checkpoints, oldest first."""
    return written_checkpoints(folder)


def find_damage(path: Path) -> str | None:
    """Return a description of the damage, to follow the path in a message, or None. Raise InputError if unreadable."""
    try:
        check_regular_in(path)
    except InputError as error:
        return f"is damaged ({error.problems[0].where} {error.problems[0].what})"
    try:
        sums = orjson.loads((path / SUMS).read_bytes())
        for name, expected in sums.items():
            if Path(name).name != name:
                return f"is damaged ({SUMS} names {name}, which it does not contain)"
            if checksum(path / name) != expected:
                return f"is damaged ({name} does not have its checksum)"
        if _STATE not in sums or not any(name.endswith(".safetensors") for name in sums):
            return f"is damaged ({SUMS} does not list all files)"
    except PermissionError as error:  # not damaged, so there is no reason to start over
        fix = f"make it readable: chmod -R u+rX {path}"
        raise InputError.at(str(path), f"cannot be read: {error.strerror}", fix) from None
    except (OSError, ValueError, AttributeError, TypeError, SafetensorError) as error:
        return f"is damaged ({error})"
    return None


def _contiguous(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
