"""Attention on a CPU within documents, when several documents share a row.

With a mask, each token is multiplied with every token of its row and hidden results are discarded: length² scores per
row. Here documents are computed one at a time, so a row costs the sum of its documents' squared lengths. The operator
finds the documents by their numbers when it runs, so all batches of one shape share a compiled graph. Forward and
backward pass are PyTorch's, except for the backward pass in bf16 (`attention.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from artel.models.cpu.attention import (
    compute_dtype,
    documents_backward,
    empty_heads,
    fake_grads,
    kernels_available,
    repeat_heads,
    with_contiguous_rows,
)

Document = tuple[int, int, int]
"""Row, start and length."""


def document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_ids: torch.Tensor,
    *,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention of query (rows, heads, length, size) within documents. Return a tensor of query's shape.

    key and value (rows, key heads, length, size); key heads divides heads. document_ids int64 (rows, length): the
    document of each token. A document's tokens are adjacent; 0 is padding, with result 0. With `window` a token sees
    tokens of its document fewer than that many positions away. Computes in autocast's precision if autocast is on.
    """
    dtype = compute_dtype(query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _attention(query.to(dtype), key.to(dtype), value.to(dtype), document_ids, causal, window, scale)[0]


# attention.py explains why these are operators, and how they are named.
@torch.library.custom_op("artel::cpu_attention_documents", mutates_args=(), device_types="cpu")
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_ids: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp of each query's scores (rows, heads, length)."""
    output, log_sums = _empty_result(query, document_ids)
    output.zero_()
    log_sums.zero_()
    query, key, value = map(with_contiguous_rows, (query, key, value))
    for document in find_documents(document_ids):
        queries, keys, values = (_slice_document(heads, document) for heads in (query, key, value))
        mask = _window_mask(document, window, causal, query)
        _slice_document(output, document)[:], _slice_document(log_sums, document)[:] = _FORWARD(
            queries, repeat_heads(keys, queries), repeat_heads(values, queries), 0.0, causal and mask is None,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
    return output, log_sums


@_attention.register_fake
def _(query: torch.Tensor, _: Any, __: Any, document_ids: torch.Tensor, *___: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_result(query, document_ids)


def _empty_result(query: torch.Tensor, document_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sums = torch.float64 if query.dtype == torch.float64 else torch.float32
    return empty_heads(query), query.new_empty(*query.shape[:3], dtype=sums)


@torch.library.custom_op("artel::cpu_attention_documents_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_ids: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value."""
    heads, documents = (query, key, value), list(find_documents(document_ids))
    grads = (empty_heads(query).zero_(), empty_heads(key).zero_(), empty_heads(value).zero_())
    supported = [document for document in documents if _supports_document(document, query, window)]
    if supported:
        supported.sort(key=lambda document: -document[2])  # longest first: a free thread takes the next one
        documents_backward(grad_output, heads, output, log_sums, grads, supported, causal=causal, scale=scale)
    contiguous = [with_contiguous_rows(tensor) for tensor in (grad_output, *heads)]
    for document in documents:
        if _supports_document(document, query, window):
            continue
        mask = _window_mask(document, window, causal, query)
        tensors = [_slice_document(tensor, document) for tensor in (*contiguous, output, log_sums)]
        tensors[2:4] = (repeat_heads(tensor, tensors[1]) for tensor in tensors[2:4])
        document_grads = _BACKWARD(*tensors, 0.0, causal and mask is None, attn_mask=mask, scale=scale)
        for grad, document_grad in zip(grads, document_grads, strict=True):
            if grad.shape[1] != document_grad.shape[1]:  # grouped-query attention
                document_grad = document_grad.unflatten(1, (grad.shape[1], -1)).sum(2)
            _slice_document(grad, document)[:] = document_grad
    return grads


_attention_backward.register_fake(fake_grads)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, document_ids, ctx.causal, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, document_ids, *output)


def _backward(ctx: Any, grad_output: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    grads = _attention_backward(grad_output, *ctx.saved_tensors, ctx.causal, ctx.window, ctx.scale)
    return *grads, None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def find_documents(document_ids: torch.Tensor) -> Iterator[Document]:
    """Yield the documents of document_ids (rows, length), without padding (0)."""
    for row, row_ids in enumerate(document_ids):
        documents, lengths = torch.unique_consecutive(row_ids, return_counts=True)
        start = 0
        for document, length in zip(documents.tolist(), lengths.tolist(), strict=True):
            if document:
                yield row, start, length
            start += length


def _slice_document(tensor: torch.Tensor, document: Document) -> torch.Tensor:
    """Return the part of a tensor (rows, heads, length, …) that belongs to a document, with one row."""
    row, start, length = document
    return tensor[row : row + 1, :, start : start + length]


def _supports_document(document: Document, query: torch.Tensor, window: int | None) -> bool:
    """True if artel's backward pass supports the document."""
    fits_window = window is None or document[2] <= window
    return fits_window and query.dtype == torch.bfloat16 and query.shape[3] % 2 == 0 and kernels_available()


def _window_mask(document: Document, window: int | None, causal: bool, query: torch.Tensor) -> torch.Tensor | None:
    """Return an additive mask (1, 1, length, length) for a document longer than the window."""
    length = document[2]
    if window is None or length <= window:
        return None
    positions = torch.arange(length)
    distance = positions[:, None] - positions
    visible = (distance < window) & ((distance >= 0) if causal else (distance > -window))
    return query.new_zeros(length, length).masked_fill(~visible, float("-inf"))[None, None]
