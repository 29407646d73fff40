"""Attention on a CPU among the tokens of a document alone, where several documents share a row.

With a mask, each token is multiplied with every token of its row, and what the mask hides is thrown away: length²
products for a row. Here each document is computed by itself, so a row costs the sum of its documents' lengths squared.
The documents are found when the operator runs, from their numbers, so that all batches of one shape share one compiled
graph. The forward pass is PyTorch's, and so is the backward pass, but for that of bf16 (`attention.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from artel.models.cpu.attention import (
    backward_of_documents,
    compute_dtype,
    empty_heads,
    fake_grads,
    repeat_heads,
    with_rows,
    works_here,
)

Document = tuple[int, int, int]
"""Row, start and length."""


def document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    numbers: torch.Tensor,
    *,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Attention of query (rows, heads, length, size) within documents. Returns a tensor of query's shape.

    key and value (rows, key heads, length, size), where key heads divides heads. numbers, int64 (rows, length), are
    those of the documents, the tokens of each side by side; 0 is padding, for which the result is 0. With `window` a
    token sees the tokens of its document that are fewer than so many positions away. Computes in autocast's precision
    where autocast is on.
    """
    dtype = compute_dtype(query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _attention(query.to(dtype), key.to(dtype), value.to(dtype), numbers, causal, window, scale)[0]


# Operators, for the reason given in attention.py. The same holds for their names.
@torch.library.custom_op("artel::cpu_attention_documents", mutates_args=(), device_types="cpu")
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    numbers: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the log-sum-exp of each query's scores (rows, heads, length)."""
    output, log_sums = _empty_result(query, numbers)
    output.zero_()
    log_sums.zero_()
    query, key, value = map(with_rows, (query, key, value))
    for document in documents_of(numbers):
        own, shared_key, shared_value = (_tokens(heads, document) for heads in (query, key, value))
        mask = _window_mask(document, window, causal, query)
        _tokens(output, document)[:], _tokens(log_sums, document)[:] = _FORWARD(
            own, repeat_heads(shared_key, own), repeat_heads(shared_value, own), 0.0, causal and mask is None,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
    return output, log_sums


@_attention.register_fake
def _(query: torch.Tensor, _: Any, __: Any, numbers: torch.Tensor, *___: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_result(query, numbers)


def _empty_result(query: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sums = torch.float64 if query.dtype == torch.float64 else torch.float32
    return empty_heads(query), query.new_empty(*query.shape[:3], dtype=sums)


@torch.library.custom_op("artel::cpu_attention_documents_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    numbers: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value."""
    heads, documents = (query, key, value), list(documents_of(numbers))
    grads = (empty_heads(query).zero_(), empty_heads(key).zero_(), empty_heads(value).zero_())
    own = [each for each in documents if _is_own(each, query, window)]
    if own:
        own.sort(key=lambda document: -document[2])  # the longest first: threads take one after another
        backward_of_documents(grad_output, heads, output, log_sums, grads, own, causal=causal, scale=scale)
    adjacent = [with_rows(each) for each in (grad_output, *heads)]
    for document in documents:
        if _is_own(document, query, window):
            continue
        mask = _window_mask(document, window, causal, query)
        pieces = [_tokens(each, document) for each in (*adjacent, output, log_sums)]
        pieces[2:4] = (repeat_heads(each, pieces[1]) for each in pieces[2:4])
        computed = _BACKWARD(*pieces, 0.0, causal and mask is None, attn_mask=mask, scale=scale)
        for grad, piece in zip(grads, computed, strict=True):
            shared = piece.unflatten(1, (grad.shape[1], -1)).sum(2) if grad.shape[1] != piece.shape[1] else piece
            _tokens(grad, document)[:] = shared
    return grads


_attention_backward.register_fake(fake_grads)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, numbers, ctx.causal, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, numbers, *output)


def _backward(ctx: Any, grad_output: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    grads = _attention_backward(grad_output, *ctx.saved_tensors, ctx.causal, ctx.window, ctx.scale)
    return *grads, None, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def documents_of(numbers: torch.Tensor) -> Iterator[Document]:
    """Where the documents of numbers (rows, length) are; padding, 0, is none of them."""
    for row, line in enumerate(numbers):
        names, lengths = torch.unique_consecutive(line, return_counts=True)
        start = 0
        for name, length in zip(names.tolist(), lengths.tolist(), strict=True):
            if name:
                yield row, start, length
            start += length


def _tokens(tensor: torch.Tensor, document: Document) -> torch.Tensor:
    """The part of a tensor (rows, heads, length, …) that belongs to a document, with one row."""
    row, start, length = document
    return tensor[row : row + 1, :, start : start + length]


def _is_own(document: Document, query: torch.Tensor, window: int | None) -> bool:
    """Whether artel's own backward pass computes it."""
    is_whole = window is None or document[2] <= window
    return is_whole and query.dtype == torch.bfloat16 and query.shape[3] % 2 == 0 and works_here()


def _window_mask(document: Document, window: int | None, causal: bool, query: torch.Tensor) -> torch.Tensor | None:
    """A mask (1, 1, length, length) to be added to the scores of a document that is longer than the window."""
    length = document[2]
    if window is None or length <= window:
        return None
    positions = torch.arange(length)
    distance = positions[:, None] - positions
    visible = (distance < window) & ((distance >= 0) if causal else (distance > -window))
    return query.new_zeros(length, length).masked_fill(~visible, float("-inf"))[None, None]
