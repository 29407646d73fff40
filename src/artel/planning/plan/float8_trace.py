"""Imitate linear layers that multiply in float8, for a trace without torchao and without a GPU.

The layers are those of `use_float8`, with its dynamic scaling per tensor: input, weight and output's gradient are read
for their maximum, converted, and multiplied. The backward pass gets the input itself and converts it again; compiled
layers recompute the input too. Weights and the optimizer's state stay float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from artel.models.quantization import float8_layers


def multiply_in_float8(model: PreTrainedModel) -> None:
    """Make the layers that train in float8 run its operators. For FakeTensors only: there are no scales."""
    for layer in float8_layers(model):
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]


def _forward(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    flat = inputs.to(torch.bfloat16).reshape(-1, inputs.shape[-1])
    output = _Float8Matmul.apply(flat, layer.weight).view(*inputs.shape[:-1], layer.out_features)
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


class _Float8Matmul(torch.autograd.Function):
    """rows x weight.T, with both in float8."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return _multiply(_convert(rows), _convert(weight).t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, weight = ctx.saved_tensors
        converted = _convert(gradient, torch.float8_e5m2)
        rows_gradient = _multiply(converted, _convert(weight))
        return rows_gradient, _multiply(_transpose(converted), _convert(rows)).to(weight.dtype)


def _convert(tensor: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    half = tensor.to(torch.bfloat16)
    return (half * half.abs().amax()).to(dtype)


def _transpose(matrix: torch.Tensor) -> torch.Tensor:
    """Return the transposed matrix, padded to a multiple of 16 rows."""
    return F.pad(matrix, (0, 0, 0, -matrix.shape[0] % 16)).t() if matrix.shape[0] % 16 else matrix.t()


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    scale = torch.ones((), device=left.device)
    return torch.ops.aten._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16)
