"""Attention of short sequences on a CPU in bf16, faster than by PyTorch's kernels for processors, and as exact.

Those multiply small tiles, and their backward pass is slower in bf16 than in float32. Of 6 heads of 64 in bf16, on two
cores with AVX-512's bf16, forward and backward took (milliseconds, causal; benchmarks/NOTES.md)

    rows x length            16 x 128   8 x 256   4 x 512   2 x 1,024
    products of whole matrices    8.8        13        26          74    compiled
    the backward pass alone so     11        18        39          62    compiled

and with AMX

    PyTorch's                      51        38        50          60
    PyTorch's in float32           22        34        46          61    as it is

So where layers are compiled, attention of up to 512 tokens is written out as products of whole matrices, which the
compiler joins with what lies between them; the shares, in bf16, are kept for the backward pass. Where nothing is
compiled, up to 256 tokens, PyTorch's kernel for the backward pass is called in float32. The gradients of all of them
are 0.2 to 0.6 % from the exact ones, which is bf16's own rounding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

_LONGEST_COMPILED, _LONGEST_EAGER = 512, 256


def takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Whether `short_attention` is right and faster for such heads, (rows, heads, length, size), without a mask."""
    longest = _LONGEST_COMPILED if torch.compiler.is_compiling() else _LONGEST_EAGER
    return (
        query.device.type == "cpu"
        and _dtype(query) == torch.bfloat16
        and dropout == 0.0
        and (query.shape[0], *query.shape[2:]) == (key.shape[0], *key.shape[2:])
        and key.shape == value.shape
        and query.shape[2] <= longest
        and torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
    )


def short_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float | None
) -> torch.Tensor:
    """query (rows, heads, length, size), key and value with as many heads or a part of them -> as query.

    Computed in autocast's precision where that is on.
    """
    dtype = _dtype(query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    chosen = _products if torch.compiler.is_compiling() else _kernels
    return chosen(query.to(dtype), key.to(dtype), value.to(dtype), causal, scale)[0]


def _dtype(query: torch.Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype


def _for_all(key: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values as many as the heads of `query`, where groups of heads share them."""
    return key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _summed(slopes: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The gradient of what `_for_all` was given."""
    return slopes if slopes.shape == key.shape else slopes.unflatten(1, (key.shape[1], -1)).float().sum(2).to(key.dtype)


# Operators and no autograd.Function: graphs with such functions are not kept in the compiler's cache, and are traced
# anew in each run. The cache knows them by name alone, so one that computes other numbers needs another name.


@torch.library.custom_op("artel::short_attention_kernels", mutates_args=())
def _kernels(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """By PyTorch's kernels: what is mixed, and the logarithm of each query's sum, float32 (rows, heads, length)."""
    return _mixed_by_kernels(query, key, value, causal, scale)


@_kernels.register_fake
def _mixed_by_kernels(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, _for_all(key, query), _for_all(value, query), 0.0, causal, scale=scale)


def _of_kernels(ctx: Any, slopes: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    query, key, value, mixed, log_sums = ctx.saved_tensors
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    forward = query, _for_all(key, query), _for_all(value, query), mixed
    wide = [each.float() for each in (slopes, *forward)]
    found = kernel(*wide, log_sums, 0.0, ctx.causal, scale=ctx.scale)
    of_query, of_keys, of_values = (each.to(query.dtype) for each in found)
    return of_query, _summed(of_keys, key), _summed(of_values, value), None, None


@torch.library.custom_op("artel::short_attention_products", mutates_args=())
def _products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """By products, for a compiler: what is mixed, and the shares, in the precision of `query`."""
    return _mixed(query, key, value, causal, scale)


def _mixed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.autocast("cpu", enabled=False):  # the scores are float32
        scores = query.float() @ _for_all(key, query).float().transpose(-1, -2) * scale
        if causal:
            places = torch.arange(query.shape[2], device=query.device)
            scores = torch.where(places[:, None] >= places[None, :], scores, -torch.inf)
        shares = torch.softmax(scores, dim=-1).to(query.dtype)
        return shares @ _for_all(value, query), shares


@_products.register_fake
def _shapes_of_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    length = query.shape[2]
    return query.new_empty(query.shape), query.new_empty(*query.shape[:2], length, length)


def _of_products(ctx: Any, slopes: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Dao et al. 2022, "FlashAttention", algorithm 4, without the tiles."""
    query, key, value, mixed, shares = ctx.saved_tensors
    with torch.autocast("cpu", enabled=False):
        own = (slopes.float() * mixed.float()).sum(-1, keepdim=True)
        of_shares = (slopes @ _for_all(value, query).transpose(-1, -2)).float()
        of_scores = ((of_shares - own) * shares.float() * ctx.scale).to(query.dtype)
        of_query = of_scores @ _for_all(key, query)
        of_keys, of_values = of_scores.transpose(-1, -2) @ query, shares.transpose(-1, -2) @ slopes
        return of_query, _summed(of_keys, key), _summed(of_values, value), None, None


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)


_kernels.register_autograd(_of_kernels, setup_context=_remember)
_products.register_autograd(_of_products, setup_context=_remember)


@cache
def show_to_compiler() -> None:
    """Tell PyTorch's compiler what `_products` does, so that it can join it with what lies around it.

    Called before the first graph is made; what is compiled without it calls the operator, and is as right.
    """
    from torch._inductor.decomposition import register_decomposition

    register_decomposition([torch.ops.artel.short_attention_products.default])(_mixed)
