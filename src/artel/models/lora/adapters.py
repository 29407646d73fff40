"""Low-rank adapters in a model (LoRA, Hu et al. 2021), and frozen parameters.

peft injects adapters into the model's own linear layers, and the model stays a PreTrainedModel: the loop, DDP,
torch.compile and generation see only trainable and frozen parameters.
"""

from __future__ import annotations

import copy
import fnmatch
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from artel.config import LoraConfig
from artel.errors import InputError, Problem, missing_extra
from artel.models.experts import compute_experts_in_autocast, expert_matrices

NAME = "default"
"""peft's name for a model's default adapter."""
_MAX_NAMES = 20
"""The most names in a message."""


def require_peft() -> None:
    """Raise InputError if the extra `lora` is not installed."""
    try:
        import peft  # noqa: F401
    except ImportError:
        raise missing_extra("peft", "lora", "model.lora") from None


def is_adapted(model: nn.Module) -> bool:
    """True if the model has adapters."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers of the model's body, in order, without the output head."""
    body_ids = {id(module) for module in model.base_model.modules()}
    output = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) in body_ids and module is not output
    ]


def adapter_problems(model: PreTrainedModel, config: LoraConfig) -> list[Problem]:
    """Return a problem for each name in `model.lora` that this model lacks. The model may be on the meta device."""
    problems = []
    layers = linear_layers(model)
    experts = expert_matrices(model)
    known_names = ", ".join(_last_components([*layers, *experts]))
    output = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), None)
    for name in config.target:
        if name == "auto" or any(_is_named(layer, name) for layer in layers) or _is_named_like(experts, name):
            continue
        what, fix = f"no linear layer is named {name}", f"the model has: {known_names}; or write auto"
        if output is not None and _is_named(output, name):
            what = f"{name} is the output layer, which cannot have an adapter"
            in_full = f"write model.lora.save: [{name}] to train it in full, and remove it here"
            fix = f"{in_full}; the others are: {known_names}"
        problems.append(Problem("model.lora.target", what, fix))
    if "auto" in config.target:
        problems += [
            Problem("model.lora.target", f"{name} is already part of auto", "remove one of the two")
            for name in config.target
            if name != "auto" and any(_is_named(layer, name) for layer in layers)
        ]
    if any(_is_named_like(experts, name) for name in config.target):
        problems += _expert_problems(config)
    modules = [name for name, module in model.named_modules() if name and next(module.parameters(), None) is not None]
    problems += [
        Problem("model.lora.save", f"no module is named {name}", f"the model has: {', '.join(_name_patterns(modules))}")
        for name in config.save
        if not any(_is_named(module, name) for module in modules)
    ]
    return problems


def _expert_problems(config: LoraConfig) -> list[Problem]:
    """Return a problem for each setting that adapters of experts in one tensor do not support."""
    problems, fix = [], "or remove the experts from target"
    if config.dropout:
        problems.append(Problem("model.lora.dropout", "adapters of experts do not support dropout", f"write 0, {fix}"))
    if config.dora:
        problems.append(Problem("model.lora.dora", "adapters of experts do not support DoRA", f"write false, {fix}"))
    return problems


def add_adapters(
    model: PreTrainedModel, config: LoraConfig, *, base: str, generates: bool, new_modules: list[str], seed: int
) -> str:
    """Add adapters to a model and freeze the rest. Return a description.

    `base` is the folder or hub id of the model. `new_modules` have weights that are not in its files: they are trained
    in full and saved with the adapter, as are heads that predict labels or scores. `seed` fixes the adapters' first
    weights (for a model on the meta device call `draw_first_weights`). Raise InputError for wrong names or settings.
    """
    require_peft()
    from peft import LoraConfig as PeftLora

    problems = adapter_problems(model, config)
    if problems:
        raise InputError(problems)
    modules = dict(model.named_modules(remove_duplicate=False))
    full_modules = [name for name in modules if any(_is_named(name, ending) for ending in config.save)]
    full_modules = list(dict.fromkeys([*full_modules, *new_modules, *_find_head_modules(model)]))
    layers = linear_layers(model)
    matrices = [
        matrix for matrix in expert_matrices(model) if any(_is_named_like([matrix], name) for name in config.target)
    ]
    if "auto" not in config.target:
        layers = [layer for layer in layers if any(_is_named(layer, name) for name in config.target)]
    layers = [
        layer for layer in layers if not any(layer == name or layer.startswith(f"{name}.") for name in full_modules)
    ]
    peft_config = PeftLora(
        r=config.rank,
        lora_alpha=int(config.alpha) if config.alpha.is_integer() else config.alpha,  # vLLM needs a whole number
        lora_dropout=config.dropout,
        target_modules=_shortest_names(layers, list(modules)),
        # peft matches the ends of names: what follows the number of the layer (mlp.experts.down_proj).
        target_parameters=sorted({re.split(r"\.\d+\.", matrix)[-1] for matrix in matrices}) or None,
        use_rslora=config.rslora,
        use_dora=config.dora,
        modules_to_save=full_modules or None,
        fan_in_fan_out=any(isinstance(modules[layer], Conv1D) for layer in layers),
        task_type=("SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM") if generates else None,
    )
    torch.manual_seed(seed)  # independent of random numbers drawn while the model was loaded
    inject(model, peft_config)
    _draw_in_float32(model)
    peft_config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    suffix = f", {', '.join(full_modules)} in full" if full_modules else ""
    if matrices:
        suffix = f" and for each expert of {len(matrices)} tensors{suffix}"
    return f"adapters of rank {config.rank} on {len(layers)} matrices (linear layers){suffix}"


