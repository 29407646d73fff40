"""What an optimizer steps: a parameter, or the piece of it that this process holds.

An optimizer's kernels know nothing of DTensors, and need not: AdamW and SGD treat each number for itself. So they are
given this process's pieces as parameters of their own, which share memory with the shards.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


class Piece:
    """A named parameter, and what an optimizer holds in its place."""

    def __init__(self, name: str, parameter: nn.Parameter, *, whole: bool) -> None:
        """`whole`: the optimizer itself knows what to do with a DTensor."""
        self.name = name
        self.parameter = parameter
        self.is_shard = isinstance(parameter, DTensor) and not whole
        self.stepped = nn.Parameter(_local(parameter)) if self.is_shard else parameter

    def take(self) -> None:
        """Look again where the piece lies, and at its gradient: fully_shard may move a shard to fill it up."""
        if self.is_shard:
            self.stepped.data = _local(self.parameter)
            # A process can be left without a piece: 3 rows over 4 processes.
            has_any = self.parameter.grad is not None and self.stepped.numel() > 0
            self.stepped.grad = _local(self.parameter.grad) if has_any else None

    def forget_gradient(self) -> None:
        self.parameter.grad = self.stepped.grad = None

    def to_save(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor of the optimizer's state with its place among all processes' pieces."""
        if not self.is_shard or value.shape != self.stepped.shape:
            return value
        whole = self.parameter
        assert isinstance(whole, DTensor)
        return DTensor.from_local(
            value, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def place(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Memory for a tensor of the state that is of such a shape in all: for this process's piece of it."""
        if isinstance(self.parameter, DTensor) and shape == self.parameter.shape:
            return torch.empty_like(self.parameter, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype)

    def to_hold(self, value: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_save`."""
        return _local(value) if self.is_shard and isinstance(value, DTensor) else value


def trained_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Trained parameters and buffers by name; a tied parameter has one name only."""
    saved = model.state_dict().keys()  # without buffers that are computed anew
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {**trained, **buffers}


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()
