"""Attention of short sequences on a CPU in bf16: PyTorch's forward, and a backward pass of its own.

PyTorch's backward kernel for CPUs multiplies small tiles, and in bf16 it is slower than in float32: of 6 heads of 64 in
bf16, on two cores with AMX, forward and backward took (milliseconds, causal; benchmarks/NOTES.md)

    rows x length            16 x 128   8 x 256   4 x 512   2 x 1,024
    PyTorch's                      51        38        50          60
    products of whole matrices     15        22        35          63    compiled
    PyTorch's in float32           22        34        46          61    as it is

So up to 512 tokens the backward pass is written out as products of whole matrices (Dao et al. 2022, "FlashAttention",
algorithm 4, without the tiles), which the compiler joins with what lies between them; and where nothing is compiled, up
to 256 tokens, PyTorch's kernel is called in float32. The gradients of all three are 0.2 to 0.6 % from the exact ones,
which is bf16's own rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
    inputs = (query.to(dtype), key.to(dtype), value.to(dtype))
    return _attention(*inputs, causal, scale, torch.compiler.is_compiling())[0]


def _dtype(query: torch.Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype


# An operator and no autograd.Function: graphs with such functions are not kept in the compiler's cache, and are traced
# anew in each run. The cache knows it by its name alone, so a backward pass that gives other numbers needs another.
@torch.library.custom_op("artel::short_attention", mutates_args=())
def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float, products: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is mixed, and the logarithm of each query's sum, float32 (rows, heads, length).

    `products`: the backward pass is written out, for a compiler.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, _for_all(key, query), _for_all(value, query), 0.0, causal, scale=scale)


@_attention.register_fake
def _shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float, products: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, _for_all(key, query), _for_all(value, query), 0.0, causal, scale=scale)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ctx.causal, ctx.scale, ctx.products = inputs
    ctx.save_for_backward(query, key, value, *output)


def _backward(ctx: Any, slopes: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    query, key, value, mixed, log_sums = ctx.saved_tensors
    forward = _Forward(query, _for_all(key, query), _for_all(value, query), mixed, log_sums, ctx.causal, ctx.scale)
    with torch.autocast("cpu", enabled=False):  # the scores are float32
        of_query, of_keys, of_values = (_products if ctx.products else _kernel)(slopes, forward)
    return of_query, _summed(of_keys, key), _summed(of_values, value), None, None, None


_attention.register_autograd(_backward, setup_context=_remember)


def _for_all(key: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values as many as the heads of `query`, where groups of heads share them."""
    return key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _summed(slopes: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The gradient of what `_for_all` was given."""
    return slopes if slopes.shape == key.shape else slopes.unflatten(1, (key.shape[1], -1)).float().sum(2).to(key.dtype)


class _Forward(NamedTuple):
    """What a forward pass was given, keys and values for each head, and what it found."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mixed: torch.Tensor
    log_sums: torch.Tensor
    causal: bool
    scale: float


def _products(slopes: torch.Tensor, forward: _Forward) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value; the scores in float32, products with them in the precision of `query`."""
    query, key, value, mixed, log_sums, causal, scale = forward
    scores = query.float() @ key.float().transpose(-1, -2)
    shares = torch.exp(scores * scale - log_sums.unsqueeze(-1))
    if causal:
        places = torch.arange(query.shape[2], device=query.device)
        shares = torch.where(places[:, None] >= places[None, :], shares, 0.0)
    rounded = shares.to(query.dtype)
    of_value = rounded.transpose(-1, -2) @ slopes
    own = (slopes.float() * mixed.float()).sum(-1, keepdim=True)
    of_shares = (slopes @ value.transpose(-1, -2)).float()
    of_scores = ((of_shares - own) * rounded.float() * scale).to(query.dtype)
    return of_scores @ key, of_scores.transpose(-1, -2) @ query, of_value


def _kernel(slopes: torch.Tensor, forward: _Forward) -> tuple[torch.Tensor, ...]:
    """The same by PyTorch's kernel, in float32."""
    query, key, value, mixed, log_sums, causal, scale = forward
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    wide = [each.float() for each in (slopes, query, key, value, mixed)]
    return tuple(each.to(query.dtype) for each in kernel(*wide, log_sums, 0.0, causal, scale=scale))
