"""The optimizers of `train.optimizer`: how to build each, its memory, and its settings.

To add an optimizer, register an `OptimizerSpec` under its name in `artel.registry.OPTIMIZERS`. Import torch in `build`,
since `artel config` reads the settings of an optimizer and its names in other tools.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from artel.config import TrainConfig

if TYPE_CHECKING:
    import torch

Groups = list[dict[str, Any]]
"""Parameter groups as torch.optim takes them: `params`, `lr` (the peak), `weight_decay`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer's constructor, its cost, and the settings that it supports."""

    build: Callable[[Groups, TrainConfig, int], torch.optim.Optimizer]
    """(groups, train, seed) → the optimizer."""
    summary: str
    """A line for `artel doctor` and the help of `train.optimizer`."""
    state_bytes: Callable[[TrainConfig], float]
    """Optimizer state in bytes per parameter."""
    keys: tuple[str, ...] = ()
    """Keys of `train` that this optimizer uses and some others ignore. artel notes a key that does not apply."""
    build_for_matrices: Callable[[Groups, torch.dtype], torch.optim.Optimizer] | None = None
    """Builds a separate optimizer for the layers' matrices, which multiplies in this dtype. None: `build` gets them."""
    matrix_bytes: float = 0.0
    """Bytes of state per element of the layers' matrices."""
    supports_sharding: bool = True
    """False if it needs full matrices, and so cannot step the shards of FSDP or tensor parallelism."""
    supports_flat_shards: bool = False
    """True if it is elementwise and can step DeepSpeed's flat shards. artel then checks the DeepSpeed file."""
    stochastic_rounding: bool = False
    """True if steps of bf16 weights are rounded stochastically (`train.weights: bf16`)."""
    is_adam: bool = False
    """True if its state is Adam's two moments in float32, as in DeepSpeed's checkpoints."""
    other_names: tuple[tuple[str, str], ...] = ()
    """(pattern, difference): the optimizer's names in other tools, and how theirs differs from artel's, or ""."""
    package: str = ""
    """Name of the package that it needs, if an extra installs it."""
    extra: str = ""


def _build_adamw(groups: Groups, train: TrainConfig, seed: int) -> torch.optim.Optimizer:
    import torch

    from artel.training.optim.bf16_adamw import RoundedAdamW

    betas = (train.betas[0], train.betas[1])
    if train.weights == "bf16":
        return RoundedAdamW(groups, betas=betas, eps=train.epsilon, seed=seed)
    return torch.optim.AdamW(groups, betas=betas, eps=train.epsilon, fused=True)


def _build_adamw_8bit(groups: Groups, train: TrainConfig, seed: int) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, betas=(train.betas[0], train.betas[1]), eps=train.epsilon)


def _build_adafactor(groups: Groups, train: TrainConfig, seed: int) -> torch.optim.Optimizer:
    import torch

    # Its step is the learning rate (at most 1 / sqrt(step)) times the parameter's root mean square.
    return torch.optim.Adafactor(groups)


def _build_muon(groups: Groups, dtype: torch.dtype) -> torch.optim.Optimizer:
    from artel.training.optim.muon import Muon

    return Muon(groups, dtype)


def _build_sgd(groups: Groups, train: TrainConfig, seed: int) -> torch.optim.Optimizer:
    import torch

    sgd = torch.optim.SGD(groups, momentum=train.momentum, fused=True)
    if train.momentum:
        # A fused SGD allocates its momentum buffers at the first step and leaves them unset if it is skipped
        # (1e36 was found in them, torch 2.13). Zeros give the same first step.
        for parameter in (parameter for group in sgd.param_groups for parameter in group["params"]):
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd


_EIGHT_BITS = "artel uses bitsandbytes' AdamW8bit, with its state on the device"

ADAMW = OptimizerSpec(
    build=_build_adamw,
    summary="AdamW, fused: one kernel steps all parameters",
    state_bytes=lambda train: 8.0,
    keys=("betas", "epsilon"),
    supports_flat_shards=True,
    stochastic_rounding=True,
    is_adam=True,
    other_names=(
        (r"paged_adamw(_32bit)?|PagedAdamW", "its state is in fp32 and on the device"),
        (r"(optimi_|flash_)adamw|adam|AdamW|Adam|FusedAdam|DeepSpeedCPUAdam", ""),
        (r"adamw_(hf|torch|torch_fused|torch_xla|torch_npu_fused|apex_fused|anyprecision)", ""),
    ),
)
ADAMW_8BIT = OptimizerSpec(
    build=_build_adamw_8bit,
    summary="AdamW from bitsandbytes, with 8-bit state; needs the extra `quantize`",
    state_bytes=lambda train: 2.0,
    keys=("betas", "epsilon"),
    supports_sharding=False,
    package="bitsandbytes",
    extra="quantize",
    other_names=(
        (r"adamw_(8bit|bnb_8bit)|Adam8bit", ""),
        (r"paged_adamw_8bit|PagedAdamW8bit|(ao_)?adamw_(torch_)?8bit|ao_adamw_fp8", _EIGHT_BITS),
        (r"(ao_)?adamw_(torch_)?4bit", f"artel has no 4-bit optimizer; {_EIGHT_BITS}"),
    ),
)
ADAFACTOR = OptimizerSpec(
    build=_build_adafactor,
    summary="PyTorch's Adafactor, with a factored second moment",
    state_bytes=lambda train: 0.1,
    supports_sharding=False,
    other_names=(
        (
            r"adafactor|Adafactor",
            "in artel its step is the learning rate times the parameter's root mean square, so tune learning_rate "
            "again",
        ),
    ),
)
MUON = OptimizerSpec(
    build=_build_adamw,
    summary="Muon for the layers' matrices, fused AdamW for the rest",
    state_bytes=lambda train: 8.0,
    keys=("betas", "epsilon", "muon_learning_rate"),
    build_for_matrices=_build_muon,
    matrix_bytes=4.0,
    other_names=(
        (
            r"muon|Muon",
            "muon uses train.muon_learning_rate, other parameters use learning_rate; both are set to this value",
        ),
    ),
)
SGD = OptimizerSpec(
    build=_build_sgd,
    summary="SGD, fused: one kernel steps all parameters",
    state_bytes=lambda train: 4.0 if train.momentum else 0.0,
    keys=("momentum",),
    supports_flat_shards=True,
    other_names=((r"SGD|flash_sgdw?", ""),),
)
