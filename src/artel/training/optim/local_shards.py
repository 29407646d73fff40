"""The tensors that an optimizer updates: parameters, or this rank's shards of them.

Optimizer kernels do not accept DTensors. AdamW and SGD update each number separately, so they get local shards as
parameters, which share memory with the DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

Shapes = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Full shape and dtype of stored tensors by name."""


class LocalShard:
    """A named parameter, and the tensor that the optimizer steps: the local shard, or the parameter itself."""

    def __init__(self, name: str, parameter: nn.Parameter, *, takes_dtensor: bool) -> None:
        """`takes_dtensor`: True if the optimizer can step a DTensor."""
        self.name = name
        self.parameter = parameter
        self.is_shard = isinstance(parameter, DTensor) and not takes_dtensor
        self.stepped = nn.Parameter(_local_shard(parameter)) if self.is_shard else parameter

    def refresh(self) -> None:
        """Read the shard and its gradient from the parameter again, since fully_shard may have moved them."""
        if self.is_shard:
            self.stepped.data = _local_shard(self.parameter)
            # A rank can have an empty shard: 3 rows over 4 ranks.
            has_elements = self.parameter.grad is not None and self.stepped.numel() > 0
            self.stepped.grad = _local_shard(self.parameter.grad) if has_elements else None

    def clear_grad(self) -> None:
        self.parameter.grad = self.stepped.grad = None

    def to_global(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the optimizer's state as a DTensor with the parameter's layout."""
        if not self.is_shard or value.shape != self.stepped.shape:
            return value
        full = self.parameter
        assert isinstance(full, DTensor)
        return DTensor.from_local(
            value, full.device_mesh, full.placements, run_check=False, shape=full.shape, stride=full.stride()
        )

    def allocate(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for this rank's shard of a state tensor with this global shape."""
        if isinstance(self.parameter, DTensor) and shape == self.parameter.shape:
            return torch.empty_like(self.parameter, dtype=dtype, requires_grad=False)
        return torch.empty(shape, dtype=dtype)

    def to_local_value(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a value that `to_global` returned."""
        return _local_shard(value) if self.is_shard and isinstance(value, DTensor) else value


def trained_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return trained parameters and buffers by name. A tied parameter appears under one name only."""
    saved = model.state_dict().keys()  # without recomputed buffers
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {**trained, **buffers}


def _local_shard(tensor: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()
