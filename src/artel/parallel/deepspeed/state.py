"""Weights and optimizer state of a DeepSpeed engine as whole tensors by name, in and out: artel's own checkpoints.

Under ZeRO the parameters of a group lie behind one another in a flat tensor, of which each process holds a piece; the
optimizer keeps its averages of such pieces. Stage 3 deals them out parameter by parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from artel.errors import InputError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_SCALE, _GOOD_STEPS = "loss_scale|scale", "loss_scale|good_steps"


def full_weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """Trained parameters, float32, and kept buffers by name, whole, on the CPU of the first process; others have none.

    All processes must ask at the same time.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    model, weights, holders = engine.module.model, {}, _holders(engine)
    for name, parameter in _trained(engine):
        if engine.zero_optimization_stage() == 3:
            whole = safe_get_full_fp32_param(parameter)
        else:
            whole = _gathered(holders[parameter], parameter)
        if dist.get_rank() == 0:
            weights[name] = whole.detach().to("cpu", copy=True)
    persistent = model.state_dict().keys()  # without buffers that are computed anew
    if dist.get_rank() == 0:
        weights |= {
            name: buffer.detach().to("cpu", copy=True) for name, buffer in model.named_buffers() if name in persistent
        }
    return weights


def load_weights(engine: DeepSpeedEngine, weights: dict[str, torch.Tensor]) -> None:
    """Put whole weights by name, which every process gives alike, in their places."""
    import deepspeed
    from deepspeed.utils import safe_set_local_fp32_param

    stage, holders = engine.zero_optimization_stage(), _holders(engine)
    with torch.no_grad():
        for name, parameter in _trained(engine):
            if stage == 3:
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    if dist.get_rank() == 0:
                        parameter.copy_(weights[name])
                safe_set_local_fp32_param(parameter, _piece(weights[name], parameter))
            else:
                _put(weights[name], holders[parameter], parameter)
        if stage in (1, 2):
            engine.optimizer.update_lp_params()
        for name, buffer in engine.module.model.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])


