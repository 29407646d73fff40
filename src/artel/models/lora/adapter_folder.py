"""Folders of saved adapters: reading, writing, loading into the base model, merging with it."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from artel.errors import InputError
from artel.messages import logger
from artel.models.lora.adapters import NAME, inject, require_peft, without_peft_warnings
from artel.printable import join_names

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_BASE_CONFIG = "base_config.json"
PREFIX = "base_model.model."
"""The prefix of tensor names in the files: peft wraps the model twice."""
_WRAPPERS = re.compile(r"\.(modules_to_save|original_module|token_adapter|base_layer)\b")
"""Names of peft's wrappers inside the names of weights."""
_BASE_CHANGED_KEY = "artel_base_changed"
_MAX_LEVELS = 4
"""Parent folders that are searched for a base model that has moved: RUN, runs, the project, one more."""


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder written by peft: adapter_config.json and adapter_model.safetensors."""

    folder: Path
    config: Any
    """peft's LoraConfig."""
    base: str
    """The base model: a folder or hub id. If the folder in adapter_config.json is gone, a folder found nearby."""

    @property
    def base_config(self) -> Path | None:
        """The base's configuration in training, if the run changed it (`model.rope`, `model.attention`)."""
        file = self.folder / _BASE_CONFIG
        return file if file.is_file() else None

    @property
    def full_modules(self) -> dict[str, int]:
        """Modules whose full weights are in the adapter, with their number of rows (0: unknown).

        These are `modules_to_save`, and embeddings: peft saves them too if the vocabulary grew before training.
        Raise InputError if the weights cannot be read.
        """
        module_rows = dict.fromkeys(self.config.modules_to_save or (), 0)
        try:
            with safe_open(self.folder / WEIGHTS, "pt") as file:
                shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (no dictionary)
        except (OSError, SafetensorError) as error:
            what, fix = f"cannot be read: {error}", "use a complete copy of the folder"
            raise InputError.at(str(self.folder / WEIGHTS), what, fix) from None
        for name, shape in shapes.items():
            if name.endswith(".weight") and ".lora_" not in name and len(shape) == 2:
                module_rows[_WRAPPERS.sub("", name.removeprefix(PREFIX).removesuffix(".weight"))] = shape[0]
        return module_rows


def read_adapter(name: str) -> AdapterFolder | None:
    """Return the adapter in a folder, or None. Raise InputError for an adapter that cannot be used."""
    folder = Path(name)
    if not (folder / CONFIG).is_file() or (folder / "config.json").is_file():
        return None
    where = str(folder / CONFIG)
    if not (folder / WEIGHTS).is_file():
        what, fix = f"there is no {WEIGHTS} beside it", "use the folder with all of its files"
        if (folder / "adapter_model.bin").is_file():
            what += ", only adapter_model.bin, a pickle, which could hold code"
            fix = "if you trust it, load it with peft and save it again: save_pretrained writes safetensors"
        raise InputError.at(where, what, fix)
    require_peft()
    from peft import PeftConfig, PeftType

    try:
        config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # JSON and peft raise various errors
        raise InputError.at(where, f"cannot be read: {error}", "use a folder written by peft") from None
    if config.peft_type != PeftType.LORA:
        raise InputError.at(where, f"is an adapter of type {config.peft_type}", "artel supports only LoRA")
    base = config.base_model_name_or_path
    if not base or not isinstance(base, str):
        raise InputError.at(where, "has no base model", 'add "base_model_name_or_path": its folder or hub id')
    return AdapterFolder(folder, config, _find_base(base, folder))


