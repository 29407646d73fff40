"""Attention on a CPU in bf16: PyTorch's forward pass, and a backward pass of artel's own, attention.cpp.

PyTorch's backward kernel for CPUs turns and packs each tile anew, and multiplies most of them in small pieces. Of 6
heads of 64, causal, on two cores with AMX, the backward pass took (milliseconds; benchmarks/NOTES.md)

    rows x length    16 x 128   8 x 256   4 x 512   1 x 2,048   1 x 4,096
    PyTorch's              14       9.6        13          27          94
    this one              2.4       3.0       4.5          15          64

The gradients of both are 0.2 to 0.3 % from the exact ones, which is bf16's own rounding.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from artel.models.cpu.build import library, pointer


def takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Whether `cpu_attention` is right and faster for such heads, (rows, heads, length, size), without a mask."""
    return (
        query.device.type == "cpu"
        and _dtype(query) == torch.bfloat16
        and dropout == 0.0
        and (query.shape[0], *query.shape[2:]) == (key.shape[0], *key.shape[2:])
        and key.shape == value.shape
        and query.shape[3] % 2 == 0  # pairs of numbers are multiplied
        and torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
        and works_here()
    )


def works_here() -> bool:
    """Whether this processor multiplies bf16 and the backward pass can be built; warns once where it cannot."""
    return _works_here()


torch.compiler.assume_constant_result(works_here)  # a compiler asks while it traces, and does not look inside


@cache
def _works_here() -> bool:
    built = library("attention")
    return built is not None and bool(built.attention_works())


def cpu_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float | None
) -> torch.Tensor:
    """query (rows, heads, length, size), key and value with as many heads or a part of them -> as query.

    Computed in bf16, as autocast would where that is on.
    """
    dtype = _dtype(query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _attention(query.to(dtype), key.to(dtype), value.to(dtype), causal, scale)[0]


def _dtype(query: torch.Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype


# Operators and no autograd.Function: graphs with such functions are not kept in the compiler's cache, and are traced
# anew in each run. The cache knows an operator by its name alone, so one that gives other numbers needs another.
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is mixed, and the logarithm of each query's sum, float32 (rows, heads, length)."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, _for_all(key, query), _for_all(value, query), 0.0, causal, scale=scale)


_attention = torch.library.custom_op("artel::cpu_attention", _forward, mutates_args=())
_attention.register_fake(_forward)


@torch.library.custom_op("artel::cpu_attention_backward", mutates_args=(), device_types="cpu")
def _slopes(
    slopes: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixed: torch.Tensor,
    log_sums: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value by that of `mixed`."""
    built = library("attention")
    assert built is not None
    rows, heads, length, size = query.shape
    sizes = (ctypes.c_int64 * 5)(rows, heads, heads // key.shape[1], length, size)
    slopes, query, key, value = (
        each if each.stride(-1) == 1 else each.contiguous() for each in (slopes, query, key, value)
    )
    mixed, log_sums = mixed.transpose(1, 2).contiguous(), log_sums.contiguous()
    found = (_like(query), _like(key), _like(value))
    built.attention_backward(
        sizes, ctypes.c_int(causal), ctypes.c_float(scale),
        *(part for each in (query, key, value) for part in (pointer(each), _strides(each))),
        pointer(mixed), pointer(log_sums), pointer(slopes), _strides(slopes), ctypes.c_int(torch.get_num_threads()),
        *map(pointer, found),
    )  # fmt: skip
    return found


@_slopes.register_fake
def _(slopes: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return tuple(_like(each) for each in (query, key, value))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)


def _backward(ctx: Any, slopes: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return *_slopes(slopes, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None


_attention.register_autograd(_backward, setup_context=_remember)


def _for_all(key: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values as many as the heads of `query`, where groups of heads share them."""
    groups = query.shape[1] // key.shape[1]
    return key if groups == 1 else key.repeat_interleave(groups, dim=1)  # which copies, even once


def _like(heads: torch.Tensor) -> torch.Tensor:
    """Room for a gradient of `heads`, laid out as a model needs it next: (rows, length, heads, size)."""
    rows, count, length, size = heads.shape
    return heads.new_empty(rows, length, count, size).transpose(1, 2)


def _strides(heads: torch.Tensor) -> Any:
    return (ctypes.c_int64 * 3)(*heads.stride()[:3])
