"""The optimizers that `train.optimizer` names, each with all that artel knows of it.

An optimizer of your own is one more `OptimizerSpec`, registered under its name in `artel.registry.OPTIMIZERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from artel.config import TrainConfig
from artel.training.optim.bf16_adamw import RoundedAdamW
from artel.training.optim.muon import Muon

Groups = list[dict[str, Any]]
"""Parameter groups as torch.optim takes them: `params`, `lr` (the peak), `weight_decay`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """How an optimizer is built, what it costs, and what it goes with."""

    build: Callable[[Groups, TrainConfig, int], torch.optim.Optimizer]
    """(groups, train, seed) → the optimizer."""
    summary: str
    """A line for `artel doctor`."""
    state_bytes: Callable[[TrainConfig], float]
    """Bytes of state that it holds for each parameter."""
    build_for_matrices: Callable[[Groups, torch.dtype], torch.optim.Optimizer] | None = None
    """Steps the matrices of the layers, multiplying in this dtype; `build` then steps the other parameters."""
    matrix_bytes: float = 0.0
    """Bytes of state for each number of those matrices."""
    steps_shards: bool = True
    """False where it looks at whole matrices, of which processes hold shards (FSDP, tensor parallelism)."""
    steps_flat_shards: bool = False
    """True where it treats each number for itself: DeepSpeed hands out flat pieces."""
    rounds_to_bf16: bool = False
    """True where its steps of bf16 weights are rounded stochastically (`train.weights: bf16`)."""
    is_adam: bool = False
    """True where its state is Adam's two averages in float32, as DeepSpeed's checkpoints hold it."""
    package: str = ""
    """The package that it needs, where that comes with an extra."""
    extra: str = ""


def _adamw(groups: Groups, train: TrainConfig, seed: int) -> torch.optim.Optimizer:
    betas = (train.betas[0], train.betas[1])
    if train.weights == "bf16":
        return RoundedAdamW(groups, betas=betas, eps=train.epsilon, seed=seed)
    return torch.optim.AdamW(groups, betas=betas, eps=train.epsilon, fused=True)


def _adamw_8bit(groups: Groups, train: TrainConfig, seed: int) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, betas=(train.betas[0], train.betas[1]), eps=train.epsilon)


def _adafactor(groups: Groups, train: TrainConfig, seed: int) -> torch.optim.Optimizer:
    # Its step is the learning rate (at most 1 / sqrt(step)) times the parameter's root mean square.
    return torch.optim.Adafactor(groups)


def _sgd(groups: Groups, train: TrainConfig, seed: int) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(groups, momentum=train.momentum, fused=True)
    if train.momentum:
        # A fused SGD makes its averages at the first step and leaves them unset where that step is skipped (1e36 was
        # found in them, torch 2.13). Made here they are zero, from where the first step gives the same.
        for parameter in (p for group in sgd.param_groups for p in group["params"]):
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd


ADAMW = OptimizerSpec(
    build=_adamw,
    summary="AdamW, fused: one kernel steps all parameters",
    state_bytes=lambda train: 8.0,
    steps_flat_shards=True,
    rounds_to_bf16=True,
    is_adam=True,
)
ADAMW_8BIT = OptimizerSpec(
    build=_adamw_8bit,
    summary="AdamW of bitsandbytes, its averages in 8 bits",
    state_bytes=lambda train: 2.0,
    steps_shards=False,
    package="bitsandbytes",
    extra="quantize",
)
ADAFACTOR = OptimizerSpec(
    build=_adafactor,
    summary="Adafactor of PyTorch, its averages by rows and columns",
    state_bytes=lambda train: 0.1,
    steps_shards=False,
)
MUON = OptimizerSpec(
    build=_adamw,
    summary="Muon for the layers' matrices, fused AdamW for the rest",
    state_bytes=lambda train: 8.0,
    build_for_matrices=Muon,
    matrix_bytes=4.0,
)
SGD = OptimizerSpec(
    build=_sgd,
    summary="SGD, fused: one kernel steps all parameters",
    state_bytes=lambda train: 4.0 if train.momentum else 0.0,
    steps_flat_shards=True,
)
