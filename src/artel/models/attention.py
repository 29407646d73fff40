"""The attention function for training, registered in transformers as `artel` (`attention_switch.py`).

For decoders it is registered in `AttentionInterface` only. So transformers builds no T×T mask, and PyTorch's fast path
for causal attention stays available (with the mask, attention took 133 ms per step instead of 46 on an H200 with a
Llama of 1.5 billion parameters). The mask of a sliding window is built here. transformers passes artel's own
masks through unchanged: bool masks (rows, 1, length, length), to which the window is added here; document numbers
(rows, 1, 1, length); document and branch numbers (rows, 1, 2, length); block masks of FlexAttention. Encoders, whose
rows may have padding, get the masks of transformers.

Kernels:
    causal, or without a mask       scaled_dot_product_attention without a mask: on a GPU cuDNN, or FlashAttention 2 if
                                    the shape of batches changes
    the same on a CPU in bf16       with artel's own backward pass (cpu/attention.py)
    dropout on a CPU in bf16        artel's own kernels (cpu/attention_dropout.py), also with padding and documents
    a sliding window, a mask        scaled_dot_product_attention with a mask (rows, 1, length, length), without cuDNN
    documents on a GPU              FlexAttention, which skips blocks that no token sees (Dong et al. 2024)
    documents on a CPU              one document at a time (cpu/documents.py)
    the same with dropout           in bf16 as above, else documents of equal length in one batch
    branches on a CPU               one at a time, each after its document's shared prefix

Under context parallelism (`parallel/context_parallel.py`) each process holds a part of every sequence. An `Exchange`
then fetches keys and values from the other processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from artel.models.cpu.attention import cpu_attention, is_supported, repeat_heads, supports_heads, supports_training
from artel.models.cpu.attention_dropout import Padding, dropout_attention, padding_from_mask
from artel.models.cpu.documents import document_attention

_FLEX_GRAPHS = 64
_MASK_BLOCK = 128
"""Tokens of a block of FlexAttention's masks."""
NAME = "artel"
MASKED_NAME = "artel_masked"
"""The name with the masks of transformers, for encoders, whose rows may have padding."""


class AttentionOptions(NamedTuple):
    """Options of one layer's attention."""

    mask: torch.Tensor | BlockMask | None
    """bool (rows, 1, queries, keys): the visible keys of each query, in place of `causal`. Or int64 (rows, 1, 1,
    length): each token's document number; `causal` and `window` apply within documents. Or int64 (rows, 1, 2, length):
    document and branch numbers (`document_mask.py`)."""
    causal: bool
    window: int | None
    """A token sees tokens fewer than this many positions away."""
    dropout: float
    scale: float | None


class Exchange(Protocol):
    """Computes attention over whole sequences when each process holds only a part of every sequence."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Like the function `attend`, for this process's part: (rows, heads, part, size) -> query's shape."""
        ...

    def query_ranges(self, length: int) -> Sequence[range]:
        """Return the sequence positions of a mask's queries if each process holds `length` tokens."""
        ...


_exchange: Exchange | None = None


def is_exchanging() -> bool:
    """True if `attention` currently uses an `Exchange`."""
    return _exchange is not None


