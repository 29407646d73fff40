"""Parameter groups: weight decay and fraction of the learning rate of each parameter."""

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
    shares: dict[nn.Parameter, float],
    peak: float,
    weight_decay: float,
    decaying: set[torch.Tensor],
) -> list[dict[str, Any]]:
    """Return parameter groups for torch.optim, with `lr` = `peak` times the parameter's fraction in `shares`.

    Weight decay applies to the parameters in `decaying`: the `weight_matrices` of the model.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in parameters:
        key = (peak * shares[parameter], weight_decay if parameter in decaying else 0.0)
        groups.setdefault(key, []).append(parameter)
    return [{"params": members, "lr": rate, "weight_decay": decay} for (rate, decay), members in groups.items()]


def weight_matrices(model: PreTrainedModel) -> set[torch.Tensor]:
    """Return parameters of two or more dimensions, except biases of stacked experts and Mamba's states (A_log)."""
    named_parameters = model.named_parameters()
    return {
        parameter
        for name, parameter in named_parameters
        if parameter.ndim >= 2 and not name.endswith(("bias", "A_log"))
    }


def layer_shares(model: PreTrainedModel, decay: float) -> dict[nn.Parameter, float]:
    """Return each parameter's fraction of the learning rate (Clark et al. 2020, ELECTRA; Bao et al. 2022, BEiT).

    Layer i of L gets decay^(L-1-i), embeddings decay^L, the head and the final norm 1. In an encoder-decoder each stack
    is counted separately, so the last layers of both get 1, and embeddings follow the taller stack. Embeddings are
    modules that the model names so, with their norms and projections, and an output head that is tied to them.
    Raise InputError if the model does not declare its layers.
    """
    shares = dict.fromkeys(model.parameters(), 1.0)
    if decay == 1.0:
        return shares
    stacks = list(_stacks(model))
    if not stacks:
        raise InputError.at("train.layer_decay", "this model does not declare its layers", "remove it")
    tallest = max(len(stack) for stack in stacks)
    for module in _embeddings(model):
        shares |= dict.fromkeys(module.parameters(), decay**tallest)
    for stack in stacks:
        for number, layer in enumerate(stack):
            shares |= dict.fromkeys(layer.parameters(), decay ** (len(stack) - 1 - number))
    return shares


def _stacks(model: PreTrainedModel) -> Iterator[list[nn.Module]]:
    """Return the lists of repeated layers, in a pipeline stage with placeholders for the layers of others."""
    repeated = {id(layer) for layer in repeated_layers(model)}
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and any(id(layer) in repeated for layer in module):
            yield list(module)


def _embeddings(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield embeddings, by kind or by name. Their order does not tell: OPT creates its final norm before them."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        attribute = name.rpartition(".")[2]
        if module is not head and (isinstance(module, nn.Embedding) or "embed" in attribute):
            yield module
