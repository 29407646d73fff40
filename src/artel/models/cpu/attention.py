"""Attention on a CPU in bf16: PyTorch's forward pass with artel's own backward pass (attention.cpp).

PyTorch's backward kernel for CPUs transposes and packs each tile again, and multiplies most tiles in small blocks.
For 6 heads of 64, causal, on two cores with AMX, the backward pass took (milliseconds; benchmarks/NOTES.md)

    rows x length    16 x 128   8 x 256   4 x 512   1 x 2,048   1 x 4,096
    PyTorch                14       9.6        13          27          94
    artel                 2.4       3.0       4.5          15          64

Both differ from the exact gradients by 0.2 to 0.3 %, the rounding error of bf16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from artel.models.cpu.build import load_library, pointer


class DropoutParameters(NamedTuple):
    """Dropout of attention weights: `Dropout` in attention.cpp."""

    threshold: int
    """The dropped fraction, times 2^32."""
    factor: float
    """The scale of the remaining weights."""
    seed: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        return ctypes.c_uint32(self.threshold), ctypes.c_float(self.factor), ctypes.c_uint64(self.seed)


NO_DROPOUT = DropoutParameters(0, 1.0, 0)


def is_supported(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """True if `cpu_attention` supports these heads, (rows, heads, length, size), without a mask, and is faster."""
    return dropout == 0.0 and supports_training(query, key, value)


def supports_training(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """True if the kernels support these heads and they need gradients."""
    needs_grad = query.requires_grad or key.requires_grad or value.requires_grad
    return torch.is_grad_enabled() and needs_grad and supports_heads(query, key, value)


def supports_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """True if the kernels support these heads, (rows, heads, length, size)."""
    return (
        query.device.type == "cpu"
        and compute_dtype(query) == torch.bfloat16
        and (query.shape[0], *query.shape[2:]) == (key.shape[0], *key.shape[2:])
        and key.shape == value.shape
        and query.shape[3] % 2 == 0  # the kernels multiply pairs of numbers
        and kernels_available()
    )


def kernels_available() -> bool:
    """True if this processor multiplies bf16 and the kernels can be built. Warn once if they cannot."""
    return _kernels_available()


torch.compiler.assume_constant_result(kernels_available)  # torch.compile calls it while it traces


@cache
def _kernels_available() -> bool:
    functions = load_library("attention")
    return functions is not None and bool(functions.attention_works())


def cpu_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, scale: float | None
) -> torch.Tensor:
    """Attention of query (rows, heads, length, size), with a causal mask or none. Return a tensor of query's shape.

    key and value (rows, key heads, length, size); key heads divides heads. Computes in bf16, or in autocast's precision
    if autocast is on.
    """
    dtype = compute_dtype(query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _attention(query.to(dtype), key.to(dtype), value.to(dtype), causal, scale)[0]


def compute_dtype(query: torch.Tensor) -> torch.dtype:
    """Return the dtype in which attention computes: autocast's if autocast is on."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype


# Operators instead of an autograd.Function: the compiler's cache does not store graphs with such functions, so each run
# would trace them again. The cache identifies an operator by name only: change the name when the results change.
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp of each query's scores, float32 (rows, heads, length)."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query, key, value = map(with_contiguous_rows, (query, key, value))  # the kernel assumes a stride of 1 within a head
    return kernel(query, repeat_heads(key, query), repeat_heads(value, query), 0.0, causal, scale=scale)


_attention = torch.library.custom_op("artel::cpu_attention", _forward, mutates_args=())
_attention.register_fake(_forward)


