"""Low-rank adapters in a model (LoRA, Hu et al. 2021), and frozen parameters.

peft injects adapters into the model's own linear layers, so the model stays a PreTrainedModel: the loop, DDP,
torch.compile and generation see nothing but parameters that are trained and parameters that are not.
"""

from __future__ import annotations

import copy
import fnmatch
import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from artel.config import LoraConfig
from artel.errors import InputError, Problem, missing_extra
from artel.models.experts import compute_experts_in_autocast, expert_matrices
from artel.models.lora.weights import NAME, adapter_state, is_on_meta
from artel.printable import listed

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_BASE_CONFIG = "base_config.json"
PREFIX = "base_model.model."  # peft wraps the model twice, and its tensor names show it
_WRAPPERS = re.compile(r"\.(modules_to_save|original_module|token_adapter|base_layer)\b")
"""Wrapper names that peft adds to the weights of full modules."""
_MAX_NAMES = 20  # in a message
_CHANGED = "artel_base_changed"
_MAX_LEVELS = 4
"""Parent folders of an adapter that are searched for a base model that has moved: RUN, runs, the project, one more."""


def require_peft() -> None:
    """Raise InputError with the remedy where the extra `lora` is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise missing_extra("peft", "lora", "model.lora") from None


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter as peft writes it: a folder with adapter_config.json and adapter_model.safetensors."""

    folder: Path
    config: Any
    """peft's LoraConfig."""
    base: str
    """Its base model: a folder or a hub id. If the folder in adapter_config.json is gone, the one found nearby."""

    @property
    def base_config(self) -> Path | None:
        """The base's configuration as it was trained, where a run changed it (`model.rope`, `model.attention`)."""
        file = self.folder / _BASE_CONFIG
        return file if file.is_file() else None

    @property
    def full_modules(self) -> dict[str, int]:
        """Modules whose weights the adapter holds in full, and the number of their rows (0: unknown).

        Those of `modules_to_save`, and embeddings: peft saves these too if the vocabulary grew before training.
        """
        found = dict.fromkeys(self.config.modules_to_save or (), 0)
        with safe_open(self.folder / WEIGHTS, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                shape = file.get_slice(name).get_shape()
                if name.endswith(".weight") and ".lora_" not in name and len(shape) == 2:
                    found[_WRAPPERS.sub("", name.removeprefix(PREFIX).removesuffix(".weight"))] = shape[0]
        return found


def read_adapter(name: str) -> AdapterFolder | None:
    """The adapter in a folder, or None where there is none. Raises InputError for one that cannot be used."""
    folder = Path(name)
    if not (folder / CONFIG).is_file() or (folder / "config.json").is_file():
        return None
    where = str(folder / CONFIG)
    if not (folder / WEIGHTS).is_file():
        what, fix = f"there is no {WEIGHTS} beside it", "give the folder with all of its files"
        if (folder / "adapter_model.bin").is_file():
            what += ", only adapter_model.bin, a pickle, which could hold code"
            fix = "where you trust it, load it with peft and save it again: save_pretrained writes safetensors"
        raise InputError.at(where, what, fix)
    require_peft()
    from peft import PeftConfig, PeftType

    try:
        config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # JSON, and whatever peft's own checks raise
        raise InputError.at(where, f"cannot be read: {error}", "give a folder written by peft") from None
    if config.peft_type != PeftType.LORA:
        raise InputError.at(where, f"is an adapter of type {config.peft_type}", "artel knows LoRA only")
    base = config.base_model_name_or_path
    if not base or not isinstance(base, str):
        raise InputError.at(where, "names no base model", 'add "base_model_name_or_path": its folder or hub id')
    return AdapterFolder(folder, config, _find_base(base, folder))


def _find_base(base: str, folder: Path) -> str:
    """The base model of the adapter in `folder`: as it is written there, or where it lies after both have moved.

    A path that leads nowhere is looked for beside the adapter and in the folders above it: all of the path first,
    then fewer and fewer of its last parts. Raises InputError if it is not found.
    """
    if Path(base).is_dir():
        return base
    windows, is_path = PureWindowsPath(base), base.startswith(("/", ".", "~"))
    is_windows = bool(windows.drive) or "\\" in base
    written = windows if is_windows else PurePosixPath(base)
    parts = [part for part in written.parts if part not in (written.anchor, ".", "..", "~")]
    above = [folder.resolve(), *folder.resolve().parents][: _MAX_LEVELS + 1]
    lengths = range(len(parts), 0, -1) if is_path or is_windows else [len(parts)]  # a hub id is not shortened
    for length in lengths:
        for place in above:
            found = place.joinpath(*parts[-length:])
            if (found / "config.json").is_file():
                _log_moved(base, str(found))
                return str(found)
    if is_path or is_windows:
        what = f"its base model {base} was not found, and there is no {'/'.join(parts[-2:])} with a model near it"
        fix = 'write the folder of the base model, or its hub id, as "base_model_name_or_path"'
        raise InputError.at(str(folder / CONFIG), what, fix)
    return base


@cache
def _log_moved(base: str, found: str) -> None:
    """Log once that the base model was found in another folder."""
    logging.getLogger("artel").warning("the base model %s was not found; using %s, near its adapter", base, found)


def name_base(folder: Path, base: str) -> None:
    """Write `base` into the configuration of the adapter in `folder` as its base model."""
    file = folder / CONFIG
    config = json.loads(file.read_bytes())
    config["base_model_name_or_path"] = base
    file.unlink()  # it may be a link to that of the run
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def is_adapted(model: nn.Module) -> bool:
    """Whether adapters were put into the model."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers of the model's body in order, without its output head."""
    body = model.base_model
    inside = {id(module) for module in body.modules()}
    output = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) in inside and module is not output
    ]


