"""A model's folder: safety checks before reading, and its configuration."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.config.model_name import HUB_FILES, is_in_hub_cache
from artel.errors import InputError
from artel.messages import logger
from artel.storage import check_regular_in
from artel.tokens.tokenizer.loading import check_code_owner, trust_fix


def read_config(name: str, *, runs_code: bool = False) -> tuple[PreTrainedConfig, list[str]]:
    """Return the configuration of a folder or hub id, and notes for the user. Raise InputError if it cannot be loaded.

    A config.json from before 2020 has no model type, so it is inferred from the names of the tensors
    (`roberta.encoder…`). The model's own code runs only with `runs_code`. It is not needed if transformers has the
    model.
    """
    folder = Path(name)
    check_regular_in(folder)
    file = folder / "config.json"
    values = _read_json(file) if folder.is_dir() else _read_hub_config(name)
    _check_origin(values, name, runs_code)
    try:
        if folder.is_dir() and "model_type" not in values:
            model_type = _infer_model_type(folder)
            if model_type is None:
                fix = 'add its type, e.g. "model_type": "roberta"'
                raise InputError.at(str(file), "has no model_type", fix)
            note = f"{file} has no model_type; its tensors are those of {model_type}"
            return CONFIG_MAPPING[model_type].from_dict(values), [note]
        return AutoConfig.from_pretrained(name, trust_remote_code=runs_code), []
    except InputError:
        raise
    except Exception as error:  # the hub, JSON, safetensors and configurations raise various errors
        raise loading_error(name, error) from None


def is_quantized(config: PreTrainedConfig) -> bool:
    """True for a model saved with quantized weights: its tensors differ from its parameters in name, shape or scale."""
    return getattr(config, "quantization_config", None) is not None


_WRONG_TYPE = re.compile(r"Field '(\w+)' expected (.+?), got \w+ \(value: (.*?)\)")
"""A configuration's message for a value of the wrong type."""


def format_error(error: Exception) -> str:
    """Format a library's error in one line of at most 300 characters."""
    message = " ".join(str(error).split()) or type(error).__name__
    match = _WRONG_TYPE.search(message)
    return f"{match[1]} is {match[3][:100]}, which is not {match[2]}" if match else message[:300]


def loading_error(name: str, error: Exception) -> InputError:
    """Return the error for a model that transformers could not load, with a fix."""
    reason = format_error(error)
    offline_note = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
    hub_fix = f"a hub id needs network access{offline_note}; or use a folder"
    fix = "check its config.json and weights" if Path(name).is_dir() else hub_fix
    what = f"{name} cannot be loaded: {reason}"
    if not Path(name).exists():
        what = f"there is no folder {name}, and as a hub model it cannot be loaded: {reason}"
    return InputError.at("model.from", what, fix)


def check_on_hub(name: str, where: str) -> None:
    """Raise InputError if neither the hub's cache nor the hub has the model or tokenizer `name`.

    Sends one HEAD request. If the hub does not answer, log a warning.
    """
    if is_in_hub_cache(name, HUB_FILES):
        return
    what = f"there is no folder {name}, and "
    if constants.HF_HUB_OFFLINE:
        fix = "use a folder; a hub id needs network access: unset HF_HUB_OFFLINE, or download it first (hf download)"
        raise InputError.at(where, what + "the hub's cache does not have it (HF_HUB_OFFLINE is set)", fix)
    try:
        get_hf_file_metadata(hf_hub_url(name, HUB_FILES[0]), timeout=5)
    except GatedRepoError:
        fix = f"accept them at {constants.ENDPOINT}/{name}, and log in: hf auth login"
        raise InputError.at(where, f"{name} on the hub requires accepting its terms", fix) from None
    except RepositoryNotFoundError:
        fix = "check its spelling; for a private model log in: hf auth login"
        raise InputError.at(where, what + "the hub has no visible model of that name", fix) from None
    except EntryNotFoundError:  # a tokenizer without a model
        pass
    except Exception as error:  # the network and the hub raise various errors
        message = f"{constants.ENDPOINT} does not answer ({format_error(error)}): whether it has {name} is not known"
        logger.warning("%s: %s", where, message)


