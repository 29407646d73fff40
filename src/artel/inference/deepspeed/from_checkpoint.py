"""A sharded checkpoint of DeepSpeed as a model, or as the start of a run.

The checkpoints of transformers' Trainer under ZeRO (`checkpoint-500`) are such checkpoints. The shards of each process
are in `global_step…`; configuration and tokenizer are next to the file `latest`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from artel.config import RunConfig, dump_run
from artel.errors import InputError, Problem
from artel.inference.open import objective_of_folder, open_fresh
from artel.models.loading.model_folder import read_config
from artel.models.loading.pretrained import read_generation_config
from artel.models.loading.structure import without_weights
from artel.parallel.deepspeed.checkpoint import ZeroCheckpoint, model_files, read_zero_checkpoint
from artel.preparing import Prepared
from artel.registry import OPTIMIZERS
from artel.tokens import Tokenizer, load_tokenizer
from artel.training import RunFolder
from artel.training.checkpoint.format import Content, Progress, checkpoint_path, write_full
from artel.training.checkpoint.items import MODEL, OPTIMIZER
from artel.training.optim.local_shards import trained_tensors
from artel.training.schedule import run_length


@dataclass(frozen=True, slots=True)
class AssembledModel:
    """A model on the meta device, and its weights in float32 by name, tied ones at least once."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    weights: dict[str, torch.Tensor]


def assemble(folder: Path) -> AssembledModel:
    """The model of DeepSpeed's checkpoint in `folder` (the one with `latest`, or a `global_step…`), all in memory.

    Raises InputError where the configuration, the tokenizer or files are missing, and for weights of another model.
    """
    model_folder = folder if (folder / "latest").is_file() else folder.parent
    if not (model_folder / "config.json").is_file():
        fix = f"copy config.json and the tokenizer's files of the model that was trained to {model_folder}"
        raise InputError.at(str(folder), "is DeepSpeed's checkpoint, and does not say of which model", fix)
    tokenizer = load_tokenizer(str(model_folder), where=str(folder))
    objective = objective_of_folder(str(model_folder), None, tokenizer)
    config, _ = read_config(str(model_folder))
    model = without_weights(config, objective.auto_class, objective.heads).float()
    read_generation_config(model, str(model_folder))
    return AssembledModel(model, tokenizer, _named_as(model, read_zero_checkpoint(folder), folder))


def exchange_problems(run: RunConfig) -> list[Problem]:
    """Why weights and optimizer state of `run` cannot be converted from or to DeepSpeed's checkpoints."""
    problems = []
    if not OPTIMIZERS[run.train.optimizer].is_adam:
        what = f"{run.train.optimizer}: only Adam's state goes between DeepSpeed's checkpoints and artel's"
        problems.append(Problem("train.optimizer", what, "write adamw, or take the model alone"))
    if run.model.lora is not None:
        what = "only whole models go between DeepSpeed's checkpoints and artel's"
        problems.append(Problem("model.lora", what, "leave it out, or take the model alone"))
    return problems


def check_beginning(run: RunConfig, folder: Path) -> None:
    """Raise InputError where `folder` has no checkpoint, or `run` cannot continue from one. Nothing is read."""
    problems = exchange_problems(run)
    try:
        model_files(folder)
    except InputError as error:
        problems += error.problems
    if problems:
        raise InputError(problems)


def begin_run(run: RunConfig, prepared: Prepared, folder: Path, tell: Callable[[str], None]) -> None:
    """Write the first checkpoint of `run`: the weights, Adam's averages and step of DeepSpeed's checkpoint in `folder`.

    Raises InputError for missing files, weights of another model, a checkpoint without Adam's averages, and a run that
    ends before its step.
    """
    saved = ZeroCheckpoint.read(folder)
    state, step = saved.adam()
    opened, store = open_fresh(run, prepared), prepared.open()
    steps = run_length(run, opened.objective.dataset(store.train), store.train).steps
    if steps is not None and step >= steps:
        what = f"is of step {step:,}, and this run ends after {steps:,}"
        raise InputError.at(str(folder), what, "give train.steps, tokens or epochs for all of it")
    weights, state = _of_run(opened.model, saved.weights(), state, folder)
    run_folder = RunFolder(Path(run.run))
    checkpoints, progress = run_folder.checkpoints, Progress(step, run=run_folder.identity(), store=store.digest)
    checkpoints.mkdir(parents=True, exist_ok=True)
    content = Content({MODEL: weights, OPTIMIZER: state}, progress, dump_run(run))
    write_full(checkpoint_path(checkpoints, step), content)
    tell(f"step {step:,} of {folder} is this run's: weights, averages, count of steps; the order of samples is its own")


def _of_run(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], state: dict[str, torch.Tensor], folder: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and state as in artel's checkpoint of `model`: under its names, a tied weight once."""
    whole, trained, prefix = model.state_dict(keep_vars=True), trained_tensors(model), _prefix(model, weights)
    state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    stepped = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if unlike := sorted(stepped ^ {name.rpartition("|")[0] for name in state}):
        what = f"trained other parameters than this run does ({unlike[0]} …, {len(unlike)} in all)"
        raise InputError.at(str(folder), what, "set model.freeze as it was there")
    by_tensor = {id(whole[name]): value for name, value in _named_as(model, weights, folder).items()}
    return {name: by_tensor[id(tensor)].to(tensor.dtype) for name, tensor in trained.items()}, state


def _prefix(model: PreTrainedModel, saved: dict[str, torch.Tensor]) -> str:
    """The prefix of all names in `saved`, which comes from a module around the model."""
    first = next(iter(model.state_dict()))
    return next((name.removesuffix(first) for name in saved if name.endswith(first)), "")


def _named_as(model: PreTrainedModel, saved: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """The weights in `saved` under the model's own names. Raises InputError where they do not fit the model."""
    own, prefix = model.state_dict(keep_vars=True), _prefix(model, saved)  # tied ones are one tensor
    weights = {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
    present = {id(own[name]) for name in weights.keys() & own.keys()}
    lacking = [name for name, tensor in own.items() if name not in weights and id(tensor) not in present]
    # Buffers of older versions of transformers (GPT-2's masks), which the model ignores when it loads weights.
    ignored = model._keys_to_ignore_on_load_unexpected or []
    beside = [
        name
        for name in saved
        if name.removeprefix(prefix) not in own and not any(re.search(pattern, name) for pattern in ignored)
    ]
    unlike = [name for name in weights.keys() & own.keys() if weights[name].shape != own[name].shape]
    whose = f"this {type(model).__name__}"
    wrong = {
        "has no weights for {} of {}": lacking,
        "has {} that are not of {}": beside,
        "has {} in other shapes than {}": unlike,
    }
    fix = "give the config.json of the model that was trained, and transformers in its version"
    problems = [
        Problem(str(folder), what.format(f"{len(names)} tensors ({sorted(names)[0]} …)", whose), fix)
        for what, names in wrong.items()
        if names
    ]
    if problems:
        raise InputError(problems)
    return {name: weights[name] for name in own if name in weights}
