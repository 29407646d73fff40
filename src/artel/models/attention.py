"""One attention function for training, which transformers knows under the name `artel` (`attention_switch.py`).

For decoders it is registered in `AttentionInterface` only: transformers then builds no T×T mask for it, and PyTorch's
causal fast path stays open (133 ms instead of 46 ms of attention a step were measured with the mask, on an H200 with a
Llama of 1.5 billion parameters). A model that needs more than a causal mask (a sliding window) gets its mask made here.
Masks that are made for it come through transformers as they are: tensors (rows, 1, length, length), to which the window
is added, and block masks of FlexAttention. Encoders, whose rows may have padding, get the masks of transformers.

Which kernel runs:
    causal, or all of it            scaled_dot_product_attention without a mask: cuDNN or FlashAttention 2 on a GPU
    the same on a CPU in bf16       with a backward pass of its own (cpu_attention.py)
    a sliding window, a mask        scaled_dot_product_attention with a mask (rows, 1, length, length)
    documents on a GPU              FlexAttention, which skips what no token sees (Dong et al. 2024)

Where processes share each sequence (`parallel/context/context.py`), an exchange is in force: it brings together what
the kernels need of the other processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import PreTrainedModel

from artel.models.choice import Choice
from artel.models.cpu.attention import cpu_attention, takes

NAME = "artel"
MASKED_NAME = "artel_masked"
"""The same function where transformers makes the masks, as for its own: of encoders, whose rows may have padding."""


class Mixing(NamedTuple):
    """How a layer mixes the values of tokens into one another."""

    mask: torch.Tensor | BlockMask | None
    """bool (rows, 1, queries, keys): which keys a query sees; it takes the place of `causal`."""
    causal: bool
    window: int | None
    """Tokens see those fewer than this many places away."""
    dropout: float
    scale: float | None


class Exchange(Protocol):
    """How processes that each hold a part of every sequence compute attention over all of it."""

    def mix(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: Mixing) -> torch.Tensor:
        """As the function `mix`, of this process's part: (rows, heads, part, size) -> query's shape."""
        ...

    def queries(self, part: int) -> Sequence[range]:
        """The places in the sequence that the rows of a mask stand for, where each process holds `part` tokens."""
        ...


_in_force: Exchange | None = None


@contextmanager
def in_force(exchange: Exchange) -> Iterator[None]:
    """Have `attention` go through `exchange`, for the length of the block; the backward pass belongs into it too.

    Layers that are computed again go through it again, on whatever thread autograd runs: so this is no thread's own.
    """
    global _in_force
    before, _in_force = _in_force, exchange
    try:
        yield
    finally:
        _in_force = before


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
    """query (rows, heads, length, size), key and value (rows, key heads, length, size) -> query's, heads third."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    how = Mixing(attention_mask, causal, sliding_window, dropout, scaling)
    mixed = mix(query, key, value, how) if _in_force is None else _in_force.mix(query, key, value, how)
    return mixed.transpose(1, 2).contiguous(), None


def mix(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: Mixing, places: Sequence[range] | None = None
) -> torch.Tensor:
    """query (rows, heads, queries, size), key and value (rows, key heads, length, size) -> as query.

    `places` are those of the queries in the sequence of the keys, in pieces one after another; None: all of them. For
    each piece only the keys that it may see are touched.
    """
    if isinstance(how.mask, BlockMask):
        flex = flex_attention if torch.compiler.is_compiling() or query.device.type == "cpu" else _compiled_flex()
        grouped = query.shape[1] != key.shape[1]
        return flex(query, key, value, block_mask=how.mask, scale=how.scale, enable_gqa=grouped)
    if places is None:
        every = range(query.shape[2])
        return _mix_piece(query, key, value, how.mask, how, every, every)
    pieces, start = [], 0
    for at in places:
        others = _reach(at, key.shape[2], how)
        mine, theirs = slice(start, start + len(at)), slice(others.start, others.stop)
        mask = None if how.mask is None else how.mask[:, :, mine, theirs]
        keys, values = key[:, :, theirs], value[:, :, theirs]
        pieces.append(_mix_piece(query[:, :, mine], keys, values, mask, how, at, others))
        start += len(at)
    return torch.cat(pieces, dim=2)


def _reach(at: range, length: int, how: Mixing) -> range:
    """The places of all keys that a token of the places `at` may see."""
    around = length if how.window is None else how.window - 1
    return range(max(0, at.start - around), at.stop if how.causal else min(length, at.stop + around))


