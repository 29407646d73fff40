"""Checks of this machine before any text is read: enough memory for the run, enough time in `train.budget`."""

from __future__ import annotations

import math
import time

import torch
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.config.schema.quantities import format_duration
from artel.errors import InputError
from artel.host import memory, swap_bytes
from artel.models.device import pick_precision
from artel.models.flops import data_sheet, device_name, estimate_flops_per_token
from artel.models.loading.build import base_dtype
from artel.objectives import objective_type
from artel.parallel import local_device
from artel.parallel.mesh import ParallelDims
from artel.planning.machine import format_gib
from artel.training.budget import FEWEST_STEPS
from artel.training.optim.optimizer import state_bytes

MIN_PROCESS_BYTES = 200_000_000
"""Minimum bytes of a process without a model. Python, PyTorch and transformers took 305 MB (torch 2.13 for CPUs)."""
_BYTES_PER_WEIGHT = {"fp32": 4, "bf16": 2}
_BYTES_PER_QUANTIZED = {"int8": 1.0, "nf4": 0.5}
_CPU_TOLERANCE = 2.0
"""Other programs may slow the measurement of a CPU: refuse a budget only if it is too short at twice the rate."""
_MATMUL_SIZE, _MATMUL_SECONDS = 512, 0.2
"""Size of the measured matmul, and seconds to repeat it. One matmul takes 1 ms, too short to be interrupted."""
_FROZEN_FLOPS = 2 / 3
"""Fraction of the FLOPs with frozen weights, whose gradients are not computed."""


def check_memory(model: PreTrainedModel, config: RunConfig, dims: ParallelDims, on_host: int) -> None:
    """Raise InputError, with the numbers, if a run cannot fit into this machine's memory.

    Count weights, gradients and optimizer state, which a step needs at the same time, and on a host also the processes
    themselves. Do not count activations and communication buffers, whose size is uncertain. `model` may be on the meta
    device. `on_host` processes of `dims` run on this machine, each on its own GPU if there are GPUs.
    """
    device = local_device()
    trained, frozen = _count_parameters(model, config)
    state = state_bytes(model, config.train) if trained else 0
    model_bytes = (
        trained * 2 * _BYTES_PER_WEIGHT[config.train.weights]
        + state
        + int(frozen * _bytes_per_frozen(model, config, device))
    )
    needed_bytes = model_bytes // (dims.world_size // dims.dp_replicate)  # at least, with any sharding
    if device.type == "cuda" and config.parallel.offload == "none":
        capacity = max(
            torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())
        )
        processes, available = "a process", f"the largest GPU here has {format_gib(capacity)}"
    elif device.type == "cpu":
        host = memory()
        capacity = (host.limit or host.total) + swap_bytes()
        needed_bytes = (needed_bytes + MIN_PROCESS_BYTES) * on_host
        processes = f"{on_host:,} processes here" if on_host > 1 else "one process"
        available = f"{'its control group' if host.limit else 'this machine'} has {format_gib(capacity)}"
    else:
        return
    if needed_bytes > capacity:
        bytes_per_parameter = 2 * _BYTES_PER_WEIGHT[config.train.weights] + state / max(1, trained)
        what = (
            f"{trained + frozen:,} parameters need at least {format_gib(needed_bytes)} in {processes}, but "
            f"{available}: weights, gradients and {config.train.optimizer}'s state take {bytes_per_parameter:.3g} "
            f"bytes for each of the {trained:,} trained"
        )
        where = "model.config" if config.model.from_ is None else "model.from"
        fix = "use a smaller model, or shard it over more machines with parallel.data: fsdp"
        if config.model.from_ is not None:
            fix += "; or train adapters over 4-bit weights: model.lora: {rank: 16}, model.quantize: nf4"
        if device.type == "cpu" and on_host > 1 and needed_bytes // on_host <= capacity:
            fix = f"start at most {capacity // (needed_bytes // on_host):,} processes; or {fix}"
        raise InputError.at(where, what, fix)


