"""Saving a model as a folder in Hugging Face's format: safetensors, configuration, tokenizer.

Of a model with adapters it writes the adapters and the modules trained with them, as peft does; of the language part
of a multimodal model, the whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from artel.errors import WorkError
from artel.models.architecture_error import architecture_error
from artel.models.loading.carried import with_carried
from artel.models.loading.multimodal.adapter import name_as_whole
from artel.models.loading.multimodal.language_part import whole_of
from artel.models.loading.multimodal.save import copy_old_template, save_inside
from artel.models.lora.adapters import is_adapted, save_adapter
from artel.storage import new_folder
from artel.tokens import Tokenizer


def save_model(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
    files: Mapping[str, bytes] | None = None,
    kept: Sequence[Path] = (),
    note: Callable[[list[str]], object] = lambda names: None,
) -> None:
    """Write the folder whole or not at all. It replaces an earlier one, except the files in `kept`.

    `weights` are the model's weights by name, tied ones once, where this process holds shards only. `files` are others
    that belong to the model, by their paths in the folder. `note` is called with the names of the files before they
    appear.
    """
    with new_folder(folder, replace=True) as partial:
        write_model(model, tokenizer, partial, weights, files)
        names = [path.name for path in partial.iterdir()]
        note(names)
        for path in kept:
            if path.name not in names:
                copy = shutil.copytree if path.is_dir() and not path.is_symlink() else shutil.copy2
                copy(path, partial / path.name)


def write_model(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write the files of the model and the tokenizer, and the `files` beside them, into an existing folder."""
    whole = whole_of(model)
    if is_adapted(model):
        save_adapter(model, folder, weights)
        if whole is not None:
            name_as_whole(whole, folder)
    elif whole is not None:
        save_inside(model, whole, folder, weights)
    else:
        try:
            with with_carried(model, weights) as state:
                model.save_pretrained(str(folder), state_dict=state)
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
            if architecture_error(error, model) is None:
                raise
            what = f"transformers cannot write {model.config.model_type}: {' '.join(str(error).split())[:300]}"
            raise WorkError.at("model", what, "its weights are whole in the run's newest checkpoint") from error
    tokenizer.save(folder)
    if whole is not None and not is_adapted(model):
        copy_old_template(whole, folder)
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
