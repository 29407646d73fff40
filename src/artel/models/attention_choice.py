"""What computes the attention of a model in training, in words, and which of PyTorch's kernels it prefers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from artel.models.attention import MASKED_NAME, NAME
from artel.models.attention_masks import takes_block_masks
from artel.models.choice import Choice


def preferred_kernels(device: torch.device) -> AbstractContextManager[None]:
    """A context in which PyTorch prefers cuDNN from Hopper on: FlashAttention 2 is not written for these GPUs."""
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
        kernel = "cuDNN" if torch.cuda.get_device_capability(device) >= (9, 0) else "FlashAttention 2"
    why = "causal: no mask is made" if model.can_generate() else "no mask is made"
    return Choice(f"scaled_dot_product_attention ({kernel})", why)
