"""One attention function for training, registered with transformers under the name `artel`.

It is registered in `AttentionInterface` only: transformers then builds no T×T mask for it, and PyTorch's causal fast
path stays open. A model that needs more than a causal mask (a sliding window) gets its mask made here. Masks that are
made for it, (rows, 1, length, length), come through transformers as they are; the window is added to them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PreTrainedModel

NAME = "artel"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query (rows, heads, length, size), key and value (rows, key heads, length, size) -> query's, heads third."""
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
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed.transpose(1, 2).contiguous(), None


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
