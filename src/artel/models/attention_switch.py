"""Switching a model to artel's attention, where that computes what the model's own attention does.

A decoder then gets no masks: `is_causal` and the window that a layer names say which tokens see which. The masks of
some architectures say more (chunks, a window that layers do not name); others read the mask or choose keys themselves.
So each model runs once on a few tokens, and `_Probe` compares the masks it makes with what reaches its attention.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from artel.models.attention import MASKED_NAME, NAME, attention
from artel.models.evaluating import evaluating

_PROBE = "artel_probe"
_TOKENS = 4
# Layer types of transformers with causal attention, up to a window, or without attention.
_PLAIN = {"full_attention", "sliding_attention", "linear_attention", "conv", "moe", "hybrid", "hybrid_sliding"}


def use_for_training(model: PreTrainedModel, *, encoders: bool = False) -> bool:
    """Switch a model to artel's attention. Returns False, and changes nothing, where its architecture has its own.

    Encoders keep the masks of transformers, for padding. With `encoders` they do not: then a two-dimensional mask in
    the model's inputs is ignored. Encoder-decoders and their parts keep their attention: it looks at two
    sequences, and adds a bias to pairs of positions (T5).
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
    """`attention` with a mask that includes the window already."""
    return attention(module, query, key, value, attention_mask, **options)


def _needs_no_mask(model: PreTrainedModel) -> bool:
    """Whether a decoder's masks say no more than `is_causal` and its layers' windows, tested on a few tokens.

    It needs shapes alone, so it is run on the meta device, which takes no time. Where that cannot be (code that looks
    at what it is given, quantized layers, which keep what they see) it is run where it is; a model that does not run
    at all is classified by its layers' types, and one without such types keeps its masks.
    """
    before = model.config._attn_implementation
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    attempts = [tensors]
    if not getattr(model, "is_quantized", False):
        attempts.insert(0, {name: _on_meta(tensor) for name, tensor in tensors.items()})
    for attempt in attempts:
        probe = _Probe()
        AttentionInterface.register(_PROBE, probe.attention)
        AttentionMaskInterface.register(_PROBE, probe.mask)
        model.set_attn_implementation(_PROBE)
        try:
            _run(model, attempt)
            return probe.fits
        except Exception:  # each architecture fails in its own way, and will say why when it is trained
            continue
        finally:
            model.set_attn_implementation(before)
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return bool(kinds) and set(kinds) <= _PLAIN


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device. Floats are bf16, the only precision in which it multiplies experts together."""
    return tensor.to("meta", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)


def _run(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Run the model on a few tokens with these parameters and buffers."""
    vocabulary = model.config.get_text_config().vocab_size
    device = next(iter(tensors.values())).device
    ids = vocabulary // 2 + torch.arange(min(_TOKENS, vocabulary // 2), device=device)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with evaluating(model):
        torch.func.functional_call(model, tensors, (), inputs)


class _Probe:
    """Full masks as transformers makes them, and an attention function that checks whether it needs them."""

    def __init__(self) -> None:
        self.fits = True
        self._masks: list[tuple[torch.Tensor, int | None]] = []

    def mask(
        self, *arguments: Any, local_size: int | None = None, allow_is_causal_skip: bool = True, **more: Any
    ) -> torch.Tensor:
        """A mask as transformers makes it. A mask that may not be skipped is needed."""
        self.fits &= allow_is_causal_skip
        mask = sdpa_mask(*arguments, local_size=local_size, allow_is_causal_skip=False, **more)
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
        """Check that the mask arrives as it was made, for the window that the layer names."""
        if self._masks:
            self.fits &= any(
                attention_mask is not None and window == sliding_window and _is_same(attention_mask, mask)
                for mask, window in self._masks
            )
        return attention(module, query, key, value, attention_mask, sliding_window=sliding_window, **options)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether it is that mask itself. Another one may have its values for so few tokens: chunks of 8,192, and all."""
    is_view = one.untyped_storage()._cdata == other.untyped_storage()._cdata
    return is_view and one.shape == other.shape and one.dtype == other.dtype
