"""Switching a model to artel's attention, if the result is the same as with the model's own.

A decoder then gets no masks: visibility follows from `is_causal` and the window that each layer passes. The masks of
some architectures contain more (chunks, a window that layers do not pass); other architectures read the mask or select
keys themselves. So every model runs once on a few tokens, and `_Probe` compares the masks that it builds with those
that reach its attention.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from artel.models import evaluation_mode
from artel.models.attention import MASKED_NAME, NAME, attention

_PROBE_NAME = "artel_probe"
_PROBE_TOKENS = 4
# Layer types of transformers with plain causal attention, at most with a window, or without attention.
_PLAIN_TYPES = {"full_attention", "sliding_attention", "linear_attention", "conv", "moe", "hybrid", "hybrid_sliding"}


def use_artel_attention(model: PreTrainedModel, *, encoders: bool = False) -> bool:
    """Switch a model to artel's attention. Return False, without changes, if its architecture needs its own.

    Encoders keep the masks of transformers, for padding. With `encoders` they do not, and a two-dimensional mask in the
    model's inputs is ignored. Encoder-decoders keep their attention: it covers two sequences and adds a bias to pairs
    of positions (T5).
    """
    if model.config.is_encoder_decoder:
        return False
    AttentionInterface.register(NAME, attention)
    AttentionInterface.register(MASKED_NAME, _masked_attention)
    AttentionMaskInterface.register(MASKED_NAME, sdpa_mask)
    if not getattr(model, "_supports_sdpa", False) or not getattr(model, "_supports_attention_backend", True):
        return False
    name = NAME if encoders or model.can_generate() else MASKED_NAME
    if model.config._attn_implementation == name:
        return True
    try:
        if model.can_generate() and not _needs_no_mask(model):
            return False
        model.set_attn_implementation(name)
    except (ValueError, KeyError):
        return False
    return True


def _masked_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`attention` with a mask that already includes the window."""
    return attention(module, query, key, value, attention_mask, **options)


def _needs_no_mask(model: PreTrainedModel) -> bool:
    """True if a decoder's masks follow from `is_causal` and its layers' windows. Runs it on a few tokens.

    Shapes are enough, so it runs on the meta device, which takes no time. If that fails (code that reads values) or
    layers are quantized (they keep state from their inputs), it runs on its real device. If the model does not
    run here either, its layer types decide; without them it keeps its masks.
    """
    old_implementation = model.config._attn_implementation
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    attempts = [tensors]
    if not getattr(model, "is_quantized", False):
        attempts.insert(0, {name: _to_meta(tensor) for name, tensor in tensors.items()})
    for attempt_tensors in attempts:
        probe = _Probe()
        AttentionInterface.register(_PROBE_NAME, probe.attention)
        AttentionMaskInterface.register(_PROBE_NAME, probe.mask)
        model.set_attn_implementation(_PROBE_NAME)
        try:
            _run(model, attempt_tensors)
            return probe.fits
        except Exception:  # an architecture may raise anything; training will show the error
            continue
        finally:
            model.set_attn_implementation(old_implementation)
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return bool(layer_types) and set(layer_types) <= _PLAIN_TYPES


def _to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the meta device. Floats become bf16: grouped matmuls of experts support nothing else there."""
    return tensor.to("meta", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)


def _run(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Run the model on a few tokens with these parameters and buffers."""
    vocabulary = model.config.get_text_config().vocab_size
    device = next(iter(tensors.values())).device
    ids = vocabulary // 2 + torch.arange(min(_PROBE_TOKENS, vocabulary // 2), device=device)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with evaluation_mode(model):
        torch.func.functional_call(model, tensors, (), inputs)


class _Probe:
    """Builds full masks like transformers, and checks in an attention function whether they are needed."""

    def __init__(self) -> None:
        self.fits = True
        self._masks: list[tuple[torch.Tensor, int | None]] = []

    def mask(
        self, *arguments: Any, local_size: int | None = None, allow_is_causal_skip: bool = True, **options: Any
    ) -> torch.Tensor:
        """Build a mask like transformers. A mask that may not be skipped is needed."""
        self.fits &= allow_is_causal_skip
        mask = sdpa_mask(*arguments, local_size=local_size, allow_is_causal_skip=False, **options)
        assert mask is not None
        self._masks.append((mask, local_size))
        return mask

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Check that the mask arrives unchanged, and was built for the window that the layer passes."""
        if self._masks:
            self.fits &= any(
                attention_mask is not None and window == sliding_window and _is_same(attention_mask, mask)
                for mask, window in self._masks
            )
        return attention(module, query, key, value, attention_mask, sliding_window=sliding_window, **options)


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True for the same storage. Equal values are not enough: a few tokens look the same with chunks of 8,192."""
    is_view = first.untyped_storage()._cdata == second.untyped_storage()._cdata
    return is_view and first.shape == second.shape and first.dtype == second.dtype
