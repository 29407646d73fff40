"""A layer's input in 16 bits, rounded once for all who read it: queries, keys and values read the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_ROUNDED = "_artel_rounded"
"""Attribute of a tensor: its version, and what it was rounded to."""


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` in `dtype`, without gradient: one tensor for all layers that get the same `x`, kept as long as it is."""
    if x.dtype == dtype:
        return x.detach()
    if x.is_inference():
        return x.to(dtype)
    version, made = getattr(x, _ROUNDED, (None, None))
    if made is None or version != x._version or made.dtype != dtype:
        made = x.detach().to(dtype)
        setattr(x, _ROUNDED, (x._version, made))
    return made


def forget_rounded(tensors: Iterable[object]) -> None:
    """Let go of what these were rounded to, where they are kept and nobody reads it before it is made again."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and hasattr(tensor, _ROUNDED):
            delattr(tensor, _ROUNDED)
