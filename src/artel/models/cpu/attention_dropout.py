"""Attention on a CPU in bf16 with dropout, as BERT, RoBERTa and GPT-2 are trained, or with padding (attention.cpp).

PyTorch's kernel for CPUs has no dropout. Its fallback multiplies in float32, draws a random number for each weight, and
saves three tensors of (rows, heads, length, length). Here a hash of the weight's position and of a seed from PyTorch's
generator decides, so nothing is saved, and recomputed activations are the same.

PyTorch's kernel takes padding as a mask that it adds to all scores. Its gradients take two to four times as long as
these, which skip padding (benchmarks/NOTES.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from artel.models.cpu.attention import (
    DropoutParameters,
    compute_dtype,
    documents_backward,
    documents_forward,
    empty_heads,
    fake_grads,
)
from artel.models.cpu.documents import Document, find_documents


class Padding(NamedTuple):
    """The content of a mask that only hides padding."""

    keys: torch.Tensor
    """int64 (rows, length): 1 for visible keys, which are adjacent in each row; 0 for padding."""
    causal: bool
    """True if a query sees no keys after itself. The visible keys then start at the beginning of the row."""


def padding_from_mask(mask: torch.Tensor, *, causal: bool) -> Padding | None:
    """Convert a mask, bool (rows, 1, length, length), if it only hides padding. None for any other mask.

    `causal`: the mask may also hide the keys after each query. A mask without values (in a plan) is assumed to be
    padding.
    """
    keys = mask[:, 0, -1]  # no query sees more keys than the last one
    if isinstance(mask, FakeTensor):
        return Padding(keys.long(), causal)
    if mask.shape[1] != 1 or mask.dtype != torch.bool:
        return None
    changes = (keys[:, 1:] != keys[:, :-1]).sum(dim=1)
    if bool((mask == keys[:, None, None]).all()):
        is_adjacent = (changes <= 1) | ((changes == 2) & ~keys[:, 0])
        return Padding(keys.long(), causal=False) if bool(is_adjacent.all()) else None
    if not causal or not bool((keys[:, 0] & (changes <= 1)).all()):
        return None
    is_causal = bool((mask == (keys[:, None, None] & torch.ones_like(mask[:1]).tril())).all())
    return Padding(keys.long(), causal=True) if is_causal else None


def dropout_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_ids: torch.Tensor,
    *,
    causal: bool,
    dropout: float,
    scale: float | None,
    every_query: bool = False,
) -> torch.Tensor:
    """Attention of query (rows, heads, length, size) within documents, with dropout. Return a tensor of query's shape.

    key, value and document_ids as for `document_attention`. With `every_query` each row has at most one document, the
    ids are those of the keys, and all queries of the row see it. If also `causal`, the document starts the row and a
    query sees no keys after itself. The seed comes from PyTorch's generator if `dropout` is above 0.
    """
    dtype = compute_dtype(query)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    seed = torch.randint(2**62, (1,)) if dropout else torch.zeros(1, dtype=torch.int64)
    heads = (query.to(dtype), key.to(dtype), value.to(dtype))
    return _attention(*heads, document_ids, seed, causal, every_query, dropout, scale)[0]


# attention.py explains why these are operators, and how they are named.
@torch.library.custom_op("artel::cpu_attention_dropout", mutates_args=(), device_types="cpu")
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_ids: torch.Tensor,
    seed: torch.Tensor,
    causal: bool,
    every_query: bool,
    dropout: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp of each query's scores (rows, heads, length)."""
    output, log_sums = _empty_result(query)
    documents = _sort_documents(document_ids)
    if sum(length for *_, length in documents) < document_ids.numel():  # padding
        output.zero_()
        log_sums.zero_()
    documents_forward(
        (query, key, value), output, log_sums, documents,
        causal=causal, scale=scale, dropout=_dropout_arguments(dropout, seed), every_query=every_query,
    )  # fmt: skip
    return output, log_sums


@_attention.register_fake
def _(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty_result(query)


def _empty_result(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return empty_heads(query), query.new_empty(*query.shape[:3], dtype=torch.float32)


def _sort_documents(document_ids: torch.Tensor) -> Sequence[Document]:
    """Sort the documents by length, longest first: each thread takes the next document when it is free."""
    return sorted(find_documents(document_ids), key=lambda document: -document[2])


def _dropout_arguments(dropout: float, seed: torch.Tensor) -> DropoutParameters:
    threshold = min(round(dropout * 2**32), 2**32 - 1)
    return DropoutParameters(threshold, 1 / (1 - threshold / 2**32), int(seed))


@torch.library.custom_op("artel::cpu_attention_dropout_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    document_ids: torch.Tensor,
    seed: torch.Tensor,
    output: torch.Tensor,
    log_sums: torch.Tensor,
    causal: bool,
    every_query: bool,
    dropout: float,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value."""
    documents = _sort_documents(document_ids)
    grads = (empty_heads(query), empty_heads(key), empty_heads(value))
    if sum(length for *_, length in documents) < document_ids.numel():  # padding
        for grad in grads:
            grad.zero_()
    documents_backward(
        grad_output, (query, key, value), output, log_sums, grads, documents,
        causal=causal, scale=scale, dropout=_dropout_arguments(dropout, seed), every_query=every_query,
    )  # fmt: skip
    return grads


_attention_backward.register_fake(fake_grads)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.causal, ctx.every_query, ctx.dropout, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad_output: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    settings = (ctx.causal, ctx.every_query, ctx.dropout, ctx.scale)
    return *_attention_backward(grad_output, *ctx.saved_tensors, *settings), *6 * (None,)


_attention.register_autograd(_backward, setup_context=_setup_context)
