"""Activation checkpointing: recompute activations in the backward pass to save memory (Chen et al. 2016).

It wraps each layer's `forward` inside the region that torch.compile compiles. A checkpoint around a compiled layer
would see no operators, and `selective` decides by operator (pytorch/pytorch issue 161889).
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from functools import cache, partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from artel.errors import InputError
from artel.messages import Phrase
from artel.models.half_base import free_rounded

Recompute = Literal["none", "selective", "full"]

# `selective` saves matmuls and attention of any library, matched by the end of the operator's name
# (aten::addmm, aten::_scaled_mm, aten::_scaled_dot_product_flash_attention_for_cpu, flash_attn::_flash_attn_forward).
_SAVED_OPERATORS = re.compile(r"mm(_v\d+)?$|addmm|matmul|attention|flash_attn")
# Except matmuls whose inner dimension is at most _MAX_NARROW_COLUMNS and a quarter of both output dimensions. An
# adapter's matmul costs no more than an elementwise operation, and its result is as large as that of the layer.
_MAX_NARROW_COLUMNS = 64
_HOOK_ATTRIBUTE = "_artel_recompute_hook"


class SelectiveUnsupported(InputError):
    """Raised for a model whose layers modify in place a result that `selective` saves."""


def recompute(model: PreTrainedModel, mode: Recompute) -> str:
    """Choose what a model's layers recompute in the backward pass. Return a description.

    `none` saves everything. `selective` saves the results of matmuls and attention, and recomputes elementwise
    operations and adapters. `full` saves only the input of each layer. Call it before the layers are compiled; a later
    call replaces an earlier one. If transformers marks an architecture as not supporting it, nothing changes and the
    description begins with `none`.

    Loss and gradients are the same in every mode, also with dropout and with frozen embeddings. Without gradients
    (validation, generation) nothing changes. If uncompiled layers modify in place a result that `selective` saves, the
    first forward pass raises SelectiveUnsupported.
    """
    layers = _find_layers(model)
    for layer in layers:
        layer.__dict__.pop("forward", None)
    if _HOOK_ATTRIBUTE in model.__dict__:
        model.__dict__.pop(_HOOK_ATTRIBUTE).remove()
    if mode == "none":
        return "none"
    if not layers:
        return Phrase("none ({model} does not support it)", model=model.config.model_type)
    for layer in layers:
        layer.forward = MethodType(_make_forward(type(layer).forward, mode), layer)
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.__dict__[_HOOK_ATTRIBUTE] = model.register_forward_pre_hook(_disable_cache, with_kwargs=True)
    if mode == "selective":
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_drop_in_place_warning)
    return Phrase("{mode}, {count} layers", mode=mode, count=len(layers))


def _find_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the outermost layers that transformers can checkpoint."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner_modules = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    return (
        [layer for layer in layers if id(layer) not in inner_modules] if model.supports_gradient_checkpointing else []
    )


def _drop_in_place_warning(record: logging.LogRecord) -> bool:
    """Drop PyTorch's warning about in-place operations in compiled layers: the results are correct (tested)."""
    return "context_fn" not in str(record.msg)


def _disable_cache(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Disable the KV cache: a layer that runs twice would append its keys twice. Encoder-decoders use it by default."""
    return args, {"use_cache": False, **kwargs} if torch.is_grad_enabled() else kwargs


@cache  # one function for all layers of a class, so that they compile to one graph
def _make_forward(forward: Callable[..., Any], mode: Recompute) -> Callable[..., Any]:
    options: dict[str, Any] = {"context_fn": _make_selective_contexts} if mode == "selective" else {}

    def checkpointed(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(layer, *args, **kwargs)
        if mode == "selective" and not torch.compiler.is_compiling():
            # With weights that autocast cached earlier, this pass would have no cast where the recomputation has one,
            # and PyTorch compares the operators of both.
            torch.clear_autocast_cache()
        output = checkpoint(partial(forward, layer, **kwargs), *args, use_reentrant=False, **options)
        if not torch.compiler.is_compiling():
            free_rounded((*args, *kwargs.values()))  # inputs stay in memory; the backward pass rounds them again
        return output

    return checkpointed


def _make_selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_Policy())


_make_selective_contexts.cache_hash = f"artel:{_SAVED_OPERATORS.pattern}:{_MAX_NARROW_COLUMNS}"  # type: ignore[attr-defined]  # without it the compiler does not cache on disk


class _Policy:
    """Decides which results of one run of a layer are saved.

    It refuses operators that modify a saved result in place. PyTorch checks version counters, but the result of a
    linear layer without bias gets a new counter (`_unsafe_view`), so the gradients would use overwritten values.
    """

    def __init__(self) -> None:
        self._saved: set[int] = set()

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if is_matmul_or_attention(operator) and not _is_narrow(operator, args):
            self._saved |= _storages(context.op_output)
            return CheckpointPolicy.MUST_SAVE
        if _is_in_place(operator) and not torch.compiler.is_compiling() and self._saved & _storages(args[0]):
            what = f"selective: this model modifies the result of a matrix product in place ({operator})"
            raise SelectiveUnsupported.at("train.activation_checkpointing", what, "write full, or train.compile: on")
        return CheckpointPolicy.PREFER_RECOMPUTE


@cache
def is_matmul_or_attention(operator: Any) -> bool:
    """True for a matmul or attention, by the operator's name without its overload: aten::mm for aten::mm.out."""
    return _SAVED_OPERATORS.search(operator.name().partition(".")[0]) is not None


def _is_narrow(operator: Any, args: tuple[Any, ...]) -> bool:
    """True for a matmul of (rows, inner) and (inner, columns) with a small inner dimension."""
    if operator not in _MATMULS:
        return False
    (rows, inner), columns = args[-2].shape, args[-1].shape[1]
    return inner <= min(_MAX_NARROW_COLUMNS, rows // 4, columns // 4)


_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@cache
def _is_in_place(operator: Any) -> bool:
    return isinstance(operator, torch._ops.OpOverload) and operator._schema.is_mutable


def _storages(output: Any) -> set[int]:
    tensors = output if isinstance(output, tuple | list) else [output]
    return {tensor.untyped_storage()._cdata for tensor in tensors if isinstance(tensor, torch.Tensor)}
