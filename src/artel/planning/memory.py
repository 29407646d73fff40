"""What training holds at least, in bytes, against what the machine has: a run that cannot fit is refused before it.

Only what is certain is counted: weights, their gradients and the optimizer's state, which are all held at once when a
step is taken, and on a host each process itself. Activations and buffers of communication come on top, and are not.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.errors import InputError
from artel.host import memory, swap
from artel.models.device import pick_precision
from artel.models.loading.build import base_dtype
from artel.parallel import local_device
from artel.parallel.mesh import ParallelDims
from artel.planning.machine import in_gib
from artel.training.optim.optimizer import state_bytes

# A process before it has a model: Python, PyTorch and transformers took 305 MB of its own (torch 2.13 for CPUs).
PROCESS = 200_000_000
_WEIGHT = {"fp32": 4, "bf16": 2}
_QUANTIZED = {"int8": 1.0, "nf4": 0.5}


def check_memory(model: PreTrainedModel, run: RunConfig, dims: ParallelDims, on_host: int) -> None:
    """Raise InputError where a run cannot fit into this machine's memory, with the numbers.

    `model` may be on the meta device; `on_host` processes of `dims` run here. With GPUs each has one of its own.
    """
    device = local_device()
    trained, frozen = _parameters(model, run)
    state = state_bytes(model, run.train) if trained else 0
    held = trained * 2 * _WEIGHT[run.train.weights] + state + int(frozen * _for_frozen(model, run, device))
    needed = held // (dims.world_size // dims.dp_replicate)  # the least that any way of sharing leaves to a process
    if device.type == "cuda" and run.parallel.offload == "none":
        room = max(torch.cuda.get_device_properties(number).total_memory for number in range(torch.cuda.device_count()))
        who, place = "a process", f"the largest GPU here has {in_gib(room)}"
    elif device.type == "cpu":
        about = memory()
        room = (about.limit or about.total) + swap()
        needed = (needed + PROCESS) * on_host
        who = f"{on_host:,} processes here" if on_host > 1 else "one process"
        place = f"{'its control group' if about.limit else 'this machine'} has {in_gib(room)}"
    else:
        return
    if needed > room:
        what = (
            f"{trained + frozen:,} parameters need at least {in_gib(needed)} in {who}, and {place}: weights, gradients "
            f"and {run.train.optimizer}'s state take {2 * _WEIGHT[run.train.weights] + state / max(1, trained):.3g} "
            f"bytes for each of the {trained:,} trained"
        )
        where = "model.config" if run.model.from_ is None else "model.from"
        fix = "take a smaller model; or share it among more machines, by parallel.data: fsdp"
        if run.model.from_ is not None:
            fix += "; or train adapters over 4-bit weights: model.lora: {rank: 16}, model.quantize: nf4"
        if device.type == "cpu" and on_host > 1 and needed // on_host <= room:
            fix = f"start fewer processes: {room // (needed // on_host):,} at most; or {fix}"
        raise InputError.at(where, what, fix)


def _parameters(model: PreTrainedModel, run: RunConfig) -> tuple[int, int]:
    """How many parameters are trained and how many are not; adapters, which are few, are in neither number."""
    counts = {True: 0, False: 0}
    for parameter in model.parameters():
        counts[parameter.requires_grad and run.model.lora is None] += parameter.numel()
    return counts[True], counts[False]


def _for_frozen(model: PreTrainedModel, run: RunConfig, device: torch.device) -> float:
    """Bytes for each parameter that is not trained, at least."""
    if run.model.quantize != "none":
        return _QUANTIZED[run.model.quantize]
    if device.type != "cpu":
        return 2.0
    if base_dtype(run, pick_precision(run.train.precision, device, run.train.weights)) is not None:
        return 2.0
    # Weights of a file in float32 are not copied: the system reads them from the disk again when it has no room.
    return 0.0 if model.config.dtype in (None, torch.float32) and run.model.from_ is not None else 4.0
