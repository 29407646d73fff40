"""Code that oneDNN compiles for products in 16 bits on a CPU: a kernel for each shape, kept by the process.

A trace shows the products of one micro-batch, the longest. Where rows are of many lengths, the other micro-batches of
the run have kernels of their own: `MicroBatchSizes` says how many differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from artel.models.device import row_multiple
from artel.planning.plan.micro_batch_sizes import MicroBatchSizes

KERNEL_BYTES = 655 << 10
"""What one takes, whatever its shape: 100 to 200 products in bf16 of 64 to 8,000 numbers a side, of which each has
another number of rows, took 652 to 675 KiB each; with 512 x 512 matrices up to 765 (oneDNN 3.12, AVX-512 BF16)."""
KEPT = 1024
"""Kernels that oneDNN keeps, if ONEDNN_PRIMITIVE_CACHE_CAPACITY does not say otherwise."""
LARGEST_GROUP = 3
"""The fullest expert's tokens, in times of the mean: 2.3 to 6, in the middle 3, of five new routers of 8 to 64 experts.
Groups came in nearly all sizes up to that."""

_ATEN = torch.ops.aten
_PRODUCTS = {_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm}
_HALF = {torch.bfloat16, torch.float16}


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a kernel is compiled for."""

    numbers: tuple[Any, ...]
    """Sizes and layouts."""
    sides: frozenset[int]
    """Sizes of its matrices."""
    kernels: int = 1
    """How many: of products of experts one for each size of a group."""


@dataclass(slots=True)
class KernelShapes:
    """The products of a traced step, each shape once."""

    products: dict[_Shape, bool] = field(default_factory=dict)
    """Whether a forward pass has it."""
    attention: set[tuple[int, int, int]] = field(default_factory=set)
    """(rows, queries, keys) of PyTorch's backward pass of attention."""

    def record(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note an operator that is called on these arguments."""
        packet = getattr(func, "overloadpacket", None)
        if packet in _PRODUCTS:
            self._add(_product(*args[-2:]))
        elif packet is _ATEN._grouped_mm:
            self._add(_grouped(*args[:3]))
        elif packet is _ATEN._scaled_dot_product_flash_attention_for_cpu_backward and args[1].dtype in _HALF:
            query, key = args[1:3]
            self.attention.add((query.shape[0], query.shape[2], key.shape[2]))

    def count(self, widths: set[int], sizes: MicroBatchSizes) -> int:
        """Kernels of a run whose micro-batches have these sizes; `widths` are the sizes of the model's parameters.

        A product that has another side than those is one of a micro-batch's positions, or of its targets.
        """
        changing = [shape for shape in self.products if not shape.sides <= widths]
        read = [shape for shape in changing if self.products[shape]]
        count = _kernels(self.products) + (sizes.trained - 1) * _kernels(changing) + sizes.only_read * _kernels(read)
        for rows, queries, keys in self.attention:
            is_of_a_sample = rows == 1 and queries != sizes.row  # of a part of a row, as an answer behind its prompt
            count += _attention_kernels(queries, keys) * (sizes.samples if is_of_a_sample else sizes.trained)
        return min(count, KEPT)

    def _add(self, shape: _Shape | None) -> None:
        if shape is not None:
            is_forward = torch._C._current_graph_task_id() == -1
            self.products[shape] = self.products.get(shape, False) or is_forward


def _kernels(shapes: Iterable[_Shape]) -> int:
    return sum(shape.kernels for shape in shapes)


def _product(left: torch.Tensor, right: torch.Tensor) -> _Shape | None:
    if left.dtype not in _HALF:
        return None
    return _Shape((*_layout(left), *_layout(right)), frozenset((*left.shape[-2:], right.shape[-1])))


def _grouped(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> _Shape | None:
    """Of rows (tokens, inner) in groups with a matrix for each; or of their transpose, with groups along both."""
    if left.dtype not in _HALF:
        return None
    tokens, multiple = left.shape[0] if right.ndim == 3 else left.shape[1], row_multiple(left.device, left.dtype)
    mean = tokens / len(ends) - (multiple - 1)  # groups are filled up, `models/experts.py`
    groups = max(1, round(LARGEST_GROUP * mean / multiple))
    return _Shape((*_layout(left), *_layout(right), "groups"), frozenset((tokens,)), groups)


def _layout(matrix: torch.Tensor) -> tuple[Any, ...]:
    return *matrix.shape, matrix.stride(-1) == 1


def _attention_kernels(queries: int, keys: int) -> int:
    """Products of a block of queries and one of keys: three for each pair of sizes of blocks.

    Sizes of blocks are those of PyTorch's FlashAttentionKernel.cpp, `flash_attention_backward_kernel_impl`.
    """
    block = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return 3 * len(set(_blocks(queries, block))) * len(set(_blocks(keys, 512)))


def _blocks(length: int, block: int) -> Iterator[int]:
    """The sizes of the pieces that a length is cut into."""
    yield min(length, block)
    yield length % block or min(length, block)