def _find_base(base: str, folder: Path) -> str:
    """Return the base model of the adapter in `folder`, even if both were moved together.

    A path that does not exist is searched next to the adapter and in the folders above it: first all its components,
    then fewer and fewer of the last ones. Raise InputError if it is not found.
    """
    if Path(base).is_dir():
        return base
    is_windows = bool(PureWindowsPath(base).drive) or "\\" in base
    path = PureWindowsPath(base) if is_windows else PurePosixPath(base)
    is_path = is_windows or base.startswith(("/", ".", "~"))
    parts = [part for part in path.parts if part not in (path.anchor, ".", "..", "~")]
    search_folders = [folder.resolve(), *folder.resolve().parents][: _MAX_LEVELS + 1]
    lengths = range(len(parts), 0, -1) if is_path else [len(parts)]  # a hub id is not shortened
    for length in lengths:
        for parent in search_folders:
            candidate = parent.joinpath(*parts[-length:])
            if (candidate / "config.json").is_file():
                _log_moved_base(base, str(candidate))
                return str(candidate)
    if is_path:
        what = f"its base model {base} was not found, and there is no {'/'.join(parts[-2:])} with a model near it"
        fix = 'set "base_model_name_or_path" to the folder or hub id of the base model'
        raise InputError.at(str(folder / CONFIG), what, fix)
    return base


@cache
def _log_moved_base(base: str, new_folder: str) -> None:
    """Log once that the base model was found in another folder."""
    logger.warning("the base model %s was not found; using %s, near its adapter", base, new_folder)


def set_base_model(folder: Path, base: str) -> None:
    """Set the base model in the configuration of the adapter in `folder`."""
    file = folder / CONFIG
    config = json.loads(file.read_bytes())
    config["base_model_name_or_path"] = base
    file.unlink()  # it may be a link to the run's file
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_adapter(model: PreTrainedModel, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write peft's files, for `PeftModel.from_pretrained(base, folder)`.

    `weights`: the model's full weights by name, if this process holds only shards or a pipeline stage.
    """
    from peft import get_peft_model_state_dict

    if weights is None:
        state = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    else:
        state = adapter_state(weights)
    tensors = {f"{PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = copy.deepcopy(model.peft_config[NAME])
    config.inference_mode = True  # peft's default for a saved adapter
    config.save_pretrained(str(folder))
    if getattr(model, _BASE_CHANGED_KEY, False):
        model.config.to_json_file(folder / _BASE_CONFIG)


def adapter_state(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the adapter's weights out of a model's weights, under the names of peft's files.

    peft's own function looks for modules of the model, and a pipeline stage has only some of them.
    """
    state = {}
    for name, tensor in weights.items():
        if ".lora_" in name or f".modules_to_save.{NAME}." in name:
            name = name.replace(f".lora_magnitude_vector.{NAME}.weight", ".lora_magnitude_vector")
            state[name.replace(f".modules_to_save.{NAME}.", ".").replace(f".{NAME}.", ".")] = tensor
    return state


def note_changed_base(model: PreTrainedModel) -> None:
    """Save the model's configuration together with the adapter, since it differs from that of the base."""
    setattr(model, _BASE_CHANGED_KEY, True)


def load_adapter(model: PreTrainedModel, adapter: AdapterFolder, name: str = NAME) -> None:
    """Load a saved adapter into its base model, under `name`. Raise InputError if they do not fit."""
    from peft import set_peft_model_state_dict

    file = adapter.folder / WEIGHTS
    try:
        state = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(file).items()}
        inject(model, copy.deepcopy(adapter.config), name)
        result = set_peft_model_state_dict(model, state, adapter_name=name)
    except Exception as error:  # safetensors, PyTorch and peft raise various errors
        raise mismatch_error(adapter, error) from None
    check_all_loaded(adapter, result.unexpected_keys)


def check_all_loaded(adapter: AdapterFolder, unexpected: list[str]) -> None:
    """Raise InputError if tensors were not loaded, such as a classifier's head or those of another model."""
    # Tensors of wrappers are copies.
    unknown_tensors = [key.removeprefix(PREFIX) for key in unexpected if not _WRAPPERS.search(key)]
    if unknown_tensors:
        what = f"has tensors that do not exist in {adapter.base}: {join_names(unknown_tensors)}"
        fix = "base_model_name_or_path must be the model it was trained on"
        if adapter.config.task_type not in (None, "CAUSAL_LM", "SEQ_2_SEQ_LM"):
            fix = f"it was trained for {adapter.config.task_type}: merge it with peft, whose Auto classes have the head"
        raise InputError.at(str(adapter.folder / WEIGHTS), what, fix)


