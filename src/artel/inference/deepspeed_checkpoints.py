"""DeepSpeed's checkpoints: read as a model or as the start of a run, and written from a run's checkpoint.

Reading: transformers' Trainer writes this format under ZeRO (`checkpoint-500`). The shards of each process are in
`global_step…`. Configuration and tokenizer are next to the file `latest`.

Writing: an engine of any stage and number of processes can continue from the universal format.

    DIR/latest_universal                          the name of the folder next to it
    DIR/global_step500/zero/NAME/fp32.pt          a parameter, float32
                                 exp_avg.pt       Adam's averages of the gradient, and of the squared gradient
                                 exp_avg_sq.pt
                                 step.pt          number of optimizer steps
                            optimizer_state.pt    state shared by all parameters
                       mp_rank_00_model_states.pt counts; stage 3 reads them under the second name
                       zero_pp_rank_0_mp_rank_00_model_states.pt

DeepSpeed's ds_to_universal.py makes the same files (Lian et al. 2024, "Universal Checkpointing"), which DeepSpeed reads
with `"checkpoint": {"load_universal": true}` in its configuration. DeepSpeed's configuration sets betas, epsilon and
weight decay. The learning rate is the run's next one until DeepSpeed's schedule takes its first step. With `train.ema`,
fp32.pt has the weights, and the model next to `latest_universal` has their averages, which DeepSpeed would not update.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from artel.config import RunConfig, dump_run, load_run
from artel.errors import InputError, Problem
from artel.inference.open import open_fresh, open_objective
from artel.messages import logger
from artel.models.loading.model_folder import read_config
from artel.models.loading.pretrained import read_generation_config
from artel.models.loading.structure import build_without_weights
from artel.objectives import build_objective
from artel.parallel.deepspeed.checkpoint import AVERAGES, ZeroCheckpoint, model_files, read_zero_checkpoint
from artel.preparing import PreparedText
from artel.registry import OPTIMIZERS
from artel.storage import disk_errors
from artel.tokens import Tokenizer, load_tokenizer
from artel.training import RunFolder
from artel.training.checkpoint.format import CheckpointContent, Progress, checkpoint_path, read_progress, write_full
from artel.training.checkpoint.items import OptimizerState, Weights
from artel.training.checkpoint.sharded_files import read_shards, stored_shapes
from artel.training.optim.local_shards import trained_tensors
from artel.training.schedule import rate, rate_by_time, run_length

# Reading


@dataclass(frozen=True, slots=True)
class AssembledModel:
    """A model on the meta device, and its float32 weights by name. Tied weights appear under at least one name."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    weights: dict[str, torch.Tensor]


def assemble_model(folder: Path) -> AssembledModel:
    """Load the model of DeepSpeed's checkpoint into memory. `folder` has the file `latest`, or is a `global_step…`.

    Raise InputError if the configuration, the tokenizer or files are missing, or the weights are of another model.
    """
    model_folder = folder if (folder / "latest").is_file() else folder.parent
    if not (model_folder / "config.json").is_file():
        fix = f"copy config.json and the tokenizer's files of the model that was trained to {model_folder}"
        raise InputError.at(str(folder), "is a DeepSpeed checkpoint without the files of its model", fix)
    tokenizer = load_tokenizer(str(model_folder), where=str(folder))
    objective = open_objective(str(model_folder), None, tokenizer)
    config, _ = read_config(str(model_folder))
    model = build_without_weights(config, objective.auto_class, objective.heads).float()
    read_generation_config(model, str(model_folder))
    return AssembledModel(model, tokenizer, _match_model(model, read_zero_checkpoint(folder), folder))


def conversion_problems(run: RunConfig) -> list[Problem]:
    """Return the reasons why checkpoints of `run` cannot be converted from or to DeepSpeed's."""
    problems = []
    if not OPTIMIZERS[run.train.optimizer].is_adam:
        reason = (
            f"{run.train.optimizer}: only Adam's state can be converted between DeepSpeed's checkpoints and artel's"
        )
        problems.append(Problem("train.optimizer", reason, "set adamw, or use the model alone"))
    if run.model.lora is not None:
        reason = "only full models can be converted between DeepSpeed's checkpoints and artel's"
        problems.append(Problem("model.lora", reason, "remove it, or use the model alone"))
    return problems