@torch.library.custom_op("artel::cpu_attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value."""
    grads = (empty_heads(query), empty_heads(key), empty_heads(value))
    rows, length = query.shape[0], query.shape[2]
    documents_backward(
        grad_output, (query, key, value), output, log_sums, grads, [(row, 0, length) for row in range(rows)],
        causal=causal, scale=scale,
    )  # fmt: skip
    return grads


def documents_backward(
    grad_output: torch.Tensor,
    heads: Sequence[torch.Tensor],
    output: torch.Tensor,
    log_sums: torch.Tensor,
    grads: Sequence[torch.Tensor],
    documents: Sequence[tuple[int, int, int]],
    *,
    causal: bool,
    scale: float,
    dropout: DropoutParameters = NO_DROPOUT,
    every_query: bool = False,
) -> None:
    """Write the gradients of `heads` (query, key and value in bf16) into `grads`, which `empty_heads` creates.

    `documents` are (row, start, length); tokens see only their own document. Gradients outside of documents are not
    written. With `every_query`, each row has at most one document: its keys, which all queries of the row see.
    """
    functions = load_library("attention")
    assert functions is not None
    grad_output = with_contiguous_rows(grad_output)
    output, log_sums = output.transpose(1, 2).contiguous(), log_sums.contiguous()
    succeeded = functions.attention_backward(
        *_shape_arguments(heads := [*map(with_contiguous_rows, heads)], documents, causal, every_query, scale),
        *(argument for tensor in heads for argument in (pointer(tensor), _strides(tensor))),
        pointer(output),
        pointer(log_sums),
        pointer(grad_output),
        _strides(grad_output),
        *dropout.arguments,
        ctypes.c_int(torch.get_num_threads()),
        *map(pointer, grads),
    )
    _check(succeeded)


def documents_forward(
    heads: Sequence[torch.Tensor],
    output: torch.Tensor,
    log_sums: torch.Tensor,
    documents: Sequence[tuple[int, int, int]],
    *,
    causal: bool,
    scale: float,
    dropout: DropoutParameters,
    every_query: bool,
) -> None:
    """Write the attention of `heads` (query, key and value in bf16) with dropout into `output` and `log_sums`.

    `empty_heads` creates output; log_sums is float32 (rows, heads, length). `documents` and `every_query` as for
    `documents_backward`, which needs the documents in the same order.
    """
    functions = load_library("attention")
    assert functions is not None
    succeeded = functions.attention_forward(
        *_shape_arguments(heads := [*map(with_contiguous_rows, heads)], documents, causal, every_query, scale),
        *(argument for tensor in heads for argument in (pointer(tensor), _strides(tensor))),
        *dropout.arguments,
        ctypes.c_int(torch.get_num_threads()),
        pointer(output),
        pointer(log_sums),
    )
    _check(succeeded)


def _check(succeeded: int) -> None:
    if not succeeded:
        raise RuntimeError("std::bad_alloc: no memory for the scores of attention")


def _shape_arguments(
    heads: Sequence[torch.Tensor],
    documents: Sequence[tuple[int, int, int]],
    causal: bool,
    every_query: bool,
    scale: float,
) -> tuple[Any, ...]:
    """Return the first arguments of both kernels."""
    query, key, _ = heads
    sizes = (ctypes.c_int64 * 4)(query.shape[1], query.shape[1] // key.shape[1], *query.shape[2:])
    flat_documents = [value for document in documents for value in document]
    positions = (ctypes.c_int64 * len(flat_documents))(*flat_documents)
    flags = (ctypes.c_int(causal), ctypes.c_int(every_query))
    return sizes, positions, ctypes.c_int64(len(documents)), *flags, ctypes.c_float(scale)


def with_contiguous_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a stride of 1 in its last dimension."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def fake_grads(
    _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any
) -> tuple[torch.Tensor, ...]:
    """Allocate the gradients of a backward operator, for the compiler and for plans."""
    return tuple(empty_heads(tensor) for tensor in (query, key, value))


_attention_backward.register_fake(fake_grads)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)


def _backward(ctx: Any, grad_output: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return *_attention_backward(grad_output, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


def repeat_heads(key: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Repeat the heads of keys or values for grouped-query attention, to match the heads of `query`."""
    groups = query.shape[1] // key.shape[1]
    if groups == 1:
        return key  # repeat_interleave would copy it
    return key.repeat_interleave(groups, dim=1)


def empty_heads(heads: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor like `heads`, in the memory layout that the model needs: (rows, length, heads, size)."""
    rows, count, length, size = heads.shape
    return heads.new_empty(rows, length, count, size).transpose(1, 2)


def _strides(heads: torch.Tensor) -> Any:
    return (ctypes.c_int64 * 3)(*heads.stride()[:3])
