"""peft's linear layers with adapters, whose forward and backward pass keep and copy less.

The function is peft's: outputs = x W' + s (x A') B'. Autograd and autocast take it as seven operators. Each layer then
rounds its input to 16 bits twice, and keeps a copy of its own for the gradient of A, though queries, keys and values
read the same input; and s and the sum are passes of their own over the outputs, forward and backward. Here layers with
one input share its copy, and an s that is a power of two, which rounds nothing, is multiplied into other passes.
Outputs are bit for bit those of peft, and so are gradients but for the order of the sum of an input's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from artel.models.device import autocast_is_on
from artel.models.half_base import HalfLinear
from artel.models.rounded_inputs import rounded


def use_one_function(model: nn.Module) -> None:
    """Let the adapters of a model's linear layers be computed with their layers by one function, where they can be."""
    for module in model.modules():
        if type(module) is Linear and type(module.base_layer) in (nn.Linear, HalfLinear):
            module.__class__ = LoraLinear


class LoraLinear(Linear):
    """A linear layer with an adapter. What `_Outputs` does not know is left to peft, and so is what needs no gradient.

    torch.compile, too, traces what peft does: it fuses operators, and decides itself what is kept.
    """

    def forward(self, x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        adapter = None if arguments or options else self._plain_adapter()
        autocast = autocast_is_on(x.device.type)
        # Without autocast peft computes an adapter in the adapter's own dtype.
        if adapter is None or not (autocast or x.dtype == self.lora_A[adapter].weight.dtype):
            other: torch.Tensor = super().forward(x, *arguments, **options)
            return other
        base = self.base_layer
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        narrow, wide = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        outputs: torch.Tensor = _Outputs.apply(
            x, rounded(x, dtype), base.weight, base.bias, narrow, wide, self.scaling[adapter]
        )
        return outputs

    def _plain_adapter(self) -> str | None:
        """The name of the only adapter of a layer that is frozen, whole and without hooks; None for others."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.disable_adapters or self.merged:
            return None
        active = [name for name in self.active_adapters if name in self.lora_A]
        if len(active) != 1:
            return None
        (name,) = active
        dropout = self.lora_dropout[name]
        modules = (self.base_layer, self.lora_A[name], self.lora_B[name], dropout)
        tensors = [tensor for module in modules for tensor in module.parameters(recurse=False)]
        is_plain = (
            type(self.base_layer) in (nn.Linear, HalfLinear)
            and name not in self.lora_variant
            and not self.lora_bias[name]
            and (isinstance(dropout, nn.Identity) or not self.training)
            and not any(tensor.requires_grad for tensor in self.base_layer.parameters(recurse=False))
            and not any(isinstance(tensor, DTensor) for tensor in tensors)
            and not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
        )
        return name if is_plain else None


class _Outputs(torch.autograd.Function):
    """x (…, inputs), and the same in the dtype of the products; weight (outputs, inputs), narrow (rank, inputs)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        rounded: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        narrow: torch.Tensor,
        wide: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        dtype, ctx.scaling, ctx.dtype = rounded.dtype, scaling, x.dtype
        matrix = weight.to(dtype)
        outputs = F.linear(rounded, matrix, None if bias is None else bias.to(dtype))
        inner = F.linear(rounded, narrow.to(dtype))
        change = F.linear(inner, wide.to(dtype))
        # A matrix that is rounded is kept so; one that is held in 16 bits is not kept in float32.
        kept = weight if dtype == torch.float32 else matrix
        ctx.save_for_backward(rounded, kept, narrow, wide, inner)
        return torch.add(outputs, change, alpha=scaling) if _rounds_nothing(scaling) else outputs + change * scaling

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rounded, weight, narrow, wide, inner = ctx.saved_tensors
        dtype, needs = rounded.dtype, ctx.needs_input_grad
        grad = grad_output.reshape(-1, grad_output.shape[-1])
        scaled, factor = (grad, ctx.scaling) if _rounds_nothing(ctx.scaling) else (grad * ctx.scaling, 1.0)
        grad_inner = (scaled @ wide.to(dtype)).mul_(factor)
        grad_x = grad_narrow = grad_wide = None
        if needs[0]:
            product = grad @ weight.to(dtype)
            grad_x = product.to(ctx.dtype).add_(grad_inner @ narrow.to(dtype)).view(rounded.shape)
        if needs[4]:
            grad_narrow = (grad_inner.T @ rounded.reshape(-1, rounded.shape[-1])).to(narrow.dtype)
        if needs[5]:
            grad_wide = (scaled.T @ inner.view(-1, inner.shape[-1])).mul_(factor).to(wide.dtype)
        return grad_x, None, None, None, grad_narrow, grad_wide, None


def _rounds_nothing(factor: float) -> bool:
    """Whether a product with `factor` is exact: for powers of two."""
    return abs(math.frexp(factor)[0]) == 0.5
