"""Initial weights of a model, module by module. They depend only on the seed and the module's name.

Therefore they are the same under every parallel strategy. Each process initializes the modules of which it holds a
shard, one at a time, in full and on the CPU, and keeps its shard. The rules are those of the architecture:
`_init_weights` of its class, called as in transformers for the module and then for all modules around it, which may
overwrite their children (GPT-2's attention its last projection, ModernBERT's layers all of theirs). Meanwhile all other
tensors are on the meta device, where writing takes no time, no memory and no random numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch import nn
from transformers import PreTrainedModel


def initial_values(
    reference: PreTrainedModel, name: str, seed: int, *, only_unsaved: bool = False
) -> dict[str, torch.Tensor]:
    """Return the initial values of a module's direct parameters and buffers, by their local names, on the CPU.

    `reference`: the full model on the meta device, unchanged afterwards. A parameter tied to another module's belongs
    to that module and is left out. `only_unsaved`: only buffers that are never saved (positions, frequencies), which
    need no random numbers.
    """
    path: list[Any] = [reference]
    for child in name.split(".") if name else ():
        path.append(getattr(path[-1], child))
    rules = _find_rules(path)
    module = path[-1]
    tied = reference.all_tied_weights_keys
    on_meta = {local for local in module._parameters if (f"{name}.{local}" if name else local) in tied}
    if only_unsaved:
        on_meta = {*module._parameters, *module._buffers} - module._non_persistent_buffers_set
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _allocate_on_cpu(module, on_meta):
        _seed_for(seed, name)
        _apply_rules(rules, module)
        if _unset_names(module, on_meta) and hasattr(module, "reset_parameters"):
            _seed_for(seed, name)
            module.reset_parameters()  # PyTorch's default if the architecture has no rule
            _apply_rules(rules, module)
        if unset := _unset_names(module, on_meta):
            built = _construct(reference, seed).get_submodule(name)
            for key in unset:
                getattr(module, key).copy_(getattr(built, key))
            _seed_for(seed, name)
            _apply_rules(rules, module)
        tensors = {**module._parameters, **module._buffers}
        return {key: value.detach() for key, value in tensors.items() if value is not None and key not in on_meta}


def initialize_again(model: nn.Module, reference: PreTrainedModel, first_rows: dict[str, int], seed: int) -> None:
    """Reset parameters and buffers of a full model to their initial values, each from its row in `first_rows` on.

    `reference`: the same model on the meta device, with the names used in `first_rows`.
    """
    names = canonical_names(reference)
    rows = {names[name]: row for name, row in first_rows.items()}
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for module in dict.fromkeys(name.rpartition(".")[0] for name in rows):
        for local_name, value in initial_values(reference, module, seed).items():
            name = f"{module}.{local_name}" if module else local_name
            if name in rows and tensors[name].shape == value.shape:  # 4-bit weights have another shape
                tensors[name].data[rows[name] :] = value[rows[name] :]


def canonical_names(reference: PreTrainedModel) -> dict[str, str]:
    """Map each name of a parameter or buffer to the name under which it is initialized. Tied parameters share one."""
    names = {name: name for name, _ in reference.named_buffers(remove_duplicate=False)}
    groups: dict[int, list[str]] = {}
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    for group in groups.values():
        source = next((name for name in group if name not in reference.all_tied_weights_keys), group[0])
        names |= dict.fromkeys(group, source)
    return names


def _find_rules(path: list[Any]) -> list[tuple[PreTrainedModel, nn.Module]]:
    """Return (model, module) pairs from the inside out. `model`, the innermost around the module, has its rule."""
    rules, owner = [], path[0]
    for module in path:
        owner = module if isinstance(module, PreTrainedModel) else owner
        rules.append((owner, module))
    return rules[::-1]


def _apply_rules(rules: list[tuple[PreTrainedModel, nn.Module]], module: nn.Module) -> None:
    for owner, child in rules:
        owner._init_weights(child)


def _seed_for(seed: int, name: str) -> None:
    torch.default_generator.manual_seed(xxhash.xxh3_64_intdigest(f"weights:{seed}:{name}".encode()) >> 1)


@contextmanager
def _allocate_on_cpu(module: nn.Module, on_meta: set[str]) -> Iterator[None]:
    """Replace the module's direct tensors, except those in `on_meta`, by CPU tensors filled with NaN."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    try:
        for name, parameter in parameters.items():
            if parameter is not None and name not in on_meta:
                module._parameters[name] = nn.Parameter(_clear_values(parameter), requires_grad=False)
        for name, buffer in buffers.items():
            if buffer is not None and name not in on_meta:
                module._buffers[name] = _clear_values(buffer)
        yield
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)


def _clear_values(template: torch.Tensor) -> torch.Tensor:
    fill = float("nan") if template.is_floating_point() else 0
    return torch.full(template.shape, fill, dtype=template.dtype, device="cpu")


def _unset_names(module: nn.Module, on_meta: set[str]) -> list[str]:
    tensors = {**module._parameters, **module._buffers}
    return [
        name
        for name, value in tensors.items()
        if value is not None and name not in on_meta and value.is_floating_point() and value.isnan().any()
    ]


def _construct(reference: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Build the model with constructors only, for parameters without a rule (a zero bias in Longformer's head).

    Weights of PyTorch's layers stay on the meta device, where drawing costs nothing. All other weights are
    small, except in architectures whose custom layers draw in their constructors (OpenAI's first GPT).
    """
    if reference not in _CONSTRUCTED_MODELS:
        with torch.random.fork_rng(devices=[]), _only_constructors():
            torch.default_generator.manual_seed(seed)
            _CONSTRUCTED_MODELS[reference] = type(reference)._from_config(copy.deepcopy(reference.config))
    return _CONSTRUCTED_MODELS[reference]


@contextmanager
def _only_constructors() -> Iterator[None]:
    """Skip all initialization rules inside the block, and construct PyTorch's layers on the meta device."""
    register, init_weights = nn.Module.register_parameter, PreTrainedModel.init_weights

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and hasattr(module, "reset_parameters"):
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    PreTrainedModel.init_weights = lambda self: None
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        PreTrainedModel.init_weights = init_weights


_CONSTRUCTED_MODELS: WeakKeyDictionary[PreTrainedModel, PreTrainedModel] = WeakKeyDictionary()
