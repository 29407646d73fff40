"""Reads and writes the weights and optimizer state of a DeepSpeed engine as full tensors by name, for checkpoints.

ZeRO concatenates the parameters of a group into a flat tensor and gives each process a shard. The optimizer keeps its
averages per shard. Stage 3 shards each parameter separately.
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
    """Return full trained parameters, float32, and persistent buffers by name, on the CPU of rank 0. Collective.

    Other ranks get an empty dict.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    model = engine.module.model
    weights = {}
    optimizer_tensors = _map_optimizer_tensors(engine)
    for name, parameter in _trained_parameters(engine):
        if engine.zero_optimization_stage() == 3:
            full = safe_get_full_fp32_param(parameter)
        else:
            full = _gather_parameter(optimizer_tensors[parameter], parameter)
        if dist.get_rank() == 0:
            weights[name] = full.detach().to("cpu", copy=True)
    persistent = model.state_dict().keys()  # without buffers that are recomputed
    if dist.get_rank() == 0:
        weights |= {
            name: buffer.detach().to("cpu", copy=True) for name, buffer in model.named_buffers() if name in persistent
        }
    return weights


def load_weights(engine: DeepSpeedEngine, weights: dict[str, torch.Tensor]) -> None:
    """Load full weights by name. All ranks must pass the same tensors."""
    import deepspeed
    from deepspeed.utils import safe_set_local_fp32_param

    stage = engine.zero_optimization_stage()
    optimizer_tensors = _map_optimizer_tensors(engine)
    with torch.no_grad():
        for name, parameter in _trained_parameters(engine):
            if stage == 3:
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    if dist.get_rank() == 0:
                        parameter.copy_(weights[name])
                safe_set_local_fp32_param(parameter, _local_shard(weights[name], parameter))
            else:
                _scatter_parameter(weights[name], optimizer_tensors[parameter], parameter)
        if stage in (1, 2):
            engine.optimizer.update_lp_params()
        for name, buffer in engine.module.model.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])


