"""Parameter groups: the weight decay of each parameter, and its learning rate as a fraction of the peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from artel.errors import InputError
from artel.models.compile import repeated_layers


def parameter_groups(
    parameters: list[nn.Parameter],
    fractions: dict[nn.Parameter, float],
    peak: float,
    weight_decay: float,
    decaying: set[torch.Tensor],
) -> list[dict[str, Any]]:
    """Return parameter groups for torch.optim, with `lr` = `peak` times the entry in `fractions`.

    Weight decay applies to the parameters in `decaying`: the `weight_matrices` of the model.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in parameters:
        key = (peak * fractions[parameter], weight_decay if parameter in decaying else 0.0)
        groups.setdefault(key, []).append(parameter)
    return [{"params": members, "lr": rate, "weight_decay": decay} for (rate, decay), members in groups.items()]


def weight_matrices(model: PreTrainedModel) -> set[torch.Tensor]:
    """Return parameters of two or more dimensions, except biases of stacked experts and Mamba's states (A_log)."""
    return {
        parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and not name.endswith(("bias", "A_log"))
    }


def lr_fractions(model: PreTrainedModel, decay: float) -> dict[nn.Parameter, float]:
    """Return each parameter's fraction of the learning rate (Clark et al. 2020, ELECTRA; Bao et al. 2022, BEiT).

    Layer i of L gets decay^(L-1-i), embeddings decay^L, the head and the final norm 1. In an encoder-decoder each stack
    is counted separately: the last layers of both get 1, and embeddings follow the taller stack. Modules with `embed`
    in their name count as embeddings, with their norms and projections. So does an output head that is tied to them.
    Raise InputError if the model does not declare its layers.
    """
    fractions = dict.fromkeys(model.parameters(), 1.0)
    if decay == 1.0:
        return fractions
    stacks = list(_find_stacks(model))
    if not stacks:
        raise InputError.at("train.layer_decay", "this model does not declare its layers", "remove it")
    tallest = max(len(stack) for stack in stacks)
    for module in _find_embeddings(model):
        fractions |= dict.fromkeys(module.parameters(), decay**tallest)
    for stack in stacks:
        for index, layer in enumerate(stack):
            fractions |= dict.fromkeys(layer.parameters(), decay ** (len(stack) - 1 - index))
    return fractions


def _find_stacks(model: PreTrainedModel) -> Iterator[list[nn.Module]]:
    """Yield the lists of repeated layers. A pipeline stage has placeholders for the layers of other stages."""
    repeated = {id(layer) for layer in repeated_layers(model)}
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and any(id(layer) in repeated for layer in module):
            yield list(module)


def _find_embeddings(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield embeddings, by type or by name. Not by order: OPT creates its final norm before them."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        attribute = name.rpartition(".")[2]
        if module is not head and (isinstance(module, nn.Embedding) or "embed" in attribute):
            yield module