def check_deepspeed_checkpoint(run: RunConfig, folder: Path) -> None:
    """Raise InputError if `folder` has no checkpoint, or `run` cannot continue from it. Reads no tensors."""
    problems = conversion_problems(run)
    try:
        model_files(folder)
    except InputError as error:
        problems += error.problems
    if problems:
        raise InputError(problems)


def write_first_checkpoint(run: RunConfig, prepared: PreparedText, folder: Path) -> None:
    """Write the first checkpoint of `run` with the weights, averages and step of DeepSpeed's checkpoint in `folder`.

    Raise InputError for missing files, weights of another model, a checkpoint without Adam's averages, and a run that
    ends before the checkpoint's step.
    """
    saved = ZeroCheckpoint.read(folder)
    state, step = saved.adam()
    opened = open_fresh(run, prepared)
    store = prepared.open()
    steps = run_length(run, opened.objective.dataset(store.train), store.train).steps
    if steps is not None and step >= steps:
        message = f"was saved at step {step:,}, but this run ends after {steps:,}"
        fix = "set train.steps, tokens or epochs for the whole run, including the steps of the checkpoint"
        raise InputError.at(str(folder), message, fix)
    weights, state = _match_run(opened.model, saved.weights(), state, folder)
    run_folder = RunFolder(Path(run.run))
    progress = Progress(step, run=run_folder.identity(), store=store.digest)
    run_folder.checkpoints.mkdir(parents=True, exist_ok=True)
    content = CheckpointContent({Weights.file: weights, OptimizerState.file: state}, progress, dump_run(run))
    write_full(checkpoint_path(run_folder.checkpoints, step), content)
    logger.info(
        "continuing from step %s of %s: weights, averages and step count; samples come in this run's own order",
        f"{step:,}",
        folder,
    )


def _match_run(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], state: dict[str, torch.Tensor], folder: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return weights and state under the names of artel's checkpoint of `model`. Tied weights appear once."""
    prefix = _find_prefix(model, weights)
    state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    trained_names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if different := sorted(trained_names ^ {name.rpartition("|")[0] for name in state}):
        message = f"trained other parameters than this run does ({different[0]} …, {len(different)} in all)"
        raise InputError.at(str(folder), message, "set model.freeze as in that training")
    tensors = model.state_dict(keep_vars=True)
    by_tensor = {id(tensors[name]): value for name, value in _match_model(model, weights, folder).items()}
    return {name: by_tensor[id(tensor)].to(tensor.dtype) for name, tensor in trained_tensors(model).items()}, state


def _find_prefix(model: PreTrainedModel, saved: dict[str, torch.Tensor]) -> str:
    """Return the prefix of all names in `saved`, which a wrapper of the model has added."""
    first = next(iter(model.state_dict()))
    return next((name.removesuffix(first) for name in saved if name.endswith(first)), "")