def full_state(engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """`parameter name|state name` -> tensor, whole, on the CPU of the first process; others have none.

    What an optimizer keeps as a number becomes a float64 tensor. All processes must ask at the same time.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    state, holders = {}, _holders(engine)
    for name, parameter in _trained(engine):
        for key, value in optimizer.state.get(holders[parameter], {}).items():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                value = torch.tensor(value, dtype=torch.float64)
            elif value.ndim:
                at_3 = engine.zero_optimization_stage() == 3
                value = safe_get_full_optimizer_state(parameter, key) if at_3 else _gathered(value, parameter)
            if dist.get_rank() == 0:
                state[f"{name}|{key}"] = value.detach().to("cpu", copy=True)
    if dist.get_rank() == 0 and _scales(engine):
        scaler = engine.optimizer.loss_scaler
        state[_SCALE] = torch.tensor(float(scaler.cur_scale))
        state[_GOOD_STEPS] = torch.tensor(scaler.cur_iter - scaler.last_overflow_iter - 1, dtype=torch.int32)
    return state


def load_state(engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor]) -> None:
    """Put a whole state, which every process gives alike, in its places.

    Raises InputError where the engine keeps it on a disk of its own.
    """
    from deepspeed.utils import safe_set_local_optimizer_state

    if engine.zero_nvme_offload_optimizer():
        what = "nvme: the optimizer's state is in files of DeepSpeed's own, where that of a checkpoint cannot be put"
        fix = 'write "device": "cpu", or begin anew with --restart'
        raise InputError.at("zero_optimization.offload_optimizer.device", what, fix)
    state = dict(state)
    scale, good_steps = state.pop(_SCALE, None), state.pop(_GOOD_STEPS, None)
    if _scales(engine) and scale is not None and good_steps is not None:
        scaler = engine.optimizer.loss_scaler
        scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = float(scale), int(good_steps), -1
    stage, parameters, holders = engine.zero_optimization_stage(), dict(_trained(engine)), _holders(engine)
    for name, value in state.items():
        parameter_name, _, key = name.rpartition("|")
        parameter = parameters[parameter_name]
        holder = holders[parameter]
        values = optimizer.state[holder]
        if value.ndim:
            if key not in values:
                values[key] = torch.zeros_like(holder)
            if stage == 3:
                safe_set_local_optimizer_state(parameter, _piece(value, parameter), key)
            else:
                _put(value, values[key], parameter)
        elif value.dtype == torch.float64:
            values[key] = int(value)
        else:  # PyTorch keeps its count of steps on the CPU unless the optimizer is fused
            values[key] = value.to(holder.device if optimizer.defaults.get("fused") else "cpu", copy=True)


def _trained(engine: DeepSpeedEngine) -> list[tuple[str, nn.Parameter]]:
    """A tied parameter has one name only."""
    named = engine.module.model.named_parameters()
    return [(name, parameter) for name, parameter in named if parameter.requires_grad]


# What each of DeepSpeed's optimizers calls its flat float32 tensors, and the parameters that lie in each: stage 3;
# 1 and 2; 1 in bf16 with gradients summed in float32.
_FLAT = (
    ("fp32_partitioned_groups_flat", "fp16_groups"),
    ("single_partition_of_fp32_groups", "bit16_groups"),
    ("fp32_groups_flat_partition", "bf16_groups"),
)


def _holders(engine: DeepSpeedEngine) -> dict[nn.Parameter, torch.Tensor]:
    """For each trained parameter the tensor that is stepped in its place: itself, or a flat one that it lies in."""
    if engine.zero_optimization_stage() == 0:
        return {parameter: parameter for _, parameter in _trained(engine)}
    for flat, members in _FLAT:
        if hasattr(engine.optimizer, flat):
            groups = zip(getattr(engine.optimizer, flat), getattr(engine.optimizer, members), strict=True)
            return {parameter: holder for holder, group in groups for parameter in group}
    raise NotImplementedError(type(engine.optimizer).__name__)


def _gathered(flat: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """What all processes' flat tensors hold for a parameter, whole; without ZeRO it is whole already.

    DeepSpeed's own safe_get_full_optimizer_state knows the averages of the first group of parameters alone (0.19.8: it
    looks for all groups' when the first has been stepped).
    """
    if not hasattr(parameter, "_hp_mapping"):
        return flat
    whole = torch.zeros(parameter.numel(), dtype=flat.dtype, device=parameter.device)
    if parameter._hp_mapping is not None:
        here, there = _places(parameter)
        whole[here] = flat.detach()[there].to(whole.device)
    dist.all_reduce(whole)
    return whole.view(parameter.shape)


def _put(whole: torch.Tensor, flat: torch.Tensor, parameter: nn.Parameter) -> None:
    """The inverse of `_gathered`: this process's piece of `whole` into its flat tensor."""
    if not hasattr(parameter, "_hp_mapping"):
        flat.detach().copy_(whole)
    elif parameter._hp_mapping is not None:
        here, there = _places(parameter)
        flat.detach()[there] = whole.flatten()[here].to(flat)


def _places(parameter: nn.Parameter) -> tuple[slice, slice]:
    """Which part of a parameter this process steps, under stages 1 and 2, and where in its flat tensor that lies."""
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
    return slice(here.start, here.start + here.numel), slice(there.start, there.start + there.numel)


def _piece(whole: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """What this process holds of a whole tensor under stage 3: equal pieces, the last ones filled up with zeros."""
    size = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
    flat = whole.flatten()
    flat = F.pad(flat, (0, size * dist.get_world_size() - flat.numel()))
    return flat.narrow(0, size * dist.get_rank(), size)


def _scales(engine: DeepSpeedEngine) -> bool:
    return bool(engine.fp16_enabled() and engine.dynamic_loss_scale())