def mismatch_error(adapter: AdapterFolder, error: Exception) -> InputError:
    """Return the error for an adapter that does not fit its base."""
    reason = " ".join(str(error).split())[:300]
    fix = f"it belongs to {adapter.base}; is that still the same model?"
    return InputError.at(str(adapter.folder / WEIGHTS), f"does not fit its base model: {reason}", fix)


def merge_adapter(model: PreTrainedModel, adapter: AdapterFolder) -> PreTrainedModel:
    """Return the base model in float32, with the adapter's updates added to its weights.

    Tied embeddings that the adapter trained become untied, also in the configuration. Raise InputError if base and
    adapter do not fit, or if the result cannot be saved as a separate model.
    """
    from peft import PeftModel

    if adapter.config.layer_replication:
        what = "repeats layers of its base (layer_replication), which share their weights and cannot be merged"
        raise InputError.at(str(adapter.folder / CONFIG), what, "use it as an adapter, without --merge")
    _dequantize(model, adapter)
    try:
        with without_peft_warnings():
            adapted = PeftModel.from_pretrained(model, str(adapter.folder))
            # Load again: from_pretrained does not return the ignored tensors.
            unused = adapted.load_adapter(str(adapter.folder), adapted.active_adapter).unexpected_keys
            check_all_loaded(adapter, unused)
            _untie_adapted(adapted)
            merged: PreTrainedModel = adapted.merge_and_unload(safe_merge=True)
    except InputError:
        raise
    except Exception as error:  # PyTorch and peft raise various errors
        raise mismatch_error(adapter, error) from None
    _check_ties(merged, adapter)
    return merged


def _dequantize(model: PreTrainedModel, adapter: AdapterFolder) -> None:
    """Dequantize a base that is saved quantized: quantized again, it would lose the adapter's updates to rounding."""
    if getattr(model.config, "quantization_config", None) is None:
        return
    try:
        model.dequantize(torch.float32)
    except NotImplementedError as error:
        what = f"its base {adapter.base} is saved with quantized weights: {' '.join(str(error).split())[:200]}"
        fix = f"set the unquantized model as base_model_name_or_path in {adapter.folder / CONFIG}"
        raise InputError.at("--merge", what, fix) from None


def _untie_adapted(model: nn.Module) -> None:
    """Copy tied weights for layers with adapters (a head tied to the embeddings).

    Merging into the tied weights would change both layers. peft then clears `tie_word_embeddings` in the configuration.
    """
    from peft.tuners.lora import LoraLayer

    num_uses = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    for layer in [module for module in model.modules() if isinstance(module, LoraLayer)]:
        base = layer.get_base_layer()
        weight = getattr(base, "weight", None)
        if isinstance(weight, nn.Parameter) and num_uses[id(weight)] > 1:
            base.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)


def _check_ties(merged: PreTrainedModel, adapter: AdapterFolder) -> None:
    """Raise InputError if two weights differ that transformers would tie again when it opens the merged model.

    Embeddings and head may differ, since the configuration then says that they are not tied.
    """
    embedding_layers = (merged.get_input_embeddings(), merged.get_output_embeddings())
    may_differ = {
        f"{name}.weight"
        for name, module in merged.named_modules()
        if any(module is layer for layer in embedding_layers)
    }
    weights = dict(merged.named_parameters(remove_duplicate=False))
    for target, source in merged.all_tied_weights_keys.items():
        pair = [weights[name] for name in (target, source) if name in weights]
        if {target, source} <= may_differ or len(pair) < 2 or torch.equal(*pair):
            continue
        what = f"changes only one of {source} and {target}, which {type(merged).__name__} saves as one"
        raise InputError.at(str(adapter.folder / WEIGHTS), what, "use it as an adapter, without --merge")
