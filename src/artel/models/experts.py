"""Experts of a layer stored in one tensor: their matmuls in autocast's precision, with adapters.

transformers sorts tokens by expert and multiplies each group with its expert (`grouped_mm`). Autocast does not cover
that operator, so only experts would compute in float32. The function registered here as
`artel` multiplies in autocast's precision (a step on a CPU then takes 0.8 of the time).

Adapters of such tensors are peft's (`target_parameters`): a pair of low-rank matrices per expert. peft adds their
product to the tensor of all experts in each forward pass. Here each token goes through the low-rank matrices of its
experts, so neither updated weights nor their gradients are ever in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from artel.models.device import autocast_is_on, row_multiple

NAME = "artel"

_RANK_MULTIPLE = 8
"""Grouped matmuls need rows of a multiple of 16 bytes, or 8 numbers in bf16. Narrower matrices are padded."""


class LowRank(NamedTuple):
    """An update of a tensor of experts, in the layout of that tensor: scale * left @ right."""

    left: torch.Tensor
    """(experts, rows, rank)."""
    right: torch.Tensor
    """(experts, rank, columns)."""
    scale: float


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by name that hold all experts of a layer in tensors, with the expert dimension first.

    transformers has several implementations for them (`use_experts_implementation`), and they are recognized by the
    attributes that it sets. All take tokens, the experts chosen for each token, and the weights of those experts.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "has_gate") and isinstance(getattr(module, "num_experts", None), int)
    }


def expert_matrices(model: nn.Module) -> list[str]:
    """Return the names of a model's tensors (experts, rows, columns) of expert matrices."""
    return [
        f"{module_name}.{name}"
        for module_name, module in find_experts(model).items()
        for name, tensor in module.named_parameters(recurse=False)
        if tensor.ndim == 3
    ]


def adapted_experts(model: nn.Module) -> list[str]:
    """Return the names of expert modules that have adapters."""
    return [name for name in find_experts(model) if name.endswith(".base_layer")]


def compute_experts_in_autocast(model: PreTrainedModel) -> None:
    """Make a model's experts compute in autocast's precision, if it has any."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    if find_experts(model):
        model.set_experts_implementation(NAME)


@contextmanager
def low_rank_change(experts: nn.Module, parameter: str, change: LowRank) -> Iterator[None]:
    """Make `experts_forward` compute as if `change` were added to this parameter of `experts`, inside the block."""
    old_changes = _low_rank_changes(experts)
    vars(experts)["artel_changes"] = {**old_changes, parameter: (*old_changes.get(parameter, ()), change)}
    try:
        yield
    finally:
        vars(experts)["artel_changes"] = old_changes


def _low_rank_changes(experts: Any) -> dict[str, tuple[LowRank, ...]]:
    return getattr(experts, "artel_changes", {})


def uses_experts_forward(experts: nn.Module) -> bool:
    """True if an expert module is computed by `experts_forward`."""
    return getattr(getattr(experts, "config", None), "_experts_implementation", None) == NAME


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Apply the experts to tokens (count, width); top_k_index int64 and top_k_weights are (count, choices).

    `self` is an expert module. If it holds one process's shard, the index `num_experts` means an expert of another
    process, and its weight is 0.
    """
    device_type = hidden_states.device.type
    dtype = torch.get_autocast_dtype(device_type) if autocast_is_on(device_type) else hidden_states.dtype
    weight = getattr(self, "gate_up_proj" if self.has_gate else "up_proj")
    needs_no_padding = row_multiple(hidden_states.device.type, dtype) == 1
    if not _low_rank_changes(self) and hidden_states.dtype == dtype == weight.dtype and needs_no_padding:
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    forward = _forward if dtype == torch.bfloat16 else _eager_forward
    return forward(self, hidden_states, top_k_index, top_k_weights, dtype)


def _forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    choices = top_k_index.shape[1]
    sorted_experts, order = top_k_index.flatten().sort(stable=True)
    rows = hidden_states[order // choices].to(dtype)
    is_remote = (sorted_experts >= self.num_experts)[:, None] if self._is_expert_parallel else None
    if is_remote is not None:
        # Rows after the last group are not computed, forward or backward, and may contain anything.
        rows = rows.masked_fill(is_remote, 0.0)
    multiple = row_multiple(rows.device.type, dtype)
    ends, row_indices, num_rows = _group_rows(sorted_experts, self.num_experts, multiple)
    if multiple > 1:
        rows = rows.new_zeros(num_rows, rows.shape[1]).index_copy(0, row_indices, rows)
    experts = torch.bucketize(torch.arange(num_rows, device=ends.device), ends, right=True)  # of each row, for biases
    experts = experts.clamp(max=self.num_experts - 1)

    hidden = _linear(self, "gate_up_proj" if self.has_gate else "up_proj", rows, experts, ends)
    hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
    outputs = _linear(self, "down_proj", hidden.to(dtype), experts, ends)
    if multiple > 1:
        outputs = outputs[row_indices]
    if self.has_post_expert_norm:
        outputs = self.post_expert_norm(outputs)
    outputs = outputs * top_k_weights.flatten()[order][:, None]
    if is_remote is not None:
        outputs = outputs.masked_fill(is_remote, 0.0)

    outputs = outputs[order.argsort()].view(*top_k_index.shape, hidden_states.shape[1])
    return outputs.sum(dim=1).to(hidden_states.dtype)


def _group_rows(sorted_experts: torch.Tensor, experts: int, multiple: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return (end of each expert's group of rows, int32; row of each element of `sorted_experts`; number of rows).

    `sorted_experts` is sorted. Groups are padded to a multiple, and the number of rows is enough for any choice.
    """
    expert_ids = torch.arange(experts, device=sorted_experts.device)
    ends = torch.searchsorted(sorted_experts, expert_ids, right=True)
    group_sizes = ends.diff(prepend=ends.new_zeros(1))
    padded = (group_sizes + multiple - 1) // multiple * multiple
    shift = padded.cumsum(0) - padded - (ends - group_sizes)
    # Choices of other processes' experts come last, after all groups.
    shift = torch.cat([shift, (padded - group_sizes).sum()[None]])
    row_indices = (
        torch.arange(len(sorted_experts), device=sorted_experts.device) + shift[sorted_experts.clamp(max=experts)]
    )
    return padded.cumsum(0).to(torch.int32), row_indices, len(sorted_experts) + experts * (multiple - 1)


# The compiler supports grouped matmuls in bf16 only.
_eager_forward = torch.compiler.disable(_forward)


def _linear(self: Any, name: str, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each group of `rows` (count, inputs) with its expert's matrix: (count, outputs)."""

    def multiply(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(rows, matrices.to(rows.dtype), offs=ends)

    def orient(matrices: torch.Tensor) -> torch.Tensor:
        """Convert from the module's layout to (experts, inputs, outputs)."""
        return matrices if self.is_transposed else matrices.transpose(-2, -1)

    outputs = multiply(rows, orient(getattr(self, name)))
    for change in _low_rank_changes(self).get(name, ()):
        first, second = (change.left, change.right) if self.is_transposed else (change.right, change.left)
        padding = -change.left.shape[-1] % _RANK_MULTIPLE
        first = F.pad(orient(first), (0, padding)).contiguous()
        second = F.pad(orient(second), (0, 0, 0, padding)).contiguous()
        outputs = outputs + multiply(multiply(rows, first), second) * change.scale
    if self.has_bias:
        outputs = outputs + getattr(self, f"{name}_bias")[experts].to(outputs.dtype)
    return outputs