@contextmanager
def attention_exchange(exchange: Exchange) -> Iterator[None]:
    """Use `exchange` for `attention` inside the block. Run the backward pass inside it too.

    It applies to all threads, since activation checkpointing calls `attention` again on autograd's threads.
    """
    global _exchange
    previous, _exchange = _exchange, exchange
    try:
        yield
    finally:
        _exchange = previous


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers: (rows, heads, length, size) -> ((rows, length, heads, size), None)."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options = AttentionOptions(attention_mask, causal, sliding_window, dropout, scaling)
    function = attend if _exchange is None else _exchange.attend
    return function(query, key, value, options).transpose(1, 2).contiguous(), None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    query_ranges: Sequence[range] | None = None,
) -> torch.Tensor:
    """Attention of query (rows, heads, queries, size) to key and value (rows, key heads, length, size).

    `query_ranges`: the positions of the queries in the sequence of the keys (default: all). For each range only the
    keys visible to it are read. Return a tensor of query's shape.
    """
    if isinstance(options.mask, BlockMask):
        flex = flex_attention if torch.compiler.is_compiling() or query.device.type == "cpu" else _compiled_flex()
        grouped = query.shape[1] != key.shape[1]
        return flex(query, key, value, block_mask=options.mask, scale=options.scale, enable_gqa=grouped)
    if options.mask is not None and options.mask.shape[2] == 2 and options.mask.dtype == torch.int64:
        return _attend_branches(query, key, value, options)
    if options.mask is not None and options.mask.dtype == torch.int64:
        document_ids = options.mask[:, 0, 0]
        if options.dropout > 0.0:
            if options.window is None and options.dropout < 1.0 and supports_heads(query, key, value):
                return dropout_attention(
                    query, key, value, document_ids, causal=options.causal, dropout=options.dropout, scale=options.scale
                )
            return _attend_documents(query, key, value, document_ids, options)
        return document_attention(
            query, key, value, document_ids, causal=options.causal, window=options.window, scale=options.scale
        )
    if query_ranges is None:
        padding = _find_padding(query, key, value, options)
        if padding is not None:
            return dropout_attention(
                query,
                key,
                value,
                padding.keys,
                causal=padding.causal,
                dropout=options.dropout,
                scale=options.scale,
                every_query=options.mask is not None,
            )
        positions = range(query.shape[2])
        return _attend_range(query, key, value, options.mask, options, positions, positions)
    outputs, start = [], 0
    for queries in query_ranges:
        keys = _visible_keys(queries, key.shape[2], options)
        rows, columns = slice(start, start + len(queries)), slice(keys.start, keys.stop)
        mask = None if options.mask is None else options.mask[:, :, rows, columns]
        outputs.append(
            _attend_range(query[:, :, rows], key[:, :, columns], value[:, :, columns], mask, options, queries, keys)
        )
        start += len(queries)
    return torch.cat(outputs, dim=2)