def _count_parameters(model: PreTrainedModel, config: RunConfig) -> tuple[int, int]:
    """Count trained and frozen parameters. Adapters are few and in neither number."""
    counts = {True: 0, False: 0}
    for parameter in model.parameters():
        counts[parameter.requires_grad and config.model.lora is None] += parameter.numel()
    return counts[True], counts[False]


def _bytes_per_frozen(model: PreTrainedModel, config: RunConfig, device: torch.device) -> float:
    """Return the minimum bytes per frozen parameter."""
    if config.model.quantize != "none":
        return _BYTES_PER_QUANTIZED[config.model.quantize]
    if device.type != "cpu":
        return 2.0
    if base_dtype(config, pick_precision(config.train.precision, device, config.train.weights)) is not None:
        return 2.0
    # Weights of a float32 file are mapped: the system can drop the pages and read them again.
    return 0.0 if model.config.dtype in (None, torch.float32) and config.model.from_ is not None else 4.0


def check_budget(config: RunConfig, model: PreTrainedModel, world_size: int, on_host: int) -> None:
    """Raise InputError if `train.budget` is too short for the first steps on this machine.

    Those steps take at least their FLOPs over the peak rate. The peak comes from a GPU's data sheet, or on a CPU from
    the fastest measured matmul. `model` may be on the meta device.
    """
    min_seconds = min_budget_seconds(config, model, world_size, on_host)
    budget = config.train.budget
    if min_seconds is None or budget is None:
        return
    tolerance = _CPU_TOLERANCE if local_device().type == "cpu" else 1.0
    if min_seconds > tolerance * budget:
        tokens = config.train.batch * config.data.block
        shortest = format_duration(round_up(min_seconds))
        steps = f"{FEWEST_STEPS} steps of {tokens:,} tokens"
        what = f"{format_duration(budget)} is too short: at peak speed, this machine needs {shortest} for {steps}"
        fix = f"use {shortest} or more, a smaller train.batch, or a smaller model"
        raise InputError.at("train.budget", what, fix)


def round_up(seconds: float) -> int:
    """Round up to whole seconds, or to whole minutes from two minutes on."""
    unit = 1 if seconds < 120 else 60
    return math.ceil(seconds / unit) * unit


def min_budget_seconds(config: RunConfig, model: PreTrainedModel, world_size: int, on_host: int) -> float | None:
    """Return the seconds that the minimum number of steps takes at this machine's peak FLOP/s. None if unknown."""
    objective_class = objective_type(config)
    if not objective_class.packs_text:
        return None
    rate = _peak_flops_per_second(config)
    flops = estimate_flops_per_token(model.config, objective_class.auto_class, config.data.block)
    if rate is None or flops is None:
        return None
    if local_device().type == "cpu":  # all processes of a host share its cores
        rate /= on_host
    computed_fraction = _FROZEN_FLOPS if config.model.lora is not None or config.model.freeze else 1.0
    return FEWEST_STEPS * config.train.batch * config.data.block * flops * computed_fraction / (rate * world_size)


def _peak_flops_per_second(config: RunConfig) -> float | None:
    """Return a GPU's peak from its data sheet (None without one), or the rate of the CPU's fastest matmul."""
    device = local_device()
    if device.type != "cpu":
        return max((peak * 1e12 for peak in data_sheet(device_name(device)).values()), default=None)
    precision = pick_precision(config.train.precision, device, config.train.weights)
    matrix = torch.ones(_MATMUL_SIZE, _MATMUL_SIZE, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    fastest = math.inf
    end = time.perf_counter() + _MATMUL_SECONDS
    while (started := time.perf_counter()) < end:
        torch.mm(matrix, matrix)
        fastest = min(fastest, time.perf_counter() - started)
    return 2 * _MATMUL_SIZE**3 / fastest
