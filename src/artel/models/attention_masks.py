"""Which masks a model gets, so that its documents, or answers behind one prompt, see nothing of one another."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from artel.models.attention import MASKED_NAME, NAME, is_exchanging

_NARROWEST_HEAD = 16
"""Of FlexAttention's kernels on a GPU (seen with PyTorch 2.11)."""
_BLOCK_MASKS: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def takes_block_masks(model: PreTrainedModel, device: str | None = None) -> bool:
    """Whether documents are kept apart by FlexAttention: on a GPU, by `attention`, with what it can do.

    It knows no dropout, on a GPU no heads of fewer than 16 numbers, and a window would need a block mask of its own.
    `allow_block_masks` can decide otherwise.
    `device` is the type of the device that the model will be on; by default, that it is on.
    """
    on_gpu = (device or model.device.type) == "cuda"  # on a CPU FlexAttention has no backward (torch 2.13)
    return (
        model.config._attn_implementation == NAME
        and _BLOCK_MASKS.get(model, on_gpu)
        and getattr(model.config.get_text_config(), "sliding_window", None) is None
        and attention_dropout(model) == 0.0
        and (not on_gpu or _head_size(model) >= _NARROWEST_HEAD)
    )


def _head_size(model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def takes_document_numbers(model: PreTrainedModel) -> bool:
    """Whether documents are kept apart by their numbers alone: on a CPU, by `attention` over whole sequences.

    Where the masks of an encoder include its window, the numbers would not.
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
    """Whether branches of documents are kept apart by their numbers: on a CPU, by `attention` over whole sequences.

    `device` as for `takes_block_masks`.
    """
    return (
        (device or model.device.type) == "cpu"
        and model.config._attn_implementation == NAME
        and not is_exchanging()
        and model not in _BLOCK_MASKS
    )


def attention_dropout(model: PreTrainedModel) -> float:
    """A model's attention dropout, 0 to 1, under any of the names that configurations use."""
    config = model.config.get_text_config()
    names = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    return max(float(getattr(config, name, None) or 0.0) for name in names)


def allow_block_masks(model: PreTrainedModel, allowed: bool) -> None:
    """Whether this model may get block masks from now on, whatever its device is; in place of documents' numbers.

    False where its code does something to masks that masks of bool alone can; True for a forward pass on a CPU.
    """
    _BLOCK_MASKS[model] = allowed