def _find_padding(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> Padding | None:
    """Return the visible keys if `dropout_attention` applies: with dropout, or a mask that only hides padding.

    None otherwise, also for a mask whose values would have to be read while layers are compiled.
    """
    mask, drops = options.mask, options.dropout > 0.0
    assert mask is None or isinstance(mask, torch.Tensor)
    is_supported = supports_heads(query, key, value) if drops else supports_training(query, key, value)
    if not is_supported or options.window is not None or options.dropout >= 1.0:
        return None
    rows, _, length, _ = query.shape
    if mask is None:
        keys = torch.ones(rows, length, dtype=torch.int64, device=query.device)
        return Padding(keys, options.causal) if drops else None
    if torch.compiler.is_compiling() or mask.shape[2:] != (length, length):
        return None
    padding = padding_from_mask(mask, causal=options.causal)
    return None if padding is None else padding._replace(keys=padding.keys.expand(rows, -1))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # lengths differ in every batch: each would be compiled again
def _attend_documents(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, document_ids: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """`attend` within documents, with dropout: one batch per length. document_ids: (rows, length), 0 for padding."""
    rows, length = document_ids.shape
    starts: dict[int, list[int]] = {}
    for row, row_ids in enumerate(document_ids):
        documents, lengths = torch.unique_consecutive(row_ids, return_counts=True)
        start = row * length
        for document, tokens in zip(documents.tolist(), lengths.tolist(), strict=True):
            if document:
                starts.setdefault(tokens, []).append(start)
            start += tokens
    if not starts:  # only padding
        return torch.zeros_like(query)
    states = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    indices, outputs = [], []
    for tokens, firsts in starts.items():
        index = (
            torch.tensor(firsts, device=query.device)[:, None] + torch.arange(tokens, device=query.device)
        ).flatten()
        heads = [state.index_select(0, index).unflatten(0, (-1, tokens)).transpose(1, 2) for state in states]
        attended = _attend_range(heads[0], heads[1], heads[2], None, options, range(tokens), range(tokens))
        indices.append(index)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    result = torch.zeros_like(states[0], dtype=outputs[0].dtype)
    result = result.index_copy(0, torch.cat(indices), torch.cat(outputs))
    return result.unflatten(0, (rows, length)).transpose(1, 2)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # lengths differ in every batch: each would be compiled again
def _attend_branches(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """`attend` for branches: each sees its document's shared prefix and itself, but no other branch."""
    assert isinstance(options.mask, torch.Tensor)
    outputs = []
    for row, (documents, branches) in enumerate(options.mask[:, 0]):
        row_query, row_key, row_value = (tensor[row : row + 1] for tensor in (query, key, value))
        span_outputs: list[torch.Tensor] = []
        # One number for both, since unique_consecutive compares column by column. There are fewer branches than tokens.
        stride = len(branches) + 1
        span_keys, lengths = torch.unique_consecutive(documents * stride + branches, return_counts=True)
        start, current, shared = 0, 0, slice(0, 0)
        for span_key, length in zip(span_keys.tolist(), lengths.tolist(), strict=True):
            document, branch = divmod(span_key, stride)
            span = slice(start, start + length)
            start += length
            if not document:  # padding
                span_outputs.append(torch.zeros_like(row_query[:, :, span]))
                continue
            if document != current or not branch:  # the shared prefix comes before the branches
                current, shared = document, slice(span.start, span.start if branch else span.stop)
            spans = [shared, span] if branch else [span]
            keys, values = (torch.cat([heads[:, :, seen] for seen in spans], dim=2) for heads in (row_key, row_value))
            positions = range(keys.shape[2])
            span_outputs.append(
                _attend_range(row_query[:, :, span], keys, values, None, options, positions[-length:], positions)
            )
        outputs.append(torch.cat(span_outputs, dim=2))
    return torch.cat(outputs)


def _visible_keys(queries: range, length: int, options: AttentionOptions) -> range:
    """Return the positions of all keys that queries at these positions may see."""
    around = length if options.window is None else options.window - 1
    return range(max(0, queries.start - around), queries.stop if options.causal else min(length, queries.stop + around))


def _attend_range(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
    queries: range,
    keys: range,
) -> torch.Tensor:
    """`attend` for the queries and keys of two position ranges. `mask` covers only these."""
    grouped = query.shape[1] != key.shape[1]
    window = options.window if options.window is not None and options.window < len(keys) else None
    is_suffix = options.causal and mask is None and queries.start > keys.start
    if is_suffix and window is None and _supports_flash(query, key, value, options.dropout, grouped):
        # This operator aligns the causal mask with the end of the keys, scaled_dot_product_attention with their start.
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, options.dropout, True, scale=options.scale)[0]
    if window is not None or is_suffix:
        distance = _positions(queries, query.device)[:, None] - _positions(keys, query.device)[None, :]
        if window is None:
            visible = distance >= 0
        else:
            visible = (distance < window) & ((distance >= 0) if options.causal else (distance > -window))
        mask = visible if mask is None else mask & visible
    causal = options.causal and mask is None and len(queries) > 1
    if mask is None and is_supported(query, key, value, options.dropout):
        return cpu_attention(query, key, value, causal=causal, scale=options.scale)
    if mask is not None and grouped and query.device.type == "cuda":  # the kernel for masks has no groups
        key, value = (repeat_heads(heads, query) for heads in (key, value))
        grouped = False
    with _select_kernels(query, mask):
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=options.dropout,
            scale=options.scale,
            is_causal=causal,
            enable_gqa=grouped,
        )


def _select_kernels(query: torch.Tensor, mask: torch.Tensor | None) -> AbstractContextManager[None]:
    """Exclude cuDNN with a mask on a GPU: its backward pass may give NaN (pytorch issue 196678)."""
    if mask is None or query.device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _supports_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, grouped: bool) -> bool:
    """True if FlashAttention 2 supports these heads: on a GPU, in half precision, of supported size."""
    if query.device.type != "cuda" or query.shape[-1] % 8:
        return False
    return bool(can_use_flash_attention(SDPAParams(query, key, value, None, dropout, False, grouped)))


