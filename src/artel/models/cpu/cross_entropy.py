"""Cross-entropy's gradient on a CPU, with few passes over memory: cross_entropy.cpp, built where it runs.

PyTorch's operators pass over the logits seven times, and what torch.compile makes of them passes two or three times;
here a row is read once and its gradient written into its place (benchmarks/NOTES.md has the milliseconds). Where it
cannot be built, PyTorch's operators do the same (`slopes`).
"""

from __future__ import annotations

import ctypes

import torch

from artel.models.cpu.build import library, pointer
from artel.models.targets import IGNORED

_FUNCTIONS = {torch.float32: "slopes_float32", torch.bfloat16: "slopes_bfloat16"}


def can_take(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `cpu_slopes` can take such logits. Builds what it needs, and warns once where that cannot be done."""
    return device.type == "cpu" and dtype in _FUNCTIONS and library("cross_entropy") is not None


def cpu_slopes(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(summed loss, likeliest ids, gradient of the summed loss by the logits): as `slopes` of a whole vocabulary.

    logits (count, vocabulary), whose place the gradient takes; targets int64 (count,), `IGNORED` where there is none.
    Raises IndexError for another target that is no id.
    """
    smallest, largest = (int(each) for each in targets.aminmax()) if len(targets) else (0, 0)
    if largest >= logits.shape[1] or (smallest < 0 and bool(((targets < 0) & (targets != IGNORED)).any())):
        raise IndexError(f"targets from {smallest} to {largest} among {logits.shape[1]} ids")
    losses, guesses = _slopes(logits, targets)
    return losses.sum(), guesses, logits


# An operator, so that a profile names it.
@torch.library.custom_op("artel::cpu_slopes", mutates_args={"logits"}, device_types="cpu")
def _slopes(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each row, float32, and its likeliest id, int64 (count,); the gradient takes the place of the logits."""
    built = library("cross_entropy")
    assert built is not None
    assert logits.is_contiguous()
    targets = targets.contiguous()
    losses, guesses = torch.empty(len(targets)), torch.empty(len(targets), dtype=torch.int64)
    built[_FUNCTIONS[logits.dtype]](
        *map(pointer, (logits, targets)),
        *(ctypes.c_int64(size) for size in logits.shape),
        ctypes.c_int(torch.get_num_threads()),
        *map(pointer, (losses, guesses)),
    )
    return losses, guesses


def sum_with_product(total: torch.Tensor | None, slopes: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """`total` and slopes.T @ inputs, float32 (vocabulary, width); the product alone where there is no total yet.

    slopes (count, vocabulary) and inputs (count, width) are bf16, and so the product is, before it is added.
    oneDNN multiplies a transposed left matrix at half the speed (`cpu_products`): here that is the smaller one, inputs,
    which is laid out first, and the product lies transposed. Of 16,384 ids, 2,048 positions and a width of 384 it took
    17.8 ms, then 13.8; added to a total of 50,257 ids (660 positions, 768 wide) 57, then 35 (two cores with AMX).
    """
    product = inputs.T.contiguous() @ slopes
    first = total is None
    if total is None:
        total = torch.empty(slopes.shape[1], inputs.shape[1])
    _add_turned(total, product, first)
    return total


@torch.library.custom_op("artel::cpu_add_turned", mutates_args={"total"}, device_types="cpu")
def _add_turned(total: torch.Tensor, product: torch.Tensor, first: bool) -> None:
    """Add product (width, vocabulary), bf16, to total (vocabulary, width), float32, or write it there if `first`."""
    built = library("cross_entropy")
    assert built is not None
    assert total.is_contiguous()
    assert product.is_contiguous()
    built.add_turned_bfloat16(
        pointer(product),
        *(ctypes.c_int64(size) for size in product.shape),
        *(ctypes.c_int(each) for each in (first, torch.get_num_threads())),
        pointer(total),
    )
