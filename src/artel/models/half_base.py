"""The weights beneath adapters, held in the half precision that the model is saved in.

A frozen matrix needs no float32 copy: nothing is added to it. Layers compute what they compute over float32 copies of
the same numbers. Under autocast these would be rounded back to bf16 at each product; without it a matrix becomes
float32 while it is multiplied, forward and backward, and is then let go. Rows of an embedding become float32 as they
are looked up, so hidden states are float32. Biases, norms and whatever else is no matrix stay float32.

peft, axolotl, LLaMA-Factory and ms-swift hold the base in the dtype of the checkpoint as well, and adapters in float32.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from artel.models.device import autocast_is_on
from artel.models.experts import experts_of


def hold_in_half(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Hold the matrices of `model` (its linear layers, experts and embeddings) in `dtype`. It may be on meta."""
    owners: dict[nn.Parameter, list[bool]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(_half_class(module) is not None)
    for module in experts_of(model).values():
        owners |= {parameter: [True] for parameter in module.parameters(recurse=False) if parameter.ndim == 3}
    matrices = {parameter for parameter, can_be_half in owners.items() if all(can_be_half)}
    for parameter in matrices:
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        kind = _half_class(module)
        if kind is not None and module.weight in matrices:
            module.__class__ = kind


def hidden_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of a model's hidden states outside autocast: that of its weights, and float32 over a half base."""
    return torch.float32 if any(isinstance(module, _Half) for module in model.modules()) else model.dtype


def linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear, which also takes a frozen weight of another dtype than `hidden`. The result is of hidden's dtype."""
    if hidden.dtype == weight.dtype or autocast_is_on(hidden.device.type):
        return F.linear(hidden, weight, bias)
    product: torch.Tensor = _Linear.apply(hidden, weight, bias)
    return product


class _Linear(torch.autograd.Function):
    """Keeps the weight as it is held for the backward pass, where F.linear would keep its copy in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grad_output @ weight.to(grad_output.dtype), None, None


class _Half(nn.Module):
    """A layer whose matrix may be held in half precision, and whose output is then as if it were not."""


class HalfLinear(_Half, nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


class HalfConv1D(_Half, Conv1D):
    weight: torch.Tensor
    bias: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.weight.dtype or autocast_is_on(x.device.type):
            result: torch.Tensor = super().forward(x)
            return result
        return linear(x, self.weight.T, self.bias)


class HalfEmbedding(_Half, nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).float()


def _half_class(module: nn.Module) -> type[nn.Module] | None:
    """The class for such a module whose matrix is held in half precision; None where it cannot be."""
    kind = type(module)
    if kind not in _CLASSES and isinstance(module, nn.Embedding):
        takes_ids_alone = len(inspect.signature(kind.forward).parameters) == 2
        _CLASSES[kind] = _embedding_of(kind) if takes_ids_alone else None
    return _CLASSES.get(kind)


_CLASSES: dict[type[nn.Module], type[nn.Module] | None] = {
    nn.Linear: HalfLinear,
    Conv1D: HalfConv1D,
    nn.Embedding: HalfEmbedding,
}


def _embedding_of(kind: type[nn.Module]) -> type[nn.Module]:
    """The class for embeddings that do more than look up (Gemma's scale them, in the dtype of their weight).

    They get the rows that are looked up as their whole table, in float32.
    """

    def forward(self: Any, input_ids: torch.Tensor) -> torch.Tensor:
        table, padding = self._parameters.pop("weight"), self.padding_idx
        try:
            self.weight = F.embedding(input_ids, table).float().flatten(0, -2)
            self.padding_idx = None
            rows = torch.arange(input_ids.numel(), device=input_ids.device).view(input_ids.shape)
            looked_up: torch.Tensor = kind.forward(self, rows)
            return looked_up
        finally:
            vars(self).pop("weight", None)
            self._parameters["weight"], self.padding_idx = table, padding

    return type(f"Half{kind.__name__}", (_Half, kind), {"forward": forward})