def _match_model(model: PreTrainedModel, saved: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in `saved` under the model's names. Raise InputError if they do not fit the model."""
    tensors = model.state_dict(keep_vars=True)  # tied weights are one tensor
    prefix = _find_prefix(model, saved)
    weights = {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
    present = {id(tensors[name]) for name in weights.keys() & tensors.keys()}
    missing = [name for name, tensor in tensors.items() if name not in weights and id(tensor) not in present]
    # Buffers of older versions of transformers (GPT-2's masks), which models ignore on loading.
    ignored = model._keys_to_ignore_on_load_unexpected or []
    unexpected = [
        name
        for name in saved
        if name.removeprefix(prefix) not in tensors and not any(re.search(pattern, name) for pattern in ignored)
    ]
    mismatched = [name for name in weights.keys() & tensors.keys() if weights[name].shape != tensors[name].shape]
    model_name = f"this {type(model).__name__}"
    mismatches = {
        "has no weights for {} of {}": missing,
        "has {} that are not of {}": unexpected,
        "has {} in other shapes than {}": mismatched,
    }
    fix = "use the config.json of the trained model, and its version of transformers"
    problems = [
        Problem(str(folder), message.format(f"{len(names)} tensors ({sorted(names)[0]} …)", model_name), fix)
        for message, names in mismatches.items()
        if names
    ]
    if problems:
        raise InputError(problems)
    return {name: weights[name] for name in tensors if name in weights}


# Writing


_CHUNK_BYTES = 2**30
_DEEPSPEED_VERSION = "0.19.8"  # the version with this format. DeepSpeed refuses files without a version


def newest_checkpoint(name: str) -> tuple[RunConfig, Path]:
    """Return the run in `name` and its newest checkpoint. Raise InputError if DeepSpeed's format cannot hold it."""
    folder = RunFolder(Path(name))
    if not folder.config.is_file():
        fix = "use a run's folder, or remove --deepspeed"
        raise InputError.at(name, "is not a run and has no optimizer state", fix)
    run = load_run(name)
    folder.check_config(run)
    folder.check_checkpoint_ownership()
    problems = conversion_problems(run)
    newest = folder.checkpoints / "latest"
    if not newest.exists():
        problems.append(Problem(name, "has no checkpoint", "train it with checkpoint.every, e.g. 500"))
    if problems:
        raise InputError(problems)
    return run, newest.resolve()


def write_universal(run: RunConfig, prepared: PreparedText, checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint of `run` into `folder`, a few parameters at a time. Raise InputError if the disk fails."""
    progress = read_progress(checkpoint)
    step = progress.step
    counts = {
        "global_steps": step,
        "global_samples": step * run.train.batch,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": _DEEPSPEED_VERSION,
        "buffer_names": [],
        "module": {},
        "lr_scheduler": _scheduler_state(step),
    }
    groups = [{"lr": _next_learning_rate(run, prepared, progress)}]
    step_count = torch.tensor(float(step))
    with disk_errors(folder):
        step_folder = folder / f"global_step{step}"
        zero = step_folder / "zero"
        parameter_count = 0
        for name, tensors in _read_parameters(checkpoint):
            parameter_count += 1
            parameter_folder = zero / name
            parameter_folder.mkdir(parents=True)
            for key, tensor in tensors.items():
                _save_file({"param": tensor}, parameter_folder / f"{key}.pt")
            _save_file(step_count, parameter_folder / "step.pt")
        # ZeRO stages 1 and 2 pair these groups with theirs, so there must be enough. Stage 3 reads the first.
        shared = {
            "param_groups": groups * parameter_count,
            "ds_version": _DEEPSPEED_VERSION,
            "optimizer_state_dict": {"state": {0: {"step": step_count}}, "param_groups": groups},
        }
        _save_file(shared, zero / "optimizer_state.pt")
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
            _save_file(counts, step_folder / name)
        (folder / "latest_universal").write_text(step_folder.name, encoding="utf-8")


def _read_parameters(checkpoint: Path) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield each trained parameter in float32 and its Adam averages, by DeepSpeed's names."""
    shapes = stored_shapes(checkpoint)
    trained_names = [name.removesuffix(f"|{AVERAGES[0]}") for name in shapes if name.endswith(f"|{AVERAGES[0]}")]
    while trained_names:
        stored_tensors: dict[str, torch.Tensor] = {}
        names = []
        while trained_names and sum(tensor.nbytes for tensor in stored_tensors.values()) < _CHUNK_BYTES:
            names.append(trained_names.pop(0))
            for stored_name in (names[-1], *(f"{names[-1]}|{key}" for key in AVERAGES)):
                shape, dtype = shapes[stored_name]
                stored_tensors[stored_name] = torch.empty(shape, dtype=dtype)
        read_shards(checkpoint, stored_tensors)
        for name in names:
            averages = {key: stored_tensors.pop(f"{name}|{key}").float() for key in AVERAGES}
            yield name, {"fp32": stored_tensors.pop(name).float(), **averages}


def _next_learning_rate(run: RunConfig, prepared: PreparedText, progress: Progress) -> float:
    """Return the learning rate of the next step."""
    objective = build_objective(run, prepared.tokenizer())
    store = prepared.open()
    steps = run_length(run, objective.dataset(store.train), store.train).steps
    if steps is None:
        return run.train.learning_rate * rate_by_time(run.train, progress.step, progress.share, progress.warmup)
    return run.train.learning_rate * rate(run.train, min(progress.step, steps - 1), steps, progress.warmup)


def _scheduler_state(step: int) -> dict[str, Any]:
    """Return a scheduler's state after `step` steps, with the keys of DeepSpeed's and of PyTorch's schedulers."""
    return {"last_batch_iteration": step - 1, "last_epoch": step, "_step_count": step + 1, "lr_lambdas": []}


def _save_file(content: Any, file: Path) -> None:
    with file.open("wb") as out:  # makes a full disk an OSError
        torch.save(content, out)
