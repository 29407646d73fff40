"""First weights of a model, module by module: each a function of the seed and the module's own name.

So they are the same however the model is laid out: a process initialises the modules that it holds a part of, each
alone, in full and on the CPU, and keeps its part. The rules are the architecture's own: `_init_weights` of its class,
called as transformers calls it, for the module and then for all that are around it, since those rewrite what is
inside of them (GPT-2's attention its last projection, ModernBERT's layers all of theirs). Meanwhile every other tensor
is on the meta device, where writing takes no time, no memory and no random numbers.
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


def first_values(reference: PreTrainedModel, name: str, seed: int, *, whole: bool = True) -> dict[str, torch.Tensor]:
    """The first values of a module's own parameters and buffers, by their own names, on the CPU.

    `reference` is the whole model on the meta device; it is used and left as it was. Parameters that are tied to
    another module's are not among the values: they are that one's. Without `whole` the values are those of its
    buffers that are not saved (positions, frequencies): no random number is drawn for them.
    """
    path: list[Any] = [reference]
    for part in name.split(".") if name else ():
        path.append(getattr(path[-1], part))
    rules = _rules(path)
    module = path[-1]
    tied = reference.all_tied_weights_keys
    kept = {own for own in module._parameters if (f"{name}.{own}" if name else own) in tied}
    if not whole:
        kept = {*module._parameters, *module._buffers} - module._non_persistent_buffers_set
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _in_memory(module, kept):
        _seed(seed, name)
        _apply(rules, module)
        if _unset_names(module, kept) and hasattr(module, "reset_parameters"):
            _seed(seed, name)
            module.reset_parameters()  # PyTorch's own, which the architecture leaves as they are
            _apply(rules, module)
        if unset := _unset_names(module, kept):
            built = _constructed(reference, seed).get_submodule(name)
            for key in unset:
                getattr(module, key).copy_(getattr(built, key))
            _seed(seed, name)
            _apply(rules, module)
        own = {**module._parameters, **module._buffers}
        return {key: value.detach() for key, value in own.items() if value is not None and key not in kept}


def initialize_again(model: nn.Module, reference: PreTrainedModel, anew: dict[str, int], seed: int) -> None:
    """Give parameters and buffers of a whole model their first values, from a row on: 0 for all of them.

    `anew` has names as `reference` has them, that is the same model on the meta device.
    """
    names = initial_names(reference)
    rows = {names[name]: row for name, row in anew.items()}
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for module in dict.fromkeys(name.rpartition(".")[0] for name in rows):
        for own, value in first_values(reference, module, seed).items():
            name = f"{module}.{own}" if module else own
            if name in rows and tensors[name].shape == value.shape:  # another shape is that of 4-bit weights
                tensors[name].data[rows[name] :] = value[rows[name] :]


def initial_names(reference: PreTrainedModel) -> dict[str, str]:
    """For each name of a parameter or buffer the one under which it is initialised: another where they are tied."""
    names = {name: name for name, _ in reference.named_buffers(remove_duplicate=False)}
    groups: dict[int, list[str]] = {}
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    for group in groups.values():
        source = next((name for name in group if name not in reference.all_tied_weights_keys), group[0])
        names |= dict.fromkeys(group, source)
    return names


def _rules(path: list[Any]) -> list[tuple[PreTrainedModel, nn.Module]]:
    """Whose rule is applied to which module, from the inside out: that of the innermost model around it."""
    rules, owner = [], path[0]
    for module in path:
        owner = module if isinstance(module, PreTrainedModel) else owner
        rules.append((owner, module))
    return rules[::-1]


def _apply(rules: list[tuple[PreTrainedModel, nn.Module]], module: nn.Module) -> None:
    for owner, inside in rules:
        owner._init_weights(inside)


def _seed(seed: int, name: str) -> None:
    torch.default_generator.manual_seed(xxhash.xxh3_64_intdigest(f"weights:{seed}:{name}".encode()) >> 1)


@contextmanager
def _in_memory(module: nn.Module, kept: set[str]) -> Iterator[None]:
    """A module of the meta device with its own tensors on the CPU, all but those `kept`; numbers are NaN."""
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    try:
        for name, parameter in parameters.items():
            if parameter is not None and name not in kept:
                module._parameters[name] = nn.Parameter(_unset(parameter), requires_grad=False)
        for name, buffer in buffers.items():
            if buffer is not None and name not in kept:
                module._buffers[name] = _unset(buffer)
        yield
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)


def _unset(like: torch.Tensor) -> torch.Tensor:
    fill = float("nan") if like.is_floating_point() else 0
    return torch.full(like.shape, fill, dtype=like.dtype, device="cpu")


def _unset_names(module: nn.Module, kept: set[str]) -> list[str]:
    own = {**module._parameters, **module._buffers}
    return [
        name
        for name, value in own.items()
        if value is not None and name not in kept and value.is_floating_point() and value.isnan().any()
    ]


def _constructed(reference: PreTrainedModel, seed: int) -> PreTrainedModel:
    """The model as its constructors leave it, for parameters that no rule names (a bias of zeros in Longformer's head).

    Weights of PyTorch's own layers stay on the meta device, where drawing costs nothing: the rest is small, but for
    layers that are the architecture's own and draw as they are made (OpenAI's first GPT).
    """
    if reference not in _CONSTRUCTED:
        with torch.random.fork_rng(devices=[]), _only_constructors():
            torch.default_generator.manual_seed(seed)
            _CONSTRUCTED[reference] = type(reference)._from_config(copy.deepcopy(reference.config))
    return _CONSTRUCTED[reference]


@contextmanager
def _only_constructors() -> Iterator[None]:
    """Models get what their constructors draw, not what rules draw later; PyTorch's layers are on the meta device."""
    register, init_weights = nn.Module.register_parameter, PreTrainedModel.init_weights

    def lightly(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and hasattr(module, "reset_parameters"):
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = lightly  # type: ignore[method-assign, assignment]
    PreTrainedModel.init_weights = lambda self: None
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        PreTrainedModel.init_weights = init_weights


_CONSTRUCTED: WeakKeyDictionary[PreTrainedModel, PreTrainedModel] = WeakKeyDictionary()
