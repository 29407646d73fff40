"""Choose the attention mask for rows with several documents, or several answers to one prompt."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from artel.models import Choice
from artel.models.attention import MASKED_NAME, NAME, is_exchanging

_MIN_HEAD_SIZE = 16
"""The smallest head that FlexAttention's GPU kernels take (PyTorch 2.11)."""
_BLOCK_MASKS: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()
"""Override per model, set by `allow_block_masks`."""


def attention_choice(model: PreTrainedModel, device: torch.device, *, documents: bool = False) -> Choice:
    """Choose the attention kernel for training, with the reason. `documents`: tokens see only their own document."""
    implementation = model.config._attn_implementation
    if implementation != NAME:
        if implementation == MASKED_NAME:
            return Choice("scaled_dot_product_attention", "encoder: padding and document boundaries need a mask")
        return Choice(implementation, f"{model.config.model_type} has its own attention")
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    if documents and takes_block_masks(model):
        return Choice("FlexAttention", "documents are kept apart by blocks; blocks that no token sees are skipped")
    if documents and device.type == "cpu":
        return Choice("one document at a time", "documents are kept apart, and masked scores are not computed")
    if documents or window is not None:
        why = "documents are kept apart" if documents else f"a window of {window} tokens, shorter than the blocks"
        return Choice("scaled_dot_product_attention with a mask", why)
    kernel = "PyTorch's CPU kernel"
    if device.type == "cuda":
        kernel = "cuDNN or FlashAttention 2, as PyTorch chooses"
    why = "causal: no mask is made" if model.can_generate() else "no mask is made"
    return Choice(f"scaled_dot_product_attention ({kernel})", why)


def takes_block_masks(model: PreTrainedModel, device: str | None = None) -> bool:
    """True if FlexAttention keeps documents apart: with artel's attention on a GPU, if it supports the model.

    It has no dropout, its GPU kernels need heads of at least 16, and a window would need its own block mask.
    `allow_block_masks` overrides the choice. `device`: the type of device the model will run on (default: its own).
    """
    on_gpu = (device or model.device.type) == "cuda"  # on a CPU FlexAttention has no backward (torch 2.13)
    config = model.config.get_text_config()
    return (
        model.config._attn_implementation == NAME
        and _BLOCK_MASKS.get(model, on_gpu)
        and getattr(config, "sliding_window", None) is None
        and attention_dropout(model) == 0.0
        and (not on_gpu or _head_size(model) >= _MIN_HEAD_SIZE)
    )


def _head_size(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def takes_document_numbers(model: PreTrainedModel) -> bool:
    """True if document numbers are enough to keep documents apart: with artel's attention on a CPU, on whole sequences.

    Not for an encoder with a window: its mask has to include the window, which numbers cannot.
    """
    config = model.config.get_text_config()
    implementation = model.config._attn_implementation
    has_window = getattr(config, "sliding_window", None) is not None
    return (
        model.device.type == "cpu"
        and (implementation == NAME or (implementation == MASKED_NAME and not has_window))
        and not is_exchanging()
        and model not in _BLOCK_MASKS
    )


def takes_branches(model: PreTrainedModel, device: str | None = None) -> bool:
    """True if branch numbers are enough to keep branches apart: with artel's attention on a CPU, on whole sequences.

    `device` as for `takes_block_masks`.
    """
    return (
        (device or model.device.type) == "cpu"
        and model.config._attn_implementation == NAME
        and not is_exchanging()
        and model not in _BLOCK_MASKS
    )


def attention_dropout(model: PreTrainedModel) -> float:
    """Return a model's attention dropout, 0 to 1, under any of the names that configurations use."""
    config = model.config.get_text_config()
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    return max(float(getattr(config, name, None) or 0.0) for name in names)


def allow_block_masks(model: PreTrainedModel, allowed: bool) -> None:
    """Override the choice of block masks for this model, on any device. It gets no document numbers from now on.

    Pass False if its code modifies masks in a way that only bool masks support, True to run forward passes on a CPU.
    """
    _BLOCK_MASKS[model] = allowed
