"""peft's layers with adapters, computed with less memory and fewer copies: linear layers and experts.

Linear layers compute the same as peft's: outputs = x W' + s (x A') B'. Autograd and autocast treat it as seven
operators. Each layer rounds its input to 16 bits twice and keeps a separate copy for the gradient of A, though
queries, keys and values have the same input. Scaling and adding are separate passes over the outputs. Here
layers share the copy of their input, and a power-of-two scale, which is exact, is fused into other operations. Outputs
are bitwise those of peft, and so are the gradients, except for the order of summation in an input's gradient.

Adapters of tensors with all experts of a layer are computed only for the chosen experts (`models/experts.py`).
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear, ParamWrapper
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from artel.models.device import autocast_is_on
from artel.models.experts import LowRank, low_rank_change, uses_experts_forward
from artel.models.half_base import HalfLinear, rounded


def patch_lora_linear(model: nn.Module) -> None:
    """Compute each linear layer and its adapter in one autograd function, if possible."""
    for module in model.modules():
        if type(module) is Linear and type(module.base_layer) in (nn.Linear, HalfLinear):
            module.__class__ = LoraLinear


class LoraLinear(Linear):
    """A linear layer with an adapter. Falls back to peft without gradients, or if `_LoraLinearFunction` cannot run.

    torch.compile traces peft's code: it fuses operators and decides itself what to keep.
    """

    def forward(self, x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        adapter = None if arguments or options else self._find_plain_adapter()
        autocast = autocast_is_on(x.device.type)
        # Without autocast peft computes an adapter in the adapter's own dtype.
        if adapter is None or not (autocast or x.dtype == self.lora_A[adapter].weight.dtype):
            peft_outputs: torch.Tensor = super().forward(x, *arguments, **options)
            return peft_outputs
        base = self.base_layer
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
        lora_a, lora_b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        outputs: torch.Tensor = _LoraLinearFunction.apply(
            x, rounded(x, dtype), base.weight, base.bias, lora_a, lora_b, self.scaling[adapter]
        )
        return outputs

    def _find_plain_adapter(self) -> str | None:
        """Return the adapter's name, if the layer is frozen, unsharded, without hooks and has only one adapter."""
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


class _LoraLinearFunction(torch.autograd.Function):
    """LoRA forward and backward. Shapes: x and `rounded`, which is x in the dtype of the matmuls, (…, inputs); weight
    (outputs, inputs); lora_a (rank, inputs).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        rounded: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora_a: torch.Tensor,
        lora_b: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        dtype, ctx.scaling, ctx.dtype = rounded.dtype, scaling, x.dtype
        matrix = weight.to(dtype)
        outputs = F.linear(rounded, matrix, None if bias is None else bias.to(dtype))
        low_rank = F.linear(rounded, lora_a.to(dtype))
        change = F.linear(low_rank, lora_b.to(dtype))
        # Save 16 bits: the rounded copy of a float32 matrix, or a 16-bit matrix itself (not its float32 copy).
        saved_weight = weight if dtype == torch.float32 else matrix
        ctx.save_for_backward(rounded, saved_weight, lora_a, lora_b, low_rank)
        return torch.add(outputs, change, alpha=scaling) if _is_power_of_two(scaling) else outputs + change * scaling

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rounded, weight, lora_a, lora_b, low_rank = ctx.saved_tensors
        dtype, needs = rounded.dtype, ctx.needs_input_grad
        grad = grad_output.reshape(-1, grad_output.shape[-1])
        scaled, factor = (grad, ctx.scaling) if _is_power_of_two(ctx.scaling) else (grad * ctx.scaling, 1.0)
        grad_inner = (scaled @ lora_b.to(dtype)).mul_(factor)
        grad_x = grad_lora_a = grad_lora_b = None
        if needs[0]:
            product = grad @ weight.to(dtype)
            grad_x = product.to(ctx.dtype).add_(grad_inner @ lora_a.to(dtype)).view(rounded.shape)
        if needs[4]:
            grad_lora_a = (grad_inner.T @ rounded.reshape(-1, rounded.shape[-1])).to(lora_a.dtype)
        if needs[5]:
            grad_lora_b = (scaled.T @ low_rank.view(-1, low_rank.shape[-1])).mul_(factor).to(lora_b.dtype)
        return grad_x, None, None, None, grad_lora_a, grad_lora_b, None


def _is_power_of_two(factor: float) -> bool:
    """True if multiplying by `factor` is exact: for powers of two."""
    return abs(math.frexp(factor)[0]) == 0.5


def patch_expert_adapters(model: nn.Module) -> None:
    """Compute a model's adapters of expert tensors only for the chosen experts."""
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            module.__class__ = ExpertAdapter


class ExpertAdapter(ParamWrapper):
    """The adapter of one tensor. It wraps that of another tensor of the same layer, or the experts themselves."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        """Return the experts' output for `x`, with this adapter's update."""
        experts = self.get_base_layer()
        if self.disable_adapters or self.merged or not uses_experts_forward(experts):
            return super().forward(x, *arguments, **options)
        with ExitStack() as changes:
            for adapter in self.active_adapters:
                if adapter in self.lora_A:
                    change = LowRank(*self._factors(adapter))
                    changes.enter_context(low_rank_change(experts, self.parameter_name, change))
            return self.base_layer(x, *arguments, **options)

    def _factors(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Like peft's `get_delta_factors`, without rounding to the dtype of the experts, which may be bf16."""
        first, second = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        first = first.reshape(self.num_experts, -1, first.shape[-1])
        second = second.reshape(second.shape[0], -1, self.num_experts).permute(2, 0, 1)
        pair = (
            (second, first) if self._did_swap_in_out_features else (first.transpose(-2, -1), second.transpose(-2, -1))
        )
        return *pair, self.scaling[adapter]