def full_state(engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return `parameter name|state name` -> full tensor, on the CPU of rank 0. Collective.

    Other ranks get an empty dict. State that an optimizer keeps as a number becomes a float64 tensor.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    state = {}
    optimizer_tensors = _map_optimizer_tensors(engine)
    for name, parameter in _trained_parameters(engine):
        for key, value in optimizer.state.get(optimizer_tensors[parameter], {}).items():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                value = torch.tensor(value, dtype=torch.float64)
            elif value.ndim:
                if engine.zero_optimization_stage() == 3:
                    value = safe_get_full_optimizer_state(parameter, key)
                else:
                    value = _gather_parameter(value, parameter)
            if dist.get_rank() == 0:
                state[f"{name}|{key}"] = value.detach().to("cpu", copy=True)
    if dist.get_rank() == 0 and _has_dynamic_scale(engine):
        scaler = engine.optimizer.loss_scaler
        state[_SCALE] = torch.tensor(float(scaler.cur_scale))
        state[_GOOD_STEPS] = torch.tensor(scaler.cur_iter - scaler.last_overflow_iter - 1, dtype=torch.int32)
    return state


def load_state(engine: DeepSpeedEngine, optimizer: torch.optim.Optimizer, state: dict[str, torch.Tensor]) -> None:
    """Load a full optimizer state. All ranks must pass the same tensors. Raise InputError with NVMe offload."""
    from deepspeed.utils import safe_set_local_optimizer_state

    if engine.zero_nvme_offload_optimizer():
        what = "nvme: the optimizer's state is in DeepSpeed's own files, which cannot be restored from a checkpoint"
        fix = 'set "device": "cpu", or start over with --restart'
        raise InputError.at("zero_optimization.offload_optimizer.device", what, fix)
    state = dict(state)
    scale, good_steps = state.pop(_SCALE, None), state.pop(_GOOD_STEPS, None)
    if _has_dynamic_scale(engine) and scale is not None and good_steps is not None:
        scaler = engine.optimizer.loss_scaler
        scaler.cur_scale = float(scale)
        scaler.cur_iter, scaler.last_overflow_iter = int(good_steps), -1
    stage = engine.zero_optimization_stage()
    parameters = dict(_trained_parameters(engine))
    optimizer_tensors = _map_optimizer_tensors(engine)
    for name, value in state.items():
        parameter_name, _, key = name.rpartition("|")
        parameter = parameters[parameter_name]
        optimizer_tensor = optimizer_tensors[parameter]
        values = optimizer.state[optimizer_tensor]
        if value.ndim:
            if key not in values:
                values[key] = torch.zeros_like(optimizer_tensor)
            if stage == 3:
                safe_set_local_optimizer_state(parameter, _local_shard(value, parameter), key)
            else:
                _scatter_parameter(value, values[key], parameter)
        elif value.dtype == torch.float64:
            values[key] = int(value)
        else:  # PyTorch keeps its step count on the CPU unless the optimizer is fused
            values[key] = value.to(optimizer_tensor.device if optimizer.defaults.get("fused") else "cpu", copy=True)


def _trained_parameters(engine: DeepSpeedEngine) -> list[tuple[str, nn.Parameter]]:
    """Return trained parameters by name. Tied parameters appear once."""
    named_parameters = engine.module.model.named_parameters()
    return [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]


# Attributes of DeepSpeed's optimizers: flat float32 tensors, and the parameters in each. Stage 3; stages 1 and 2; stage
# 1 in bf16 with float32 gradients.
_FLAT_KEYS = (
    ("fp32_partitioned_groups_flat", "fp16_groups"),
    ("single_partition_of_fp32_groups", "bit16_groups"),
    ("fp32_groups_flat_partition", "bf16_groups"),
)


def _map_optimizer_tensors(engine: DeepSpeedEngine) -> dict[nn.Parameter, torch.Tensor]:
    """Return the tensor that the optimizer steps for each trained parameter: itself, or the flat one that holds it."""
    if engine.zero_optimization_stage() == 0:
        return {parameter: parameter for _, parameter in _trained_parameters(engine)}
    for flat_key, group_key in _FLAT_KEYS:
        if hasattr(engine.optimizer, flat_key):
            groups = zip(getattr(engine.optimizer, flat_key), getattr(engine.optimizer, group_key), strict=True)
            return {parameter: optimizer_tensor for optimizer_tensor, group in groups for parameter in group}
    raise NotImplementedError(type(engine.optimizer).__name__)


def _gather_parameter(flat: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's full tensor from all processes' flat tensors. Without ZeRO, `flat` is already full.

    DeepSpeed's own safe_get_full_optimizer_state finds the averages of the first parameter group only (0.19.8: it
    searches all groups once the first has been stepped).
    """
    if not hasattr(parameter, "_hp_mapping"):
        return flat
    full = torch.zeros(parameter.numel(), dtype=flat.dtype, device=parameter.device)
    if parameter._hp_mapping is not None:
        in_parameter, in_flat = _find_fragment(parameter)
        full[in_parameter] = flat.detach()[in_flat].to(full.device)
    dist.all_reduce(full)
    return full.view(parameter.shape)


def _scatter_parameter(full: torch.Tensor, flat: torch.Tensor, parameter: nn.Parameter) -> None:
    """Inverse of `_gather_parameter`: copy this process's fragment of `full` into its flat tensor."""
    if not hasattr(parameter, "_hp_mapping"):
        flat.detach().copy_(full)
    elif parameter._hp_mapping is not None:
        in_parameter, in_flat = _find_fragment(parameter)
        flat.detach()[in_flat] = full.flatten()[in_parameter].to(flat)


def _find_fragment(parameter: nn.Parameter) -> tuple[slice, slice]:
    """Return the fragment that this process steps in stages 1 and 2: (slice of parameter, slice of flat tensor)."""
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    in_parameter, in_flat = mapping.lp_fragment_address, mapping.hp_fragment_address
    return (
        slice(in_parameter.start, in_parameter.start + in_parameter.numel),
        slice(in_flat.start, in_flat.start + in_flat.numel),
    )


def _local_shard(full: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return this process's shard of a full tensor in stage 3. All have the same size: the last ones end with zeros."""
    shard_numel = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
    flat = full.flatten()
    flat = F.pad(flat, (0, shard_numel * dist.get_world_size() - flat.numel()))
    return flat.narrow(0, shard_numel * dist.get_rank(), shard_numel)


def _has_dynamic_scale(engine: DeepSpeedEngine) -> bool:
    return bool(engine.fp16_enabled() and engine.dynamic_loss_scale())