def adapter_problems(model: PreTrainedModel, config: LoraConfig) -> list[Problem]:
    """Names of layers and modules in `model.lora` that this model lacks. The model may be on the meta device."""
    problems = []
    layers = linear_layers(model)
    experts = expert_matrices(model)
    known = ", ".join(_endings([*layers, *experts]))
    output = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), None)
    for name in config.target:
        if name == "auto" or any(_is_named(layer, name) for layer in layers) or _named(experts, name):
            continue
        what, fix = f"no linear layer is named {name}", f"the model has: {known}; or write auto"
        if output is not None and _is_named(output, name):
            what = f"{name} is the output layer, which gets no adapter"
            fix = f"write model.lora.save: [{name}] to train it in full, and leave it out here; the others are: {known}"
        problems.append(Problem("model.lora.target", what, fix))
    if "auto" in config.target:
        problems += [
            Problem("model.lora.target", f"{name} stands beside auto, which means it too", "leave one of them out")
            for name in config.target
            if name != "auto" and any(_is_named(layer, name) for layer in layers)
        ]
    if any(_named(experts, name) for name in config.target):
        problems += _expert_problems(config)
    modules = [name for name, module in model.named_modules() if name and next(module.parameters(), None) is not None]
    problems += [
        Problem("model.lora.save", f"no module is named {name}", f"the model has: {', '.join(_name_patterns(modules))}")
        for name in config.save
        if not any(_is_named(module, name) for module in modules)
    ]
    return problems


def _expert_problems(config: LoraConfig) -> list[Problem]:
    """What adapters of experts that are held in one tensor cannot do."""
    problems, fix = [], "or leave the experts out of target"
    if config.dropout:
        problems.append(Problem("model.lora.dropout", "adapters of experts have no dropout", f"write 0, {fix}"))
    if config.dora:
        problems.append(Problem("model.lora.dora", "adapters of experts have no magnitude", f"write false, {fix}"))
    return problems


