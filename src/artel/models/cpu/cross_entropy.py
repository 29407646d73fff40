"""Cross-entropy of rows of logits on a CPU in one pass over memory, in C++ (cross_entropy.cpp).

The kernel reads each row once and overwrites it with its gradient (timings: benchmarks/NOTES.md). If the C++ cannot be
built, PyTorch's operators compute the same (`cross_entropy_rows.py`).
"""

from __future__ import annotations

import ctypes

import torch

from artel.models import IGNORED
from artel.models.cpu.build import load_library, pointer
from artel.models.cross_entropy_rows import Rows, define_row_operators

_FUNCTIONS = {torch.float32: "cross_entropy_float32", torch.bfloat16: "cross_entropy_bfloat16"}


def supports_logits(device_type: str, dtype: torch.dtype) -> bool:
    """True if `cpu_rows` supports these logits. Builds the C++; warns once if that fails."""
    return device_type == "cpu" and dtype in _FUNCTIONS and load_library("cross_entropy") is not None


def _compute(rows: Rows, *, with_statistics: bool, with_grad: bool) -> None:
    functions = load_library("cross_entropy")
    assert functions is not None
    logits, factors = rows.logits, rows.factors
    if with_statistics:
        _check_targets(rows.targets, rows.num_ids)
    assert logits.stride(1) == 1
    assert rows.statistics.is_contiguous()
    targets, factors = rows.targets.contiguous(), None if factors is None else factors.contiguous()
    functions[_FUNCTIONS[logits.dtype]](
        pointer(logits),
        pointer(targets),
        None if factors is None else pointer(factors),
        pointer(rows.statistics),
        pointer(rows.guesses),
        *(ctypes.c_int64(size) for size in (len(logits), logits.stride(0), rows.columns, rows.first_id)),
        ctypes.c_float(rows.soft_cap),
        *(ctypes.c_int(value) for value in (with_statistics, with_grad, torch.get_num_threads())),
    )


def _check_targets(targets: torch.Tensor, vocabulary: int) -> None:
    """Raise IndexError if a target is neither an id below `vocabulary` nor `IGNORED`."""
    smallest, largest = (int(bound) for bound in targets.aminmax()) if len(targets) else (0, 0)
    if largest >= vocabulary or (smallest < 0 and bool(((targets < 0) & (targets != IGNORED)).any())):
        raise IndexError(f"targets from {smallest} to {largest} among {vocabulary} ids")


cpu_rows = define_row_operators("cpu_cross_entropy", _compute)


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
