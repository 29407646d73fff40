"""A checkpoint that DeepSpeed wrote by itself, as a model, or as where a run begins.

Trainer's under ZeRO (`checkpoint-500`) is no other. Its weights lie in pieces, by process, in `global_step…`; the
configuration and the tokenizer beside the file `latest`.
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
from artel.models import read_config
from artel.models.loading.pretrained import read_generation_config
from artel.models.loading.structure import without_weights
from artel.parallel.deepspeed.checkpoint import ZeroCheckpoint, model_files, read_zero_checkpoint
from artel.preparing import Prepared
from artel.registry import OPTIMIZERS
from artel.tokens import Tokenizer, load_tokenizer
from artel.training import RunFolder
from artel.training.checkpoint.format import Content, Progress, checkpoint_path, write_whole
from artel.training.optim.local_shards import trained_tensors
from artel.training.schedule import run_length


@dataclass(frozen=True, slots=True)
class Assembled:
    """A model on the meta device, and its weights in float32 by name, tied ones once at least."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    weights: dict[str, torch.Tensor]


def assemble(folder: Path) -> Assembled:
    """The model of DeepSpeed's checkpoint in `folder` (with `latest`, or one of its `global_step…`), all in memory.

    Raises InputError where the configuration, the tokenizer or files are missing, and for weights of another model.
    """
    described = folder if (folder / "latest").is_file() else folder.parent
    if not (described / "config.json").is_file():
        fix = f"copy config.json and the tokenizer's files of the model that was trained to {described}"
        raise InputError.at(str(folder), "is DeepSpeed's checkpoint, and does not say of which model", fix)
    tokenizer = load_tokenizer(str(described), where=str(folder))
    objective = objective_of_folder(str(described), None, tokenizer)
    config, _ = read_config(str(described))
    model = without_weights(config, objective.auto_class, objective.heads).float()
    read_generation_config(model, str(described))
    return Assembled(model, tokenizer, _named_as(model, read_zero_checkpoint(folder), folder))


def exchange_problems(run: RunConfig) -> list[Problem]:
    """Why weights and optimizer of `run` cannot go from DeepSpeed's checkpoints to its own, or back."""
    problems = []
    if not OPTIMIZERS[run.train.optimizer].is_adam:
        what = f"{run.train.optimizer}: only Adam's state goes between DeepSpeed's checkpoints and artel's"
        problems.append(Problem("train.optimizer", what, "write adamw, or take the model alone"))
    if run.model.lora is not None:
        what = "only whole models go between DeepSpeed's checkpoints and artel's"
        problems.append(Problem("model.lora", what, "leave it out, or take the model alone"))
    return problems


def check_beginning(run: RunConfig, folder: Path) -> None:
    """Raise InputError for what can be known without reading: no checkpoint in `folder`, a run that cannot take it."""
    problems = exchange_problems(run)
    try:
        model_files(folder)
    except InputError as error:
        problems += error.problems
    if problems:
        raise InputError(problems)


def begin_run(run: RunConfig, prepared: Prepared, folder: Path, tell: Callable[[str], None]) -> None:
    """Write the first checkpoint of `run`: the weights, averages and step of DeepSpeed's checkpoint in `folder`.

    Raises InputError where files are missing, for weights of another model, for a checkpoint without Adam's averages,
    and for a run that ends before its step.
    """
    saved = ZeroCheckpoint.read(folder)
    state, step = saved.adam()
    opened, store = open_fresh(run, prepared), prepared.open()
    steps = run_length(run, opened.objective.dataset(store.train), store.train).steps
    if step >= steps:
        what = f"is of step {step:,}, and this run ends after {steps:,}"
        raise InputError.at(str(folder), what, "give train.steps, tokens or epochs for all of it")
    weights, state = _of_run(opened.model, saved.weights(), state, folder)
    checkpoints = RunFolder(Path(run.run)).checkpoints
    checkpoints.mkdir(parents=True, exist_ok=True)
    content = Content(weights, state, Progress(step=step, store=store.digest), dump_run(run))
    write_whole(checkpoint_path(checkpoints, step), content)
    tell(f"step {step:,} of {folder} is this run's: weights, averages, count of steps; the order of samples is its own")


def _of_run(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], state: dict[str, torch.Tensor], folder: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights and state as a checkpoint of artel's has them for `model`: its names for them, a tied weight once."""
    whole, trained, before = model.state_dict(keep_vars=True), trained_tensors(model), _before(model, weights)
    state = {name.removeprefix(before): tensor for name, tensor in state.items()}
    stepped = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if unlike := sorted(stepped ^ {name.rpartition("|")[0] for name in state}):
        what = f"trained other parameters than this run does ({unlike[0]} …, {len(unlike)} in all)"
        raise InputError.at(str(folder), what, "set model.freeze as it was there")
    by_tensor = {id(whole[name]): value for name, value in _named_as(model, weights, folder).items()}
    return {name: by_tensor[id(tensor)].to(tensor.dtype) for name, tensor in trained.items()}, state


def _before(model: PreTrainedModel, found: dict[str, torch.Tensor]) -> str:
    """What stands before all names of `found`: a module around the model puts its own there."""
    first = next(iter(model.state_dict()))
    return next((name.removesuffix(first) for name in found if name.endswith(first)), "")


def _named_as(model: PreTrainedModel, found: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """The weights of `found` under the model's own names."""
    wanted, before = model.state_dict(keep_vars=True), _before(model, found)  # tied ones are one tensor
    weights = {name.removeprefix(before): tensor for name, tensor in found.items() if name.startswith(before)}
    there = {id(wanted[name]) for name in weights.keys() & wanted.keys()}
    lacking = [name for name, tensor in wanted.items() if name not in weights and id(tensor) not in there]
    # Buffers that a model of an older transformers had (GPT-2's masks): these it leaves out itself when it loads one.
    left = model._keys_to_ignore_on_load_unexpected or []
    beside = [name for name in found if name.removeprefix(before) not in wanted
              and not any(re.search(pattern, name) for pattern in left)]  # fmt: skip
    unlike = [name for name in weights.keys() & wanted.keys() if weights[name].shape != wanted[name].shape]
    whose = f"this {type(model).__name__}"
    wrong = {"has no weights for {} of {}": lacking, "has {} that are not of {}": beside,
             "has {} in other shapes than {}": unlike}  # fmt: skip
    fix = "give the config.json of the model that was trained, and transformers in its version"
    problems = [
        Problem(str(folder), what.format(f"{len(names)} tensors ({sorted(names)[0]} …)", whose), fix)
        for what, names in wrong.items() if names
    ]  # fmt: skip
    if problems:
        raise InputError(problems)
    return {name: weights[name] for name in wanted if name in weights}
