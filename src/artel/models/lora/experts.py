"""peft's adapters of tensors that hold all experts of a layer, computed for the chosen experts only (`experts.py`)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from artel.models.experts import LowRank, adds_low_rank, low_rank_change


def compute_chosen_only(model: nn.Module) -> int:
    """Let a model's adapters of experts be computed for chosen experts only. Returns how many such adapters it has."""
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    for module in wrappers:
        module.__class__ = ExpertAdapter
    return len(wrappers)


class ExpertAdapter(ParamWrapper):
    """The adapter of one tensor; that of another tensor of the same layer, and then the experts, are inside it."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        """The experts' output for `x`, with this adapter's change."""
        experts = self.get_base_layer()
        if self.disable_adapters or self.merged or not adds_low_rank(experts):
            return super().forward(x, *arguments, **options)
        with ExitStack() as changes:
            for adapter in self.active_adapters:
                if adapter in self.lora_A:
                    change = LowRank(*self._factors(adapter))
                    changes.enter_context(low_rank_change(experts, self.parameter_name, change))
            return self.base_layer(x, *arguments, **options)

    def _factors(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        """peft's `get_delta_factors`, which rounds them to the dtype of the experts: they may be held in bf16."""
        first, second = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        first = first.reshape(self.num_experts, -1, first.shape[-1])
        second = second.reshape(second.shape[0], -1, self.num_experts).permute(2, 0, 1)
        pair = (
            (second, first) if self._did_swap_in_out_features else (first.transpose(-2, -1), second.transpose(-2, -1))
        )
        return *pair, self.scaling[adapter]