def _find_head_modules(model: PreTrainedModel) -> list[str]:
    """Return the head modules of a model that predicts no tokens: its classifier or score."""
    if model.get_output_embeddings() is not None:
        return []
    body = model.base_model
    children = () if body is model else model.named_children()
    return [name for name, child in children if child is not body and next(child.parameters(), None) is not None]


def inject(model: PreTrainedModel, config: Any, name: str = NAME) -> None:
    """Inject an adapter. `add_adapter` of transformers 5.24 needs a peft that is not published yet (0.22)."""
    from peft import inject_adapter_in_model

    from artel.models.lora.layers import patch_expert_adapters, patch_lora_linear

    with without_peft_warnings():
        inject_adapter_in_model(config, model, name)
    if getattr(config, "target_parameters", None):
        patch_expert_adapters(model)
        compute_experts_in_autocast(model)
    patch_lora_linear(model)
    model._hf_peft_config_loaded = True
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft gives adapters the compute dtype of a quantized layer
            parameter.data = parameter.data.float()


def _draw_in_float32(model: PreTrainedModel) -> None:
    """Draw the adapters' first weights again: peft has rounded them to the dtype of the base layer."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer) and not _is_on_meta(module):
            module.reset_lora_parameters(NAME, init_lora_weights=True)
            for variant in module.lora_variant.values():  # DoRA: the norms of the base weights
                variant.init(module, adapter_name=NAME)


def use_adapter(model: PreTrainedModel, name: str | None) -> None:
    """Activate one of the model's adapters, or none."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            has_adapter = name in module.lora_A or name in module.lora_embedding_A
        elif isinstance(module, ModulesToSaveWrapper):
            has_adapter = name in module.modules_to_save
        else:
            continue
        module.enable_adapters(has_adapter)
        if has_adapter:
            module.set_adapter(name)


def remove_adapter(model: PreTrainedModel, name: str) -> None:
    """Remove an adapter from the model. (`delete_adapter` of transformers 5.24 needs peft 0.22, see `inject`.)"""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    with without_peft_warnings():
        for module in model.modules():
            if isinstance(module, BaseTunerLayer):
                module.delete_adapter(name)
            elif isinstance(module, ModulesToSaveWrapper):
                module.delete_adapter(name, new_active_adapters=[])
    getattr(model, "peft_config", {}).pop(name, None)


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Use the model without its adapter inside the block."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def draw_first_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Draw the first weights of adapters on the meta device: by name, float32, on the CPU.

    Call it right after `add_adapters` to get the same numbers as for a model in memory. peft draws every matrix before
    it moves it to the layer's device, so the random generator is in the same state.
    """
    from peft.tuners.lora import LoraLayer

    weights: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer) or not _is_on_meta(module):
            continue
        meta_matrices = {attribute: getattr(module, attribute) for attribute in ("lora_A", "lora_B")}
        for attribute, matrices in meta_matrices.items():
            setattr(module, attribute, copy.deepcopy(matrices).to_empty(device="cpu"))
        module.reset_lora_parameters(NAME, init_lora_weights=True)
        for attribute, matrices in meta_matrices.items():
            drawn = getattr(module, attribute)[NAME].weight.detach()
            weights[f"{name}.{attribute}.{NAME}.weight"] = drawn
            setattr(module, attribute, matrices)
    return weights


def _is_on_meta(module: Any) -> bool:
    return any(matrix.weight.is_meta for matrix in module.lora_A.values())


def name_in_base(name: str) -> str:
    """Return the name that a tensor had before adapters were added."""
    parts = name.replace(f".modules_to_save.{NAME}.", ".").split(".")
    return ".".join(part for part in parts if part not in ("base_layer", "original_module"))


@contextmanager
def without_peft_warnings() -> Iterator[None]:
    """Silence peft's warnings about cases it handles correctly: transposed layers (GPT-2), embeddings to be untied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Freeze matching parameters. Raise InputError if a pattern matches none, or no trainable parameter is left."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    known_names = f"the model has: {', '.join(_name_patterns(names))}"
    unmatched = [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(name, pattern) for name in names)]
    if unmatched:
        raise InputError(
            [Problem("model.freeze", f"no parameter matches {pattern}", known_names) for pattern in unmatched]
        )
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad = False
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError.at("model.freeze", "no parameter is left to train", f"remove some patterns; {known_names}")


def _is_named(full_name: str, name: str) -> bool:
    """True if `name` is the full name or, by peft's rule, its end after a dot."""
    return full_name == name or full_name.endswith(f".{name}")


def _is_named_like(matrices: list[str], name: str) -> bool:
    """True if `name` is one of these expert tensors (down_proj), or the module that contains one (experts)."""
    return any(_is_named(matrix, name) or _is_named(matrix.rpartition(".")[0], name) for matrix in matrices)


def _last_components(names: list[str]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _name_patterns(names: list[str]) -> list[str]:
    """Return unique names with `*` for layer numbers, at most `_MAX_NAMES`."""
    patterns = list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))
    return patterns if len(patterns) <= _MAX_NAMES else [*patterns[:_MAX_NAMES], f"… ({len(patterns)} in all)"]


def _shortest_names(layers: list[str], modules: list[str]) -> list[str]:
    """Return the last components of the layers' names, or the full names if those would match other modules too."""
    endings = _last_components(layers)
    matched = [name for name in modules if any(_is_named(name, ending) for ending in endings)]
    return sorted(endings) if sorted(matched) == sorted(layers) else sorted(layers)
