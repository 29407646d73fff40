"""A checkpoint that DeepSpeed wrote by itself, as a model: Trainer's under ZeRO-3 (`checkpoint-500`) is no other.

Its weights lie in pieces, by process, in `global_step…`; the configuration and the tokenizer beside the file `latest`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from artel.errors import InputError, Problem
from artel.models import read_config
from artel.models.build import without_weights
from artel.models.skeleton import read_generation_config
from artel.parallel.deepspeed_checkpoint import read_zero_checkpoint
from artel.tokens import Tokenizer, load_tokenizer
from artel.using.open import objective_of_folder


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
        raise InputError([Problem(str(folder), "is DeepSpeed's checkpoint, and does not say of which model", fix)])
    tokenizer = load_tokenizer(str(described), where=str(folder))
    objective = objective_of_folder(str(described), None, tokenizer)
    config, _ = read_config(str(described))
    model = without_weights(config, objective.auto_class, objective.heads).float()
    read_generation_config(model, str(described))
    return Assembled(model, tokenizer, _named_as(model, read_zero_checkpoint(folder), folder))


def _named_as(model: PreTrainedModel, found: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """The weights of `found` under the model's own names: a module around it puts its own before all of them."""
    wanted = model.state_dict(keep_vars=True)  # tied ones are one tensor
    first = next(iter(wanted))
    before = next((name.removesuffix(first) for name in found if name.endswith(first)), "")
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
