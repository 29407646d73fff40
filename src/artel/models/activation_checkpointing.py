"""Activation checkpointing: compute activations again in the backward pass to save memory (Chen et al. 2016).

It wraps each layer's own `forward`, inside what torch.compile compiles. A checkpoint around a compiled layer sees no
operators, which `selective` decides by (pytorch/pytorch issue 161889).
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
from artel.models.rounded_inputs import forget_rounded

Recompute = Literal["none", "selective", "full"]

# What `selective` keeps: matrix products and attention of any library, by the end of the operator's name
# (aten::addmm, aten::_scaled_mm, aten::_scaled_dot_product_flash_attention_for_cpu, flash_attn::_flash_attn_forward).
_KEPT = re.compile(r"mm(_v\d+)?$|addmm|matmul|attention|flash_attn")
# It does not keep a product of two matrices that share a side of at most _NARROW, and a quarter of what they give: that
# of an adapter, which costs no more than an elementwise pass and is as large as its layer's own.
_NARROW = 64
_HOOK = "_artel_recompute_hook"


class NotSelective(InputError):
    """A model whose layers write into what `selective` would keep."""


def recompute(model: PreTrainedModel, how: Recompute) -> str:
    """Choose what a model's layers compute again in the backward pass. Returns what was done, in words.

    `none` keeps everything; `selective` keeps the results of matrix products and of attention, and computes the
    elementwise rest and adapters again; `full` keeps only a layer's input. Call it before the layers are compiled; a
    later call replaces an earlier one. Where transformers says that an architecture's layers cannot run twice, it does
    nothing and the words begin with `none`.

    Loss and gradients equal those of `none`, also with dropout and with frozen embeddings. Without gradients
    (validation, generation) nothing changes. Where layers that are not compiled write into a result that `selective`
    keeps, the first forward pass raises NotSelective.
    """
    layers = _layers(model)
    for layer in layers:
        layer.__dict__.pop("forward", None)
    if _HOOK in model.__dict__:
        model.__dict__.pop(_HOOK).remove()
    if how == "none":
        return "none"
    if not layers:
        return f"none ({model.config.model_type} does not support it)"
    for layer in layers:
        layer.forward = MethodType(_recomputing(type(layer).forward, how), layer)
    if "use_cache" in inspect.signature(model.forward).parameters:
        model.__dict__[_HOOK] = model.register_forward_pre_hook(_without_cache, with_kwargs=True)
    if how == "selective":
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_no_advice)
    return f"{how}, {len(layers)} layers"


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers that transformers can checkpoint, without those inside another one."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    return [layer for layer in layers if id(layer) not in inner] if model.supports_gradient_checkpointing else []


def _is_no_advice(line: logging.LogRecord) -> bool:
    """Drops PyTorch's warning about compiled layers that write in place: they are computed correctly (tested)."""
    return "context_fn" not in str(line.msg)


def _without_cache(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Turns the cache off. A layer that runs twice would add its keys twice. Encoder-decoders use it by default."""
    return args, {"use_cache": False, **kwargs} if torch.is_grad_enabled() else kwargs


@cache  # one function for all layers of a class, so that they compile to one graph
def _recomputing(plain: Callable[..., Any], how: Recompute) -> Callable[..., Any]:
    options: dict[str, Any] = {"context_fn": _selective} if how == "selective" else {}

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(layer, *args, **kwargs)
        if how == "selective" and not torch.compiler.is_compiling():
            # Autocast keeps the rounded weights of an earlier forward pass, and the backward pass would round them
            # where this one did not: PyTorch compares the operators of both.
            torch.clear_autocast_cache()
        output = checkpoint(partial(plain, layer, **kwargs), *args, use_reentrant=False, **options)
        if not torch.compiler.is_compiling():
            forget_rounded((*args, *kwargs.values()))  # these are kept, and rounded once more in the backward pass
        return output

    return forward


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_Policy())


_selective.cache_hash = f"artel:{_KEPT.pattern}:{_NARROW}"  # type: ignore[attr-defined]  # without it nothing compiled is cached on disk


class _Policy:
    """Decides which results of one run of a layer are kept.

    It refuses operators that write into a kept result. PyTorch checks version counters, but the result of a linear
    layer without bias has a new one (`_unsafe_view`), so gradients would come from the overwritten values.
    """

    def __init__(self) -> None:
        self._kept: set[int] = set()

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if is_product(operator) and not _is_narrow(operator, args):
            self._kept |= _storages(context.op_output)
            return CheckpointPolicy.MUST_SAVE
        if _writes(operator) and not torch.compiler.is_compiling() and self._kept & _storages(args[0]):
            what = f"selective: this model writes into the result of a matrix product ({operator})"
            raise NotSelective.at("train.activation_checkpointing", what, "write full, or train.compile: on")
        return CheckpointPolicy.PREFER_RECOMPUTE


@cache
def is_product(operator: Any) -> bool:
    """Whether it is a matrix product or attention, by its name without the overload: aten::mm for aten::mm.out."""
    return _KEPT.search(operator.name().partition(".")[0]) is not None


def _is_narrow(operator: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is the product of two matrices (rows, side) and (side, columns) with a narrow side."""
    if operator not in _PRODUCTS:
        return False
    (rows, side), columns = args[-2].shape, args[-1].shape[1]
    return side <= min(_NARROW, rows // 4, columns // 4)


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


@cache
def _writes(operator: Any) -> bool:
    return isinstance(operator, torch._ops.OpOverload) and operator._schema.is_mutable


def _storages(output: Any) -> set[int]:
    tensors = output if isinstance(output, tuple | list) else [output]
    return {tensor.untyped_storage()._cdata for tensor in tensors if isinstance(tensor, torch.Tensor)}