def add_adapters(
    model: PreTrainedModel, config: LoraConfig, *, base: str, generates: bool, new_modules: list[str], seed: int
) -> str:
    """Put adapters into a model and freeze the rest. Returns what was done, in words.

    `base` is where the model came from (a folder or hub id). `new_modules` have weights that are not from there: they
    are trained in full and saved with the adapter, and so are heads that give labels or scores. `seed` fixes the
    adapters' first weights: a model on the meta device gets them from `first_weights`. Raises InputError.
    """
    require_peft()
    from peft import LoraConfig as PeftLora

    problems = adapter_problems(model, config)
    if problems:
        raise InputError(problems)
    modules = dict(model.named_modules(remove_duplicate=False))
    whole = [name for name in modules if any(_is_named(name, ending) for ending in config.save)]
    whole = list(dict.fromkeys([*whole, *new_modules, *_heads(model)]))
    layers = linear_layers(model)
    matrices = [matrix for matrix in expert_matrices(model) if any(_named([matrix], name) for name in config.target)]
    if "auto" not in config.target:
        layers = [layer for layer in layers if any(_is_named(layer, name) for name in config.target)]
    layers = [layer for layer in layers if not any(layer == name or layer.startswith(f"{name}.") for name in whole)]
    peft_config = PeftLora(
        r=config.rank,
        lora_alpha=int(config.alpha) if config.alpha.is_integer() else config.alpha,  # vLLM needs a whole number
        lora_dropout=config.dropout,
        target_modules=_shortest(layers, list(modules)),
        target_parameters=_without_layer_numbers(matrices) or None,
        use_rslora=config.rslora,
        use_dora=config.dora,
        modules_to_save=whole or None,
        fan_in_fan_out=any(isinstance(modules[layer], Conv1D) for layer in layers),
        task_type=_task(model) if generates else None,
    )
    torch.manual_seed(seed)  # independent of what was drawn while the model was loaded
    _inject(model, peft_config)
    _draw_in_float32(model)
    place = Path(base)
    peft_config.base_model_name_or_path = str(place.resolve()) if place.is_dir() else base
    also = f", {', '.join(whole)} in full" if whole else ""
    if matrices:
        also = f" and for each expert of {len(matrices)} tensors{also}"
    return f"adapters of rank {config.rank} on {len(layers)} matrices (linear layers){also}"


def _task(model: PreTrainedModel) -> str:
    """What a model that writes does, by peft's name."""
    return "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"


def _heads(model: PreTrainedModel) -> list[str]:
    """The modules behind the body of a model that predicts no tokens: its classifier, its score."""
    if model.get_output_embeddings() is not None:
        return []
    body = model.base_model
    children = () if body is model else model.named_children()
    return [name for name, child in children if child is not body and next(child.parameters(), None) is not None]


def _inject(model: PreTrainedModel, config: Any, name: str = NAME) -> None:
    """The model's `add_adapter` by peft alone: transformers 5.24 needs a peft that is not published (0.22)."""
    from peft import inject_adapter_in_model

    with peft_warnings_off():
        inject_adapter_in_model(config, model, name)
    if getattr(config, "target_parameters", None):
        from artel.models.lora.experts import compute_chosen_only

        compute_chosen_only(model)
        compute_experts_in_autocast(model)
    from artel.models.lora.linear import use_one_function

    use_one_function(model)
    model._hf_peft_config_loaded = True
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft gives adapters the dtype in which a quantized layer computes
            parameter.data = parameter.data.float()


def _draw_in_float32(model: PreTrainedModel) -> None:
    """Draw the adapters' first weights once more: peft has rounded them to the dtype of the layer beneath."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer) and not is_on_meta(module):
            module.reset_lora_parameters(NAME, init_lora_weights=True)
            for variant in module.lora_variant.values():  # DoRA: the norms of the weights beneath
                variant.init(module, adapter_name=NAME)


def save_adapter(model: PreTrainedModel, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write peft's files: `PeftModel.from_pretrained(base, folder)` opens them.

    `weights` are the model's weights by name, where this process holds shards or a stage only.
    """
    from peft import get_peft_model_state_dict

    if weights is None:
        state = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    else:
        state = adapter_state(weights)
    tensors = {f"{PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = copy.deepcopy(model.peft_config[NAME])
    config.inference_mode = True  # peft's default when it opens an adapter
    config.save_pretrained(str(folder))
    if getattr(model, _CHANGED, False):
        model.config.to_json_file(folder / _BASE_CONFIG)


def note_changed_base(model: PreTrainedModel) -> None:
    """Save the model's configuration with its adapter: it is not its base's."""
    setattr(model, _CHANGED, True)


def load_adapter(model: PreTrainedModel, adapter: AdapterFolder, name: str = NAME) -> None:
    """Put a saved adapter into its base model; several have names. Raises InputError where they do not fit."""
    from peft import set_peft_model_state_dict

    file = adapter.folder / WEIGHTS
    try:
        state = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(file).items()}
        _inject(model, copy.deepcopy(adapter.config), name)
        result = set_peft_model_state_dict(model, state, adapter_name=name)
    except Exception as error:  # safetensors, PyTorch and peft raise their own
        raise unfit(adapter, error) from None
    check_used(adapter, result.unexpected_keys)


