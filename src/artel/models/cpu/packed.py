"""Linear layers in float32 for few rows (the tokens of several answers), with weights packed once (packed.cpp).

PyTorch multiplies float32 with MKL, which packs the weights in each call; with few rows that costs as much as the
matmul. Here they are packed once, in the order in which they are read. Microseconds on one core of an EPYC (Zen 4),
with MKL / oneDNN with packed weights / this kernel:

    outputs x inputs     1 row               16 rows             64 rows
    576 x 576            115 /  72 /  58     214 / 179 / 138      574 /  483 /  420
    1,536 x 576          344 / 325 / 223     644 / 481 / 378    1,580 / 1,376 / 1,185
    576 x 1,536          311 / 343 / 239     611 / 481 / 328    1,441 / 1,222 / 1,110
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from artel.models.cpu.build import load_library, pointer

_PANEL = 32
"""Outputs whose weights are stored together: `kPanel` in packed.cpp."""
_MAX_ROWS = 128
"""Above this number of rows PyTorch multiplies."""
_CAPABILITIES = {"AVX2", "AVX512"}
"""CPU capabilities, by PyTorch's names. On other processors PyTorch uses other kernels."""


def packable_bytes(model: nn.Module) -> int:
    """Return the size of packed copies of the model's weights, which may be on the meta device."""
    return sum(linear.weight.nbytes for linear in _find_linear_layers(model))


def pack(model: nn.Module) -> Callable[[], None]:
    """Make float32 linear layers use packed copies of their weights, without gradients. Return a function to undo it.

    Later changes of the weights have no effect. Does nothing if the C++ cannot be built.
    """
    linears = _find_linear_layers(model) if load_library("packed") is not None else []
    panels = [_pack_panels(linear.weight.detach()) for linear in linears]  # all first, since memory may not suffice
    for linear, weights in zip(linears, panels, strict=True):
        linear.forward = partial(_multiply, linear, weights)

    def undo() -> None:
        for linear in linears:
            del linear.forward

    return undo


def _find_linear_layers(model: nn.Module) -> list[Any]:
    """Return the plain linear layers with float32 weights on a CPU."""
    if torch.backends.cpu.get_cpu_capability() not in _CAPABILITIES:
        return []
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and "forward" not in vars(module)
        and module.weight.dtype == torch.float32
        and module.weight.device.type in ("cpu", "meta")
    ]


def _pack_panels(weight: torch.Tensor) -> torch.Tensor:
    """Rearrange weights (outputs, inputs) to (panels, inputs, outputs per panel), padded with zeros."""
    padding = -len(weight) % _PANEL
    return F.pad(weight, (0, 0, 0, padding)).unflatten(0, (-1, _PANEL)).transpose(1, 2).contiguous()


def _multiply(linear: nn.Linear, panels: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    rows = inputs.numel() // linear.in_features
    if rows > _MAX_ROWS or inputs.dtype != torch.float32:
        return F.linear(inputs, linear.weight, linear.bias)
    functions = load_library("packed")
    assert functions is not None
    inputs = inputs.contiguous()
    outputs = inputs.new_empty(*inputs.shape[:-1], linear.out_features)
    functions.multiply_packed(
        pointer(inputs),
        pointer(panels),
        None if linear.bias is None else pointer(linear.bias),
        *(ctypes.c_int64(size) for size in (rows, linear.in_features, linear.out_features)),
        ctypes.c_int(torch.get_num_threads()),
        pointer(outputs),
    )
    return outputs
