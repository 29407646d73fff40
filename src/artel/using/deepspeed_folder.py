"""A checkpoint that DeepSpeed wrote by itself, as a model: Trainer's under ZeRO-3 (`checkpoint-500`) is no other.

Its weights lie in pieces, by process, in `global_step…`; the configuration and the tokenizer beside the file `latest`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from artel.errors import InputError, Problem
from artel.models import read_config
from artel.models.heads import model_class
from artel.parallel.deepspeed_checkpoint import read_zero_checkpoint
from artel.tokens import Tokenizer, load_tokenizer
from artel.using.open import objective_of_folder


@dataclass(frozen=True, slots=True)
class Assembled:
    """A model on the meta device, and its weights in float32 by name, tied ones once at least."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    weights: dict[str, torch.Tensor]


def is_deepspeed_folder(folder: Path) -> bool:
    return (folder / "latest").is_file() or any(folder.glob("*_model_states.pt"))


def assemble(folder: Path) -> Assembled:
    """The model of DeepSpeed's checkpoint in `folder` (with `latest`, or one of its `global_step…`), all in memory.

    Raises InputError where the configuration, the tokenizer or files are missing, and for weights of another model.
    """
    described = folder if (folder / "latest").is_file() else folder.parent
    if not (described / "config.json").is_file():
        fix = f"copy config.json and the tokenizer's files of the model that was trained to {described}"
        raise InputError([Problem(str(folder), "is DeepSpeed's checkpoint, and does not say of which model", fix)])
    tokenizer = load_tokenizer(str(described), where=str(folder))
    objective = objective_of_folder(str(described), None, tokenizer)
    config, _ = read_config(str(described))
    with torch.device("meta"):
        model = model_class(config, objective.auto_class, objective.heads)._from_config(copy.deepcopy(config)).float()
    return Assembled(model, tokenizer, _named_as(model, read_zero_checkpoint(folder), folder))


def _named_as(model: PreTrainedModel, found: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """The weights of `found` under the model's own names: a module around it puts its own before all of them."""
    wanted = model.state_dict(keep_vars=True)  # tied ones are one tensor
    first = next(iter(wanted))
    before = next((name.removesuffix(first) for name in found if name.endswith(first)), "")
    weights = {name.removeprefix(before): tensor for name, tensor in found.items() if name.startswith(before)}
    there = {id(wanted[name]) for name in weights.keys() & wanted.keys()}
    lacking = sorted(name for name, tensor in wanted.items() if name not in weights and id(tensor) not in there)
    unlike = sorted(name for name in weights.keys() & wanted.keys() if weights[name].shape != wanted[name].shape)
    whose = f"this {type(model).__name__}"
    fix = "give the config.json of the model that was trained, and transformers in its version"
    problems = []
    if lacking:
        what = f"has no weights for {len(lacking)} tensors of {whose} ({lacking[0]} …)"
        problems.append(Problem(str(folder), what, fix))
    for name in unlike[:3]:
        what = f"{name} has the shape {list(weights[name].shape)}, that of {whose} {list(wanted[name].shape)}"
        problems.append(Problem(str(folder), what, fix))
    if problems:
        raise InputError(problems)
    return {name: weights[name] for name in wanted if name in weights}
