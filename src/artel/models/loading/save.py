"""Saving a model as a Hugging Face folder: safetensors, configuration, tokenizer.

A model with adapters is saved as in peft: the adapters and the modules trained with them. The language part of a
multimodal model is saved inside the whole model: the original files are written again one by one, under their names.
Unchanged tensors, and the vision tower, which was never in memory, are copied bit for bit in their original dtype.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    IMAGE_PROCESSOR_NAME,
    PROCESSOR_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    VIDEO_PROCESSOR_NAME,
)
from transformers.utils.hub import CHAT_TEMPLATE_FILE, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, cached_file

from artel.errors import WorkError
from artel.models.forward_pass import architecture_error
from artel.models.loading.conversion import Conversion
from artel.models.loading.extra_tensors import with_extra_tensors
from artel.models.loading.init_weights import canonical_names
from artel.models.loading.language_part import MultimodalModel, get_multimodal, plan_multimodal, rename_for_multimodal
from artel.models.loading.safetensors_files import find_files
from artel.models.lora.adapter_folder import save_adapter
from artel.models.lora.adapters import is_adapted
from artel.storage import new_folder
from artel.tokens import Tokenizer

_COPIED_FILES = (GENERATION_CONFIG_NAME, IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME)


def save_model(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
    files: Mapping[str, bytes] | None = None,
    preserved_files: Sequence[Path] = (),
    on_file_names: Callable[[list[str]], object] = lambda names: None,
) -> None:
    """Write the folder atomically. It replaces an earlier folder, except for `preserved_files`.

    `weights`: the model's full weights by name if this process holds only shards. A tied weight appears once. `files`:
    further files of the model, by their path in the folder. `on_file_names` gets all file names before they appear.
    """
    with new_folder(folder, replace=True) as partial:
        write_model(model, tokenizer, partial, weights, files)
        names = [path.name for path in partial.iterdir()]
        on_file_names(names)
        for path in preserved_files:
            if path.name not in names:
                copy_path = shutil.copytree if path.is_dir() and not path.is_symlink() else shutil.copy2
                copy_path(path, partial / path.name)


def write_model(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write the files of the model and the tokenizer, and `files`, into an existing folder."""
    multimodal = get_multimodal(model)
    if is_adapted(model):
        save_adapter(model, folder, weights)
        if multimodal is not None:
            rename_for_multimodal(multimodal, folder)
    elif multimodal is not None:
        save_multimodal(model, multimodal, folder, weights)
    else:
        try:
            with with_extra_tensors(model, weights) as state:
                model.save_pretrained(str(folder), state_dict=state)
        except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
            if architecture_error(error, model) is None:
                raise
            what = f"transformers cannot write {model.config.model_type}: {' '.join(str(error).split())[:300]}"
            raise WorkError.at("model", what, "its weights are in the run's newest checkpoint") from error
    tokenizer.save(folder)
    if multimodal is not None and not is_adapted(model):
        copy_old_template(multimodal, folder)
    for name, content in (files or {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def save_multimodal(
    model: PreTrainedModel, multimodal: MultimodalModel, folder: Path, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Write a multimodal model with the weights of its language part `model` into an existing folder; no tokenizer.

    `weights` as for `save_model`. Raise WorkError if the original files are gone.
    """
    try:
        changed_dtype = _write_weights(_PartTensors(model, multimodal, weights), multimodal, folder)
    except (OSError, ValueError) as error:  # from transformers, for a missing folder or its files
        reason = " ".join(str(error).split())
        what = f"{multimodal.source}, whose vision tower belongs to the model, cannot be read: {reason}"
        fix = "restore it, and run the same command again: the newest checkpoint has the weights"
        raise WorkError.at("model.from", what[:400], fix) from error
    _write_config(model, multimodal, folder, changed_dtype)
    for name in _COPIED_FILES:
        _copy_file(multimodal.source, name, folder)
    if model.generation_config is not None:  # its end tokens may differ from the original's
        model.generation_config.save_pretrained(str(folder))


def copy_old_template(multimodal: MultimodalModel, folder: Path) -> None:
    """Copy the processor's legacy template, which it prefers, unless the tokenizer has written a template."""
    if not (folder / CHAT_TEMPLATE_FILE).is_file():
        _copy_file(multimodal.source, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, folder)


class _PartTensors:
    """The tensors of the language part, by their names in the whole model."""

    def __init__(
        self, model: PreTrainedModel, multimodal: MultimodalModel, weights: dict[str, torch.Tensor] | None
    ) -> None:
        names = canonical_names(model)
        state = model.state_dict() if weights is None else weights
        self._tensors = {multimodal.full_name(name): tensor for name, tensor in state.items()}
        by_canonical = {names.get(name, name): tensor for name, tensor in state.items()}
        for name, canonical in names.items():  # other names of tied tensors
            if canonical in by_canonical:
                self._tensors.setdefault(multimodal.full_name(name), by_canonical[canonical])
        self._multimodal = multimodal
        self._is_tied = bool(model.config.tie_word_embeddings)
        self._converted: dict[str, torch.Tensor] = {}

    def get(self, name: str) -> torch.Tensor | None:
        """Return a tensor by its name in the whole model, on the CPU; None if it is not in the language part."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.detach().cpu().contiguous()

    def get_untied(self, name: str) -> torch.Tensor | None:
        """Return a tensor that the files lack because it was tied; None if it still is."""
        return None if self._is_tied else self.get(name)

    def get_converted(self, key: str, entry: Conversion) -> torch.Tensor | None:
        """Return the tensor of a key in the files that is part of a converted parameter."""
        if key not in self._converted:
            tensors = {name: tensor for name in entry.targets if (tensor := self.get(name)) is not None}
            if not tensors:
                return None
            self._converted = revert_weight_conversion(self._multimodal.model, tensors)
        return self._converted[key].contiguous()


def _write_weights(values: _PartTensors, multimodal: MultimodalModel, folder: Path) -> torch.dtype | None:
    """Write the original files again with changed values. Return their dtype; None if nothing changed."""
    files = find_files(multimodal.source, multimodal.config)
    with files:
        plan = plan_multimodal(multimodal, files)
    parameters = {key: name for name, key in plan.key_of_target.items()}
    conversions = {
        key: entry for entry in plan.conversion_of_target.values() for keys in entry.sources.values() for key in keys
    }
    new_tensors = {name: tensor for name in plan.info.missing_keys if (tensor := values.get_untied(name)) is not None}
    changed_dtype: torch.dtype | None = None
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for path in files.paths:
        tensors: dict[str, torch.Tensor] = {}
        if new_tensors and path is files.paths[-1]:
            tensors = revert_weight_conversion(multimodal.model, new_tensors)
        weight_map |= dict.fromkeys(tensors, path.name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        differs = bool(tensors)
        with safe_open(path, framework="pt") as original:
            for key in original.keys():  # noqa: SIM118  # not a mapping
                tensor = original.get_tensor(key)
                new = values.get(parameters[key]) if key in parameters else None
                if key in conversions:
                    new = values.get_converted(key, conversions[key])
                if new is not None and not (tensor.shape == new.shape and torch.equal(tensor.to(new.dtype), new)):
                    tensor, differs, changed_dtype = new, True, new.dtype
                tensors[key] = tensor
                weight_map[key] = path.name
                total_bytes += tensor.nbytes
            metadata = original.metadata()
        if differs:
            save_file(tensors, folder / path.name, metadata=metadata or {"format": "pt"})
        else:
            shutil.copyfile(path, folder / path.name)
    if len(files.paths) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
    return changed_dtype


def _write_config(model: PreTrainedModel, multimodal: MultimodalModel, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the original config.json with the dtype of changed weights and the rows of the embeddings."""
    original = Path(str(cached_file(multimodal.source, CONFIG_NAME)))
    values = json.loads(original.read_text(encoding="utf-8"))
    if dtype is not None:
        values.pop("torch_dtype", None)
        values["dtype"] = str(dtype).removeprefix("torch.")
        for section in values.values():
            for key in {"dtype", "torch_dtype"} & section.keys() if isinstance(section, dict) else ():
                section[key] = values["dtype"]
    if not model.config.tie_word_embeddings and multimodal.model.all_tied_weights_keys:
        for section in (values, values.get(_text_key(multimodal), {})):
            section["tie_word_embeddings"] = False
    rows = model.get_input_embeddings().weight.shape[0]
    if rows != multimodal.model.get_input_embeddings().weight.shape[0]:
        values.get(_text_key(multimodal), values)["vocab_size"] = rows
        if "vocab_size" in values:
            values["vocab_size"] = rows
    (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _text_key(multimodal: MultimodalModel) -> str:
    """Return the key of the language part's configuration in the whole model's configuration."""
    text = multimodal.config.get_text_config(decoder=True)
    return next((name for name in multimodal.config.sub_configs if getattr(multimodal.config, name, None) is text), "")


def _copy_file(source: str, name: str, folder: Path) -> None:
    file = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    if file is not None and not (folder / name).exists():
        shutil.copyfile(file, folder / name)