def _mix_piece(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    how: Mixing,
    at: range,
    others: range,
) -> torch.Tensor:
    """`mix` of the queries at the places `at` with the keys of the places `others`; `mask` is the mask of these."""
    grouped = query.shape[1] != key.shape[1]
    window = how.window if how.window is not None and how.window < len(others) else None
    at_the_end = how.causal and mask is None and at.start > others.start
    if at_the_end and window is None and _flash_takes(query, key, value, how.dropout, grouped):
        # Its own operator puts the causal mask at the end of the keys; what is called below, at their beginning.
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, how.dropout, True, scale=how.scale)[0]
    if window is not None or at_the_end:
        distance = _places(at, query.device)[:, None] - _places(others, query.device)[None, :]
        if window is None:
            seen = distance >= 0
        else:
            seen = (distance < window) & ((distance >= 0) if how.causal else (distance > -window))
        mask = seen if mask is None else mask & seen
    causal = how.causal and mask is None and len(at) > 1
    if mask is None and takes(query, key, value, how.dropout):
        return cpu_attention(query, key, value, causal=causal, scale=how.scale)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=how.dropout,
        scale=how.scale,
        is_causal=causal,
        enable_gqa=grouped,
    )


def _flash_takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, grouped: bool) -> bool:
    """Whether FlashAttention 2 runs here on such heads: on a GPU, in half precision, of widths that it has."""
    if query.device.type != "cuda" or query.shape[-1] % 8:
        return False
    return bool(can_use_flash_attention(SDPAParams(query, key, value, None, dropout, False, grouped)))


def _places(span: range, device: torch.device) -> torch.Tensor:
    return torch.arange(span.start, span.stop, device=device)


def query_places(part: int, device: torch.device) -> torch.Tensor:
    """int64 (queries,): the places in the sequence that the rows of a mask stand for.

    `part` is the number of tokens that this process holds of each sequence: all of them, unless an exchange is in
    force.
    """
    spans = [range(part)] if _in_force is None else _in_force.queries(part)
    return torch.cat([_places(span, device) for span in spans])


@cache
def _compiled_flex() -> Any:
    """FlexAttention is a kernel only when it is compiled; for layers that are not compiled themselves."""
    return torch.compile(flex_attention, dynamic=False)


def block_mask(documents: torch.Tensor, places: torch.Tensor, *, causal: bool) -> BlockMask:
    """Which blocks of 128 tokens see which, where tokens see their own document alone.

    documents int64 (rows, length): the number of each token's document; places int64 (queries,): where the tokens that
    see stand among them.
    """
    every = len(places) == documents.shape[1]  # then they stand in order, and the kernel need not look it up

    def seen(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        at = query if every else places[query]
        same = documents[row, at] == documents[row, other]
        return same & (at >= other) if causal else same

    rows, length = documents.shape
    mask = create_block_mask(seen, rows, None, len(places), length, device=documents.device)
    mask.ndim = 4  # type: ignore[attr-defined]  # GPT-2 asks for it, to tell finished masks from padding
    return mask


def takes_block_masks(model: PreTrainedModel) -> bool:
    """Whether documents are kept apart by FlexAttention: on a GPU, by `attention`, with what it can do.

    It knows no dropout, and a window would need a block mask of its own. `allow_block_masks` can decide otherwise.
    """
    on_gpu = model.device.type == "cuda"  # on a CPU FlexAttention has no backward (torch 2.13)
    return (
        model.config._attn_implementation == NAME
        and _BLOCK_MASKS.get(model, on_gpu)
        and getattr(model.config.get_text_config(), "sliding_window", None) is None
        and attention_dropout(model) == 0.0
    )


def attention_dropout(model: PreTrainedModel) -> float:
    """The share of a model's attention that is dropped in training, by any of the names that configurations have."""
    config = model.config.get_text_config()
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    return max(float(getattr(config, name, None) or 0.0) for name in names)


_BLOCK_MASKS: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def allow_block_masks(model: PreTrainedModel, allowed: bool) -> None:
    """Whether this model may get block masks from now on, whatever its device is.

    False where its code does something to masks that tensors alone can; True for a forward pass on a CPU.
    """
    _BLOCK_MASKS[model] = allowed


def preferred_kernels(device: torch.device) -> AbstractContextManager[None]:
    """PyTorch's order among kernels: from Hopper on, cuDNN's is written for the chip; FlashAttention 2 not."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        order = [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ]
        return sdpa_kernel(order, set_priority=True)
    return nullcontext()


def attention_choice(model: PreTrainedModel, device: torch.device, *, documents: bool = False) -> Choice:
    """What computes the attention of a model that is trained, and why; `documents`: they are kept apart."""
    implementation = model.config._attn_implementation
    if implementation != NAME:
        if implementation == MASKED_NAME:
            return Choice("scaled_dot_product_attention", "an encoder: padding and documents come as a mask")
        return Choice(implementation, f"{model.config.model_type} has attention of its own")
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    if documents and takes_block_masks(model):
        return Choice("FlexAttention", "documents are kept apart by blocks, which skips what no token sees")
    if documents or window is not None:
        why = "documents are kept apart" if documents else f"a window of {window} tokens, where blocks are longer"
        return Choice("scaled_dot_product_attention with a mask", why)
    kernel = "PyTorch's kernel for processors"
    if device.type == "cuda":
        kernel = "cuDNN" if torch.cuda.get_device_capability(device) >= (9, 0) else "FlashAttention 2"
    why = "causal: no mask is made" if model.can_generate() else "no mask is made"
    return Choice(f"scaled_dot_product_attention ({kernel})", why)
