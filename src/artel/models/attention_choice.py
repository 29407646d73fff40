"""What computes the attention of a model in training, in words."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from artel.models.attention import MASKED_NAME, NAME
from artel.models.attention_masks import takes_block_masks
from artel.models.choice import Choice


def attention_choice(model: PreTrainedModel, device: torch.device, *, documents: bool = False) -> Choice:
    """What computes the attention of a model in training, and why. `documents`: they must not see one another."""
    implementation = model.config._attn_implementation
    if implementation != NAME:
        if implementation == MASKED_NAME:
            return Choice("scaled_dot_product_attention", "an encoder: padding and documents come as a mask")
        return Choice(implementation, f"{model.config.model_type} has attention of its own")
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    if documents and takes_block_masks(model):
        return Choice("FlexAttention", "documents are kept apart by blocks; blocks that no token sees are skipped")
    if documents and device.type == "cpu":
        return Choice("a document at a time", "documents are kept apart, and what one does not see is not computed")
    if documents or window is not None:
        why = "documents are kept apart" if documents else f"a window of {window} tokens, where blocks are longer"
        return Choice("scaled_dot_product_attention with a mask", why)
    kernel = "PyTorch's kernel for processors"
    if device.type == "cuda":
        kernel = "cuDNN or FlashAttention 2, as PyTorch chooses"
    why = "causal: no mask is made" if model.can_generate() else "no mask is made"
    return Choice(f"scaled_dot_product_attention ({kernel})", why)
