"""Cross-entropy and its gradient on a CPU in one pass over memory, in C++ (cross_entropy.cpp).

PyTorch's operators make seven passes over the logits, or two to three with torch.compile. This kernel reads each row
once and overwrites it with its gradient (timings: benchmarks/NOTES.md). If the C++ cannot be built, PyTorch's operators
compute the same (`cross_entropy_with_grad`).
"""

from __future__ import annotations

import ctypes

import torch
from torch._C._profiler import _RecordFunctionFast

from artel.models import IGNORED
from artel.models.cpu.build import load_library, pointer

_NAME = "artel::cpu_cross_entropy"
_FUNCTIONS = {torch.float32: "cross_entropy_float32", torch.bfloat16: "cross_entropy_bfloat16"}


def supports_logits(device: torch.device, dtype: torch.dtype) -> bool:
    """True if `cpu_cross_entropy_with_grad` supports these logits. Builds the C++; warns once if that fails."""
    return device.type == "cpu" and dtype in _FUNCTIONS and load_library("cross_entropy") is not None


def cpu_cross_entropy_with_grad(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss of each row in nats, most likely ids, gradient), like `cross_entropy_with_grad` without shards.

    logits (count, vocabulary) are overwritten by the gradient; targets int64 (count,), or `IGNORED`. Raise IndexError
    for targets out of range.
    """
    with _RecordFunctionFast(_NAME):
        losses, guesses = _cross_entropy(logits, targets)
    return losses, guesses, logits


# An operator gives a trace without values its shapes. A profile of torch 2.14 does not show the names of custom ones.
@torch.library.custom_op(_NAME, mutates_args={"logits"}, device_types="cpu")
def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each row, float32, and its most likely id, int64 (count,). The gradient overwrites logits."""
    smallest, largest = (int(bound) for bound in targets.aminmax()) if len(targets) else (0, 0)
    if largest >= logits.shape[1] or (smallest < 0 and bool(((targets < 0) & (targets != IGNORED)).any())):
        raise IndexError(f"targets from {smallest} to {largest} among {logits.shape[1]} ids")
    functions = load_library("cross_entropy")
    assert functions is not None
    assert logits.is_contiguous()
    targets = targets.contiguous()
    losses, guesses = torch.empty(len(targets)), torch.empty(len(targets), dtype=torch.int64)
    functions[_FUNCTIONS[logits.dtype]](
        *map(pointer, (logits, targets)),
        *(ctypes.c_int64(size) for size in logits.shape),
        ctypes.c_int(torch.get_num_threads()),
        *map(pointer, (losses, guesses)),
    )
    return losses, guesses


@_cross_entropy.register_fake
def _(_: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return targets.new_empty(len(targets), dtype=torch.float32), torch.empty_like(targets)


def add_transposed_matmul(grad: torch.Tensor | None, grad_logits: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return `grad` + grad_logits.T @ inputs, float32 (vocabulary, width). `grad` may be None for 0.

    grad_logits (count, vocabulary) and inputs (count, width) are bf16, and so is their product before it is added.
    oneDNN needs twice the time for a transposed left matrix (matmul_pass.py). So the smaller matrix, inputs, is
    transposed in memory first, and the result is computed transposed. For 16,384 ids, 2,048 positions and a width of
    384 this took 13.8 ms instead of 17.8; added to a total of 50,257 ids (660 positions, 768 wide) 35 instead of 57
    (two cores with AMX).
    """
    product = inputs.T.contiguous() @ grad_logits
    overwrite = grad is None
    if grad is None:
        grad = torch.empty(grad_logits.shape[1], inputs.shape[1])
    _add_transposed(grad, product, overwrite)
    return grad


@torch.library.custom_op("artel::cpu_add_transposed", mutates_args={"grad_weight"}, device_types="cpu")
def _add_transposed(grad_weight: torch.Tensor, grad_transposed: torch.Tensor, overwrite: bool) -> None:
    """Add `grad_transposed` (width, vocabulary), bf16, to `grad_weight` (vocabulary, width), float32, or replace it."""
    functions = load_library("cross_entropy")
    assert functions is not None
    assert grad_weight.is_contiguous()
    assert grad_transposed.is_contiguous()
    functions.add_transposed_bfloat16(
        pointer(grad_transposed),
        *(ctypes.c_int64(size) for size in grad_transposed.shape),
        *(ctypes.c_int(value) for value in (overwrite, torch.get_num_threads())),
        pointer(grad_weight),
    )


@_add_transposed.register_fake
def _(grad_weight: torch.Tensor, grad_transposed: torch.Tensor, overwrite: bool) -> None:
    pass
