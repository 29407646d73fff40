"""One attention function for training, registered with transformers under the name `artel`.

It is registered in `AttentionInterface` only: transformers then builds no T×T mask for it, and PyTorch's causal fast
path stays open (133 ms instead of 46 ms of attention a step were measured with the mask, on an H200 with a Llama of 1.5
billion parameters). A model that needs more than a causal mask (a sliding window) gets its mask made here. Masks that
are made for it come through transformers as they are: tensors (rows, 1, length, length), to which the window is added,
and block masks of FlexAttention.

Which kernel runs:
    causal, or all of it            scaled_dot_product_attention without a mask: cuDNN or FlashAttention 2 on a GPU
    a sliding window, a mask        scaled_dot_product_attention with a mask (rows, 1, length, length)
    documents on a GPU              FlexAttention, which skips what no token sees (Dong et al. 2024)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, PreTrainedModel

from artel.models.choice import Choice

NAME = "artel"
_BLOCK_MASK_DEVICES = ("cuda",)  # on a CPU FlexAttention has no backward (torch 2.13)


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
    grouped = query.shape[1] != key.shape[1]
    if isinstance(attention_mask, BlockMask):
        flex = flex_attention if torch.compiler.is_compiling() or query.device.type == "cpu" else _compiled_flex()
        mixed = flex(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=grouped)
        return mixed.transpose(1, 2).contiguous(), None
    causal = module.is_causal if is_causal is None else is_causal
    length = query.shape[2]
    if sliding_window is not None and sliding_window < length:
        positions = torch.arange(length, device=query.device)
        distance = positions[:, None] - positions[None, :]
        window = (distance < sliding_window) & ((distance >= 0) if causal else (distance > -sliding_window))
        attention_mask = window if attention_mask is None else attention_mask & window
    mixed = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=bool(causal) and attention_mask is None and length > 1,
        enable_gqa=grouped,
    )
    return mixed.transpose(1, 2).contiguous(), None


@cache
def _compiled_flex() -> Any:
    """FlexAttention is a kernel only when it is compiled; for layers that are not compiled themselves."""
    return torch.compile(flex_attention, dynamic=False)


def block_mask(documents: torch.Tensor, *, causal: bool) -> BlockMask:
    """Which blocks of 128 tokens see which, where tokens see their own document alone.

    documents int64 (rows, length): the number of each token's document.
    """

    def seen(row: torch.Tensor, _: torch.Tensor, at: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        same = documents[row, at] == documents[row, other]
        return same & (at >= other) if causal else same

    rows, length = documents.shape
    mask = create_block_mask(seen, rows, None, length, length, device=documents.device)
    mask.ndim = 4  # type: ignore[attr-defined]  # GPT-2 asks for it, to tell finished masks from padding
    return mask


def takes_block_masks(model: PreTrainedModel) -> bool:
    """Whether documents are kept apart by FlexAttention: on a GPU, by `attention`, with what it can do.

    It knows no dropout, and a window would need a block mask of its own. Nor must the model have failed with one.
    """
    if model in _WITHOUT_BLOCK_MASKS:
        return False
    config = model.config.get_text_config()
    dropout = max(float(getattr(config, name, None) or 0.0) for name in ("attention_dropout", "attn_pdrop"))
    return (
        model.config._attn_implementation == NAME
        and model.device.type in _BLOCK_MASK_DEVICES
        and getattr(config, "sliding_window", None) is None
        and dropout == 0.0
    )


_WITHOUT_BLOCK_MASKS: WeakSet[PreTrainedModel] = WeakSet()


def refuse_block_masks(model: PreTrainedModel) -> None:
    """Give this model masks that are tensors from now on: its code does something to them that block masks cannot."""
    _WITHOUT_BLOCK_MASKS.add(model)


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


def use_for_training(model: PreTrainedModel) -> bool:
    """Switch a decoder to this function; False when its architecture has only attention of its own.

    Encoders keep transformers' own: their padding needs the masks that are made for it.
    """
    AttentionInterface.register(NAME, attention)
    if not model.can_generate():
        return False
    if not getattr(model, "_supports_sdpa", False) or not getattr(model, "_supports_attention_backend", True):
        return False
    try:
        model.set_attn_implementation(NAME)
    except (ValueError, KeyError):
        return False
    return True


def attention_choice(model: PreTrainedModel, device: torch.device, *, documents: bool = False) -> Choice:
    """What computes the attention of a model that is trained, and why; `documents`: they are kept apart."""
    implementation = model.config._attn_implementation
    if implementation != NAME:
        if implementation == "sdpa":
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
    return Choice(f"scaled_dot_product_attention ({kernel})", "causal: no mask is made")
