"""Muon: momentum, orthogonalized by a Newton-Schulz iteration (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

torch.optim.Muon always iterates in bf16. A CPU without bf16 instructions emulates those matmuls at 0.3 GFLOP/s instead
of 115: 22 s per step instead of 0.3 s. Here the iteration runs in float32 in an fp32 run, so that results do not depend
on how the model is split; otherwise in bf16 if the device supports it natively.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from artel.models.device import bf16_is_native

# Jordan's coefficients: a quintic with the steepest slope at zero. In exchange, singular values only come near 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def iteration_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of the iteration for a run that computes in `precision`."""
    return torch.bfloat16 if precision != "fp32" and bf16_is_native(device) else torch.float32


def orthogonalize(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return roughly the nearest orthogonal matrix (rows, columns): singular values between 0.7 and 1.2.

    Multiplies matrices in `dtype`.
    """
    wide = matrix.to(dtype)
    tall = wide.size(0) > wide.size(1)
    if tall:
        wide = wide.mT
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), wide, beta=_A)
    return (wide.mT if tall else wide).to(matrix.dtype)


def _orthogonalize_full(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Orthogonalize a matrix that may be sharded: each process gathers it and keeps its own shard."""
    if not isinstance(matrix, DTensor):
        return orthogonalize(matrix, dtype)
    full_matrix = orthogonalize(matrix.full_tensor(), dtype)
    return distribute_tensor(full_matrix, matrix.device_mesh, matrix.placements, src_data_rank=None)


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of a model's layers, with decoupled weight decay. Parameters must have two dimensions.

    Each group has `params`, `lr` and `weight_decay`. `dtype`: dtype of the iteration.
    """

    def __init__(self, groups: list[dict[str, Any]], dtype: torch.dtype, momentum: float = 0.95) -> None:
        super().__init__(groups, {"momentum": momentum})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                average = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = _orthogonalize_full(parameter.grad.lerp(average, group["momentum"]), self._dtype)
                # Updates entries by the same amount, whatever the shape of the matrix.
                scale = max(1.0, parameter.size(0) / parameter.size(1)) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)
