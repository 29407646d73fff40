"""Switching a model to artel's attention, where that computes what the model's own attention does.

A decoder then gets no masks: who sees whom is left to `is_causal` and to the window that a layer names. Some
architectures say more than that by their masks (chunks, a window that layers do not name), look into a mask, or choose
keys themselves. So a model is asked: it is run once on a few tokens, and what masks it makes, and what reaches its
attention, is looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from artel.models.attention import MASKED_NAME, NAME, attention

_PROBE = "artel_probe"
_TOKENS = 4
# Layer types of transformers whose attention is causal, up to a window; with those that have no attention.
_PLAIN = {"full_attention", "sliding_attention", "linear_attention", "conv", "moe", "hybrid", "hybrid_sliding"}


def use_for_training(model: PreTrainedModel, *, encoders: bool = False) -> bool:
    """Switch a model to artel's attention; False, and the model as it was, where its architecture has its own.

    Encoders get the masks of transformers with it, which padding needs; with `encoders` they do not, and no mask of two
    dimensions must then be given to them: it would not be obeyed.
    """
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
    **how: Any,
) -> tuple[torch.Tensor, None]:
    """`attention` with a mask that knows of the window already."""
    return attention(module, query, key, value, attention_mask, **how)


def _needs_no_mask(model: PreTrainedModel) -> bool:
    """Whether a decoder's masks say no more than `is_causal` and its layers' windows do; by a run of a few tokens.

    It needs shapes alone, so it is run on the meta device, which takes no time. Where that cannot be (code that looks
    at what it is given, quantized layers, which keep what they see) it is run where it is; a model that does not run
    at all is judged by its layers' types.
    """
    before = model.config._attn_implementation
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    places = [tensors]
    if not getattr(model, "is_quantized", False):
        places.insert(0, {name: _on_meta(tensor) for name, tensor in tensors.items()})
    for moved in places:
        probe = _Probe()
        AttentionInterface.register(_PROBE, probe.attention)
        AttentionMaskInterface.register(_PROBE, probe.mask)
        model.set_attn_implementation(_PROBE)
        try:
            _run(model, moved)
            return probe.fits
        except Exception:  # each architecture fails in its own way, and tells its own reason when it is trained
            continue
        finally:
            model.set_attn_implementation(before)
    return set(getattr(model.config.get_text_config(), "layer_types", None) or ()) <= _PLAIN


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers in bf16: experts are multiplied together in no other precision there."""
    return tensor.to("meta", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)


def _run(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Read a few tokens with these parameters and buffers."""
    vocabulary = model.config.get_text_config().vocab_size
    device = next(iter(tensors.values())).device
    ids = vocabulary // 2 + torch.arange(min(_TOKENS, vocabulary // 2), device=device)[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            torch.func.functional_call(model, tensors, (), inputs)
    finally:
        model.train(was_training)


class _Probe:
    """transformers' masks, made in full, and an attention that notes whether it could do without them."""

    def __init__(self) -> None:
        self.fits = True
        self._made: list[tuple[torch.Tensor, int | None]] = []

    def mask(
        self, *arguments: Any, local_size: int | None = None, allow_is_causal_skip: bool = True, **more: Any
    ) -> torch.Tensor:
        """A mask as transformers makes it; one that may not be left out is needed."""
        self.fits &= allow_is_causal_skip
        made = sdpa_mask(*arguments, local_size=local_size, allow_is_causal_skip=False, **more)
        assert made is not None
        self._made.append((made, local_size))
        return made

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        sliding_window: int | None = None,
        **how: Any,
    ) -> tuple[torch.Tensor, None]:
        """What comes here must be a mask as it was made, for the window that the layer names."""
        if self._made:
            self.fits &= any(
                attention_mask is not None and window == sliding_window and _is_same(attention_mask, made)
                for made, window in self._made
            )
        return attention(module, query, key, value, attention_mask, sliding_window=sliding_window, **how)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and (one.is_meta or torch.equal(one, other))