def _positions(span: range, device: torch.device) -> torch.Tensor:
    return torch.arange(span.start, span.stop, device=device)


def query_positions(local_length: int, device: torch.device) -> torch.Tensor:
    """Return the sequence positions of a mask's queries, int64 (queries,).

    `local_length`: the number of tokens of each sequence that this process holds (all, without an `Exchange`).
    """
    spans = [range(local_length)] if _exchange is None else _exchange.query_ranges(local_length)
    return torch.cat([_positions(span, device) for span in spans])


@cache
def _compiled_flex() -> Any:
    """Return compiled FlexAttention, for layers that are not compiled: uncompiled it is not a single kernel.

    The second length compiles a kernel for any length, as in transformers (`WrappedFlexAttention`). One row or several,
    one block or several, with or without gradients: about ten graphs. Beyond PyTorch's limit of 8 it would fall back to
    computing all scores.
    """
    return torch.compile(flex_attention, recompile_limit=_FLEX_GRAPHS)  # type: ignore[call-overload]


def block_mask(documents: torch.Tensor, positions: torch.Tensor, *, causal: bool) -> BlockMask:
    """Build FlexAttention's mask, in blocks of 128 tokens, for tokens that see only their own document.

    documents int64 (rows, length): each token's document number. positions int64 (queries,): the positions of the
    queries in the sequence.

    `create_block_mask` would evaluate each pair of tokens: 17 GB for 131,072 of them. Here the lowest and the highest
    document number of each block decide whether two blocks can see each other.
    """
    all_positions = len(positions) == documents.shape[1]  # then the kernel needs no lookup

    def visible(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        position = query if all_positions else positions[query]
        same_document = documents[row, position] == documents[row, key]
        return same_document & (position >= key) if causal else same_document

    first_key, last_key, key_padding = _block_bounds(torch.arange(documents.shape[1], device=documents.device))
    first_query, last_query, query_padding = _block_bounds(positions)
    low_key, high_key, _ = _block_bounds(documents)
    low_query, high_query, _ = _block_bounds(documents[:, positions])
    low_query, high_query = low_query[:, :, None], high_query[:, :, None]
    low_key, high_key = low_key[:, None], high_key[:, None]
    sees = (low_query <= high_key) & (low_key <= high_query)
    sees_all = torch.minimum(low_query, low_key) == torch.maximum(high_query, high_key)
    if causal:
        sees = sees & (last_query[:, None] >= first_key)
        sees_all = sees_all & (first_query[:, None] >= last_key)
    if key_padding:
        sees_all[:, :, -1] = False
    if query_padding:
        sees_all[:, -1] = False
    blocks = (*_ordered_blocks(sees & ~sees_all), *_ordered_blocks(sees_all))
    lengths = len(positions), documents.shape[1]
    mask = BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=_MASK_BLOCK, mask_mod=visible, seq_lengths=lengths)
    mask.ndim = 4  # type: ignore[attr-defined]  # GPT-2 reads it to tell masks from padding
    return mask


def _block_bounds(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the minimum and the maximum of each block of the last dimension, and how much the last block lacks."""
    padding = -values.shape[-1] % _MASK_BLOCK
    padded = torch.cat([values, values[..., -1:].expand(*values.shape[:-1], padding)], dim=-1)
    blocks = padded.unflatten(-1, (-1, _MASK_BLOCK))
    return blocks.amin(dim=-1), blocks.amax(dim=-1), padding


def _ordered_blocks(sees: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (number of visible key blocks, their indices first) of bool (rows, query blocks, key blocks), int32."""
    indices = sees.int().argsort(dim=-1, descending=True, stable=True)
    return sees.sum(dim=-1, dtype=torch.int32)[:, None], indices.int()[:, None].contiguous()
