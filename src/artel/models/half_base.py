"""Frozen weights under adapters, kept in the half precision of the checkpoint.

A frozen matrix gets no updates, so it needs no float32 copy. The layers compute the same as with float32 copies: under
autocast these would be rounded back to bf16 for each matmul. Without autocast, a matrix is converted to float32 for
the matmul, forward and backward, and the copy is freed. Embedding rows become float32 when they are looked up, so
hidden states are float32. Biases, norms and all other parameters that are not matrices stay float32.

peft, axolotl, LLaMA-Factory and ms-swift also keep the base in the dtype of the checkpoint, and adapters in float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from artel.models.device import autocast_is_on
from artel.models.experts import find_experts

_ROUNDED_ATTRIBUTE = "_artel_rounded"
"""Attribute of a tensor: its version, and its copy in half precision."""


def hold_in_half(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert the matrices of `model` (linear layers, experts, embeddings) to `dtype`. It may be on the meta device."""
    can_be_half_by_use: dict[nn.Parameter, list[bool]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            can_be_half_by_use.setdefault(parameter, []).append(_find_half_class(module) is not None)
    for module in find_experts(model).values():
        can_be_half_by_use |= {
            parameter: [True] for parameter in module.parameters(recurse=False) if parameter.ndim == 3
        }
    matrices = {parameter for parameter, can_be_half in can_be_half_by_use.items() if all(can_be_half)}
    for parameter in matrices:
        parameter.data = parameter.data.to(dtype)
    for module in model.modules():
        layer_class = _find_half_class(module)
        if layer_class is not None and module.weight in matrices:
            module.__class__ = layer_class


def hidden_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of hidden states outside autocast: that of the weights; float32 with a half-precision base."""
    return torch.float32 if any(isinstance(module, _HalfLayer) for module in model.modules()) else model.dtype


def linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Like F.linear, but a frozen weight may have another dtype than `hidden`. The output has the dtype of `hidden`."""
    if hidden.dtype == weight.dtype or autocast_is_on(hidden.device.type):
        return F.linear(hidden, weight, bias)
    product: torch.Tensor = _Linear.apply(hidden, weight, bias)
    return product


class _Linear(torch.autograd.Function):
    """Saves the weight itself for the backward pass; F.linear would save a float32 copy."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grad_output @ weight.to(grad_output.dtype), None, None


class _HalfLayer(nn.Module):
    """A layer whose matrix may be in half precision without changing its output dtype."""


class HalfLinear(_HalfLayer, nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


class HalfConv1D(_HalfLayer, Conv1D):
    weight: torch.Tensor
    bias: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == self.weight.dtype or autocast_is_on(x.device.type):
            result: torch.Tensor = super().forward(x)
            return result
        return linear(x, self.weight.T, self.bias)


class HalfEmbedding(_HalfLayer, nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).float()


def _find_half_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the half-precision class for a module, or None if there is none."""
    layer_class = type(module)
    if layer_class not in _HALF_CLASSES and isinstance(module, nn.Embedding):
        takes_only_ids = len(inspect.signature(layer_class.forward).parameters) == 2
        _HALF_CLASSES[layer_class] = _make_half_embedding(layer_class) if takes_only_ids else None
    return _HALF_CLASSES.get(layer_class)


_HALF_CLASSES: dict[type[nn.Module], type[nn.Module] | None] = {
    nn.Linear: HalfLinear,
    Conv1D: HalfConv1D,
    nn.Embedding: HalfEmbedding,
}


def _make_half_embedding(layer_class: type[nn.Module]) -> type[nn.Module]:
    """Return the class for an embedding that does more than a lookup (Gemma scales by a factor in the weight's dtype).

    The original forward pass runs on a table of the selected rows, in float32.
    """

    def forward(self: Any, input_ids: torch.Tensor) -> torch.Tensor:
        table, padding = self._parameters.pop("weight"), self.padding_idx
        try:
            self.weight = F.embedding(input_ids, table).float().flatten(0, -2)
            self.padding_idx = None
            rows = torch.arange(input_ids.numel(), device=input_ids.device).view(input_ids.shape)
            looked_up: torch.Tensor = layer_class.forward(self, rows)
            return looked_up
        finally:
            vars(self).pop("weight", None)
            self._parameters["weight"], self.padding_idx = table, padding

    return type(f"Half{layer_class.__name__}", (_HalfLayer, layer_class), {"forward": forward})


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `x` in `dtype`, detached. Layers with the same input (queries, keys, values) share one copy.

    The copy lives as long as `x`.
    """
    if x.dtype == dtype:
        return x.detach()
    if x.is_inference():
        return x.to(dtype)
    version, copy = getattr(x, _ROUNDED_ATTRIBUTE, (None, None))
    if copy is None or version != x._version or copy.dtype != dtype:
        copy = x.detach().to(dtype)
        setattr(x, _ROUNDED_ATTRIBUTE, (x._version, copy))
    return copy


def free_rounded(tensors: Iterable[object]) -> None:
    """Free the copies made by `rounded`, for tensors that stay in memory longer than the copies are needed."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and hasattr(tensor, _ROUNDED_ATTRIBUTE):
            delattr(tensor, _ROUNDED_ATTRIBUTE)
