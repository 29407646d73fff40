"""What gloo copies for a collective on a CPU: memory of a moment that is taken in C++, where no trace sees it.

From ProcessGroupGloo.cpp of torch 2.13, and seen in the heap of two processes. A reduce-scatter is an all-reduce of a
copy of its input, which the caller makes. An all-gather is received into one flat tensor by a thread of gloo, then
copied into its output. An all-reduce works in place.
"""

from __future__ import annotations

from typing import Any

import torch

_C10D, _FUNCTIONAL = torch.ops.c10d, torch.ops._c10d_functional


def copied_bytes(func: Any, args: Any, result: Any) -> int:
    """Of the copy that the caller makes for a reduce-scatter, or that a thread of gloo receives in an all-gather."""
    if func is _C10D._reduce_scatter_base_.default:
        return _bytes(args[1])
    if func is _FUNCTIONAL.reduce_scatter_tensor.default or func is _C10D._allgather_base_.default:
        return _bytes(args[0])
    return _bytes(result) if func is _FUNCTIONAL.all_gather_into_tensor.default else 0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