def check_folder(folder: Path) -> None:
    """Raise InputError for a folder without a model, or with weights in a pickle that contains code."""
    try:
        names = {file.name for file in folder.iterdir()}
    except OSError as error:
        raise InputError.at(str(folder), f"cannot be read: {error.strerror}", "check its permissions") from None
    where = "model.from"
    if is_sharded_checkpoint(folder):
        fix = f"export a model first: artel export {folder} FOLDER; then model.from: FOLDER"
        raise InputError.at(where, f"{folder} has weights only as DeepSpeed shards", fix)
    if "config.json" not in names and "adapter_config.json" in names:
        fix = f"merge it into its base model first: artel export {folder} FOLDER --merge; then model.from: FOLDER"
        raise InputError.at(where, f"{folder} is an adapter, not a full model", fix)
    if "config.json" not in names:
        raise InputError.at(where, f"{folder} has no config.json", "use a folder written by save_pretrained")
    for index in sorted(folder.glob("*.index.json")):
        _check_inside(index, _read_json(index).get("weight_map"))
    if any(name.endswith(".safetensors") for name in names):
        return
    binaries = _pickle_files(folder)
    if not binaries:
        raise InputError.at(
            where,
            f"{folder} has no weights",
            "it needs model.safetensors or pytorch_model.bin; to train from scratch, set model.config",
        )
    for file in binaries:
        try:
            _load_on_meta(file)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise InputError.at(
                str(file),
                f"is not a file of tensors only: {reason}",
                "no code in it was run; if you trust it, convert it to safetensors",
            ) from None


def is_sharded_checkpoint(folder: Path) -> bool:
    """True if a folder has no weights except a sharded checkpoint of DeepSpeed, with files of each process."""
    is_deepspeed = (folder / "latest").is_file() or any(folder.glob("*_model_states.pt"))
    return is_deepspeed and not any(folder.glob("*.safetensors")) and not _pickle_files(folder)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError.at(str(file), f"cannot be read: {error}", "it must be JSON") from None
    if not isinstance(values, dict):
        raise InputError.at(str(file), "is not a JSON object", "use a folder written by save_pretrained")
    return values


def _read_hub_config(name: str) -> dict[str, Any]:
    try:
        return PreTrainedConfig.get_config_dict(name)[0]
    except Exception as error:  # the hub raises various errors
        raise loading_error(name, error) from None


def _check_origin(values: dict[str, Any], name: str, runs_code: bool) -> None:
    """Raise InputError if a model needs code that may not run, or names weights outside its folder."""
    weights = values.get("transformers_weights")
    if weights is not None and Path(str(weights)).name != weights:
        what = f"has weights in {str(weights)[:200]}, which is not a file next to config.json"
        raise InputError.at("model.from", f"{name} {what}", "remove transformers_weights from it")
    classes = values.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(entry, str) for entry in classes)):
        what = f"its config.json says architectures: {str(classes)[:100]}, which is not a list of names"
        raise InputError.at("model.from", f"{name}: {what}", "remove it, or name the class that wrote it")
    _check_quantization(values.get("quantization_config"), name)
    code = values.get("auto_map")
    if runs_code:
        check_code_owner(values, name)
    elif code and values.get("model_type") not in CONFIG_MAPPING:
        what = f"{name} needs its own code, which artel does not run without permission"
        raise InputError.at("model.from", what, trust_fix(name))


def _check_quantization(quantization: Any, name: str) -> None:
    """Raise InputError for a quantization that transformers lacks. It would load the weights as if unquantized."""
    if quantization is None:
        return
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # slow to import

    method = str(quantization.get("quant_method", "bitsandbytes") if isinstance(quantization, dict) else quantization)
    if method != "bitsandbytes" and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        what = f"{name}: it is quantized by {method[:100]!r}, which transformers does not support"
        raise InputError.at("model.from", what, "remove quantization_config if its weights are not quantized")


def _check_inside(index: Path, weights: Any) -> None:
    """Raise InputError unless all files in an index of weights are in its folder."""
    files: Iterable[Any] = set(map(str, weights.values())) if isinstance(weights, dict) else [None]
    for file in files:
        if file is None or Path(file).name != file or not (index.parent / file).is_file():
            what = "lists no weight files" if file is None else f"names {file[:200]}, which is not a file next to it"
            raise InputError.at(str(index), what, "use the folder as it was saved, with all of its files")


def _pickle_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("pytorch_model*.bin"))


def _load_on_meta(file: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a .bin file on the meta device. No code in it runs."""
    return torch.load(file, map_location="meta", weights_only=True, mmap=False)


def _infer_model_type(folder: Path) -> str | None:
    """Infer the model type from the first part of the tensors' names: roberta for `roberta.embeddings.…`."""
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names |= {name.split(".")[0] for name in tensors.keys()}  # noqa: SIM118  # not a mapping
    if not names:
        names = {name.split(".")[0] for file in _pickle_files(folder) for name in _load_on_meta(file)}
    return next((name for name in sorted(names) if name in CONFIG_MAPPING), None)
