"""Writing a language part inside the whole it was taken from.

The original files are written again one by one, under their names. A tensor that was not changed is copied in its own
dtype, bit for bit; so is the vision tower, which nobody had in memory. What belongs to the processor is copied beside.
"""

from __future__ import annotations

import json
import shutil
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
from artel.models.loading.conversion import Conversion
from artel.models.loading.init_weights import canonical_names
from artel.models.loading.multimodal.language_part import Whole
from artel.models.loading.multimodal.plan import plan_whole
from artel.models.loading.safetensors_files import find_files

_COPIED = (GENERATION_CONFIG_NAME, IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME)


def save_inside(
    model: PreTrainedModel, whole: Whole, folder: Path, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Write the whole into an existing folder, with the weights of its language part `model`; no tokenizer.

    `weights` are those by name, tied ones once, where this process holds shards only. Raises WorkError where the
    original is no longer there.
    """
    try:
        changed = _write_weights(_Values(model, whole, weights), whole, folder)
    except (OSError, ValueError) as error:  # transformers' own for a folder that is gone, and for its files
        what = (
            f"{whole.source}, whose vision tower belongs to the model, cannot be read: {' '.join(str(error).split())}"
        )
        fix = "put it back, and run the same command again: the newest checkpoint has the weights"
        raise WorkError.at("model.from", what[:400], fix) from error
    _write_config(model, whole, folder, changed)
    for name in _COPIED:
        _copy(whole.source, name, folder)
    if model.generation_config is not None:  # it may name other end tokens than the original's
        model.generation_config.save_pretrained(str(folder))


def copy_old_template(whole: Whole, folder: Path) -> None:
    """Copy the processor's template of old, which it prefers, unless the tokenizer has written one."""
    if not (folder / CHAT_TEMPLATE_FILE).is_file():
        _copy(whole.source, LEGACY_PROCESSOR_CHAT_TEMPLATE_FILE, folder)


class _Values:
    """The tensors of the language part by their names in the whole's files."""

    def __init__(self, model: PreTrainedModel, whole: Whole, weights: dict[str, torch.Tensor] | None) -> None:
        names = canonical_names(model)
        own = model.state_dict() if weights is None else weights
        self._tensors = {whole.name_of(name): tensor for name, tensor in own.items()}
        by_canonical = {names.get(name, name): tensor for name, tensor in own.items()}
        for name, canonical in names.items():  # the other names of what is tied
            if canonical in by_canonical:
                self._tensors.setdefault(whole.name_of(name), by_canonical[canonical])
        self._whole = whole
        self._is_tied = bool(model.config.tie_word_embeddings)
        self._converted: dict[str, torch.Tensor] = {}

    def of(self, name: str) -> torch.Tensor | None:
        """The tensor of a name in the whole, on the CPU; None for what is not of the language part."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.detach().cpu().contiguous()

    def untied(self, name: str) -> torch.Tensor | None:
        """The tensor of a name that the files lack because it was tied, where it is no longer."""
        return None if self._is_tied else self.of(name)

    def of_converted(self, key: str, entry: Conversion) -> torch.Tensor | None:
        """The tensor of a key in the files that makes a parameter together with others."""
        if key not in self._converted:
            made = {name: tensor for name in entry.targets if (tensor := self.of(name)) is not None}
            if not made:
                return None
            self._converted = revert_weight_conversion(self._whole.model, made)
        return self._converted[key].contiguous()


def _write_weights(values: _Values, whole: Whole, folder: Path) -> torch.dtype | None:
    """Write the original's files again with the values that differ. Returns their dtype; None where none differs."""
    files = find_files(whole.source, whole.config)
    with files:
        plan = plan_whole(whole, files)
    parameters = {key: name for name, key in plan.same.items()}
    conversions = {key: entry for entry in plan.converted.values() for keys in entry.sources.values() for key in keys}
    added = {name: tensor for name in plan.info.missing_keys if (tensor := values.untied(name)) is not None}
    changed: torch.dtype | None = None
    places: dict[str, str] = {}
    size = 0
    for path in files.paths:
        tensors: dict[str, torch.Tensor] = {}
        if added and path is files.paths[-1]:
            tensors = revert_weight_conversion(whole.model, added)
        places |= dict.fromkeys(tensors, path.name)
        size += sum(tensor.nbytes for tensor in tensors.values())
        differs = bool(tensors)
        with safe_open(path, framework="pt") as original:
            for key in original.keys():  # noqa: SIM118  # no mapping
                tensor = original.get_tensor(key)
                new = values.of(parameters[key]) if key in parameters else None
                if key in conversions:
                    new = values.of_converted(key, conversions[key])
                if new is not None and not (tensor.shape == new.shape and torch.equal(tensor.to(new.dtype), new)):
                    tensor, differs, changed = new, True, new.dtype
                tensors[key] = tensor
                places[key] = path.name
                size += tensor.nbytes
            metadata = original.metadata()
        if differs:
            save_file(tensors, folder / path.name, metadata=metadata or {"format": "pt"})
        else:
            shutil.copyfile(path, folder / path.name)
    if len(files.paths) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True), encoding="utf-8")
    return changed


def _write_config(model: PreTrainedModel, whole: Whole, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the original config.json with the dtype of what was changed, and the rows of the embeddings."""
    values = json.loads(_found(whole.source, CONFIG_NAME).read_text(encoding="utf-8"))
    if dtype is not None:
        values.pop("torch_dtype", None)
        values["dtype"] = str(dtype).removeprefix("torch.")
        for part in values.values():
            for key in {"dtype", "torch_dtype"} & part.keys() if isinstance(part, dict) else ():
                part[key] = values["dtype"]
    if not model.config.tie_word_embeddings and whole.model.all_tied_weights_keys:
        for part in (values, values.get(_text_key(whole), {})):
            part["tie_word_embeddings"] = False
    rows = model.get_input_embeddings().weight.shape[0]
    if rows != whole.model.get_input_embeddings().weight.shape[0]:
        values.get(_text_key(whole), values)["vocab_size"] = rows
        if "vocab_size" in values:
            values["vocab_size"] = rows
    (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _text_key(whole: Whole) -> str:
    """The key of the language part's configuration in the whole's."""
    text = whole.config.get_text_config(decoder=True)
    return next((name for name in whole.config.sub_configs if getattr(whole.config, name, None) is text), "")


def _found(source: str, name: str) -> Path:
    return Path(str(cached_file(source, name)))


def _copy(source: str, name: str, folder: Path) -> None:
    file = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    if file is not None and not (folder / name).exists():
        shutil.copyfile(file, folder / name)