def check_used(adapter: AdapterFolder, unexpected: list[str]) -> None:
    """Raise InputError if an adapter has tensors that were not loaded: a classifier's head, or another model's."""
    unknown = [key.removeprefix(PREFIX) for key in unexpected if not _WRAPPERS.search(key)]  # those are copies
    if unknown:
        what = f"has tensors that {adapter.base} has no place for: {listed(unknown)}"
        fix = "base_model_name_or_path must be the model it was trained on"
        if adapter.config.task_type not in (None, "CAUSAL_LM", "SEQ_2_SEQ_LM"):
            fix = f"it was trained for {adapter.config.task_type}: merge it with peft, whose Auto classes know the head"
        raise InputError.at(str(adapter.folder / WEIGHTS), what, fix)


def use_adapter(model: PreTrainedModel, name: str | None) -> None:
    """Compute with that one of the model's adapters, or with none."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            has = name in module.lora_A or name in module.lora_embedding_A
        elif isinstance(module, ModulesToSaveWrapper):
            has = name in module.modules_to_save
        else:
            continue
        module.enable_adapters(has)
        if has:
            module.set_adapter(name)


def unfit(adapter: AdapterFolder, error: Exception) -> InputError:
    """The error for an adapter that its base cannot take."""
    first = " ".join(str(error).split())[:300]
    fix = f"it belongs to {adapter.base}; is that still the same model?"
    return InputError.at(str(adapter.folder / WEIGHTS), f"does not fit its base model: {first}", fix)


@contextmanager
def peft_warnings_off() -> Iterator[None]:
    """peft warns of things it then handles correctly: transposed layers (GPT-2), embeddings that become untied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Freeze the parameters that match. Raises InputError where a pattern matches none, or none is left to train."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    known = f"the model has: {', '.join(_name_patterns(names))}"
    unknown = [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]
    if unknown:
        raise InputError([Problem("model.freeze", f"no parameter matches {pattern}", known) for pattern in unknown])
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad = False
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError.at("model.freeze", "no parameter is left to be trained", f"leave some out; {known}")


def _is_named(full: str, name: str) -> bool:
    """peft's rule: a whole name, or its end after a dot."""
    return full == name or full.endswith(f".{name}")


def _named(matrices: list[str], name: str) -> bool:
    """Whether `name` means one of these tensors of experts, or a module that holds them: down_proj, experts."""
    return any(_is_named(matrix, name) or _is_named(matrix.rpartition(".")[0], name) for matrix in matrices)


def _without_layer_numbers(matrices: list[str]) -> list[str]:
    """What follows the last number in the names of tensors, each once: mlp.experts.down_proj. peft goes by the end."""
    return sorted({re.split(r"\.\d+\.", matrix)[-1] for matrix in matrices})


def _endings(names: list[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _name_patterns(names: list[str]) -> list[str]:
    """Names with `*` for layer numbers, each once, at most `_MAX_NAMES`."""
    patterns = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))
    return patterns if len(patterns) <= _MAX_NAMES else [*patterns[:_MAX_NAMES], f"… ({len(patterns)} in all)"]


def _shortest(layers: list[str], modules: list[str]) -> list[str]:
    """The last parts of the layers' names, which are readable, unless they match other modules; else whole names."""
    endings = _endings(layers)
    matched = [name for name in modules if any(_is_named(name, ending) for ending in endings)]
    return sorted(endings) if sorted(matched) == sorted(layers) else sorted(layers)
