"""Memory of one rank at its peak, by kind: from a trace of its steps, plus measured constants.

Measured with torch 2.13 for CPUs and transformers 5.23 on Python 3.11, Linux, glibc 2.36, by benchmarks/plan.py; for
GPUs by benchmarks/plan_gpu.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from artel.config import RunConfig
from artel.config.schema.quantities import Interval
from artel.models.activation_checkpointing import Recompute
from artel.objectives import Batch
from artel.parallel import World, plan_parallelism
from artel.parallel.mesh import read_parallel_dims
from artel.planning.operations import Operation
from artel.planning.performance import extrapolate
from artel.planning.plan.batches import PlannedData
from artel.planning.plan.deepspeed import Sizes, ZeroSettings
from artel.planning.plan.fake_run import Trace, trace_steps
from artel.planning.plan.live_bytes import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    KINDS,
    LOSS,
    OPTIMIZER,
    WEIGHTS,
    bytes_by_kind,
)
from artel.planning.plan.models import ModelOutline
from artel.planning.plan.offload import fsdp_traffic, host_step
from artel.planning.plan.rounds import ANSWER_BYTES, REWARD_PROCESSES, PlannedRound
from artel.training.optim.optimizer import state_bytes

FRAMEWORK, CHECKPOINT, ALLOCATOR = "framework", "checkpoint_copy", "allocator"
_MIB = 2**20
FRAMEWORK_BYTES = 317 * _MIB
"""Baseline memory per process before its first step: Python, PyTorch, transformers and artel. Measured: 316 to 320 MiB
for a GPT-2 with two layers of width 32 (weights: 1 MiB), in one process and in two."""
_SHARED_LIBRARY_BYTES = 136 * _MIB
"""Pages of library files, shared by all processes of a host. Measured: 135 MiB for the same GPT-2."""
_ADAPTER_BYTES = 50 * _MIB
"""Extra memory per process that trains adapters: peft and its imports, bitsandbytes among them."""
_CPU_BYTES, _CPU_FRACTION = 40 * _MIB, 0.03
"""Memory of a process on a CPU beyond its live tensors: a constant, plus a fraction of them. It holds fragments of the
heap, oneDNN's kernels (0.64 MiB each, 15 to 153 of them) and gloo's copies. Fitted to benchmarks/plan.md."""
_CUDA_CONTEXT = 765 * _MIB
"""Per process on its GPU, outside of PyTorch's allocator: CUDA's context with the kernels of matmuls and attention.
Measured on an H200 with CUDA 13 and PyTorch 2.11: 621 MiB after one tensor, 765 after matmuls and attention."""
_CUBLAS_WORKSPACE = 32 * _MIB
"""Allocated by PyTorch for each process on a Hopper GPU."""
_CUDA_CACHE_BYTES, _CUDA_CACHE_FRACTION = 200 * _MIB, 0.01
"""Cached by PyTorch's allocator: a constant, plus a fraction of the allocated bytes. Measured: 0.1 to 0.65 GiB, median
0.25, in 21 runs of 2 to 18 GiB (benchmarks/plan_gpu.md); 0.9 to 1.7 % in the logs of nanotron's sweep of 2024 on
8 x H100 (Llama 1B, three layouts)."""
_CUDA_HOST_BYTES = 2048 * _MIB
"""Host memory of a process with a GPU: CUDA's libraries. Not measured."""
_FLOAT32_BYTES = 4
ROUNDS_IN_SHARDS = 3
"""Rounds of layers to trace under sharding. While a layer computes, the next one is gathered and the gradients of the
previous one are sent, so the peak of a longer model has the same form only from three layers on."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank."""

    by_kind: dict[str, int]
    """By kind, at the peak."""
    allocated: int
    """Live bytes at the peak."""
    reserved: int
    """Bytes held by the process, including what its allocator caches."""
    host: int
    """Host memory, without what processes share."""
    shared: int
    """Host memory shared by all processes of the host."""
    passes: Mapping[Operation, int]
    """Operations of a step's forward and backward passes, with how often each runs."""
    optimizer_operations: Mapping[Operation, int]
    """Operations of the optimizer's step."""
    writing_operations: Mapping[Operation, int]
    """Operations of a forward pass that writes a token of each answer; empty without rounds."""
    gathered: int = 0
    """More host memory on the first host while it gathers the whole model and optimizer state for a checkpoint."""
    swapped: int = 0
    """Bytes on local disks during training (DeepSpeed's device nvme)."""

    @property
    def operations(self) -> dict[Operation, int]:
        """Operations of a whole step, with how often each runs."""
        return dict(Counter(self.passes) + Counter(self.optimizer_operations))


def estimate_rank_memory(
    config: RunConfig,
    outline: ModelOutline,
    data: PlannedData,
    world: World,
    mode: Recompute,
    precision: str,
    num_rows: int,
    num_micro_batches: int,
    *,
    average_batch: Batch | None,
    round_: PlannedRound | None,
    memory_bytes: int,
    on_gpu: bool,
    compiled: bool,
    zero: ZeroSettings | None = None,
) -> RankMemory:
    """Return the memory of the rank of `world`, with `num_micro_batches` micro-batches of `num_rows` rows per step.

    Memory is for micro-batches of the longest sample, operations are for `average_batch`. With rounds, the peak is that
    of learning or of writing answers. `memory_bytes`: memory of the device. `zero`: the settings of a DeepSpeed
    file; `config` is then the run that is traced in its place.
    """
    num_traced = min(num_micro_batches, 2 * max(1, config.parallel.pipeline))
    rounds = ROUNDS_IN_SHARDS if is_sharded(config, world) else 1
    layer_counts = outline.layer_counts(config.parallel.pipeline, rounds) if config.parallel.pipeline == 1 else None
    batches = [data.batch(num_rows)] * num_traced
    dp_degree = read_parallel_dims(config.parallel, world.size, world.on_host).dp_degree
    concurrent = 0 if round_ is None else round_.concurrent(dp_degree)
    trace_model = partial(
        trace_steps,
        average_batch=average_batch,
        on_gpu=on_gpu,
        compiled=compiled,
        concurrent_answers=concurrent,
        autocasts=zero is None,
    )
    traces = [
        trace_model(config, outline.build(precision, layers), data.objective, batches, world, mode, precision)
        for layers in layer_counts or (None,)
    ]
    peaks = [_find_peaks(trace) for trace in traces]
    candidates = peaks[0] if layer_counts is None else _extrapolate(peaks[0], peaks[1], layer_counts, outline.layers)
    factor = 0.0 if layer_counts is None else (outline.layers - layer_counts[1]) / (layer_counts[1] - layer_counts[0])
    optimizer_operations = extrapolate(traces[0].optimizer_operations, traces[-1].optimizer_operations, factor)
    traced_passes = extrapolate(traces[0].passes, traces[-1].passes, factor)
    passes = {operation: round(count * num_micro_batches / num_traced) for operation, count in traced_passes.items()}
    writing_operations = extrapolate(traces[0].writing_operations, traces[-1].writing_operations, factor)
    if round_ is not None:
        resident_bytes = round_.resident_bytes
        candidates = [moment | resident_bytes for moment in candidates]
        if traces[-1].reading:
            reading = _extrapolate_moment(traces[0].reading, traces[-1].reading, factor)
            free = memory_bytes - _total_bytes(reading)
            model = outline.build(precision)
            candidates.append(reading | resident_bytes | round_.memory(model, "cuda" if on_gpu else "cpu", free))
    moved: dict[str, int] = {}
    swapped = gathered = 0
    if zero is not None:
        full_model = outline.build(precision)
        sizes, state = Sizes.measure(full_model), state_bytes(full_model, config.train)
        shards = world.size if zero.stage else 1
        placement = zero.place(sizes, state // shards, world.size, full_model.config, on_gpu=on_gpu)
        traced_bytes = max(moment[WEIGHTS] for moment in candidates)
        evenness = sum(parameter.nbytes for parameter in full_model.parameters()) / shards / traced_bytes
        resting = dict.fromkeys((ACTIVATIONS, LOSS), 0)
        candidates = [*(moment | placement.device for moment in candidates), resting | placement.step]
        passes, optimizer_operations = zero.traffic(
            passes, optimizer_operations, sizes, world.size, num_micro_batches, evenness=evenness, on_gpu=on_gpu
        )
        moved, swapped = placement.host, placement.disk
        gathered = _FLOAT32_BYTES * sizes.trained + state
    by_kind = max(candidates, key=_total_bytes).copy()
    answer_bytes = sum(by_kind.pop(kind, 0) for kind in (ANSWER_BYTES, REWARD_PROCESSES)) if on_gpu else 0
    saved_bytes = round(
        traces[-1].checkpoint_bytes + factor * (traces[-1].checkpoint_bytes - traces[0].checkpoint_bytes)
    )
    copy_bytes = saved_bytes if zero is None and copies_checkpoints(config) else 0
    process_bytes = FRAMEWORK_BYTES + _ADAPTER_BYTES * (config.model.lora is not None)
    if on_gpu:
        offloaded = [WEIGHTS, GRADIENTS, OPTIMIZER] if config.parallel.offload != "none" else []
        host_bytes = process_bytes + _CUDA_HOST_BYTES + copy_bytes + answer_bytes + sum(moved.values())
        if offloaded:
            dims = read_parallel_dims(config.parallel, world.size, world.on_host)
            gathers = 2 * num_micro_batches if dims.reshard_after_forward else 1
            reductions = 1 if dims.reduces_once else num_micro_batches
            gradient_bytes = max(moment[GRADIENTS] for moment in candidates)
            pinned = config.parallel.offload == "pinned"
            passes |= fsdp_traffic(by_kind[WEIGHTS], gradient_bytes, gathers, reductions, pinned=pinned)
            optimizer_operations = host_step(optimizer_operations)
        host_bytes += sum(by_kind.pop(kind) for kind in offloaded)
        by_kind[COMMUNICATION] += _CUBLAS_WORKSPACE
        cache_bytes = round(_CUDA_CACHE_BYTES + _CUDA_CACHE_FRACTION * _total_bytes(by_kind))
        by_kind[FRAMEWORK] = _CUDA_CONTEXT
    else:
        for kind, size in moved.items():
            by_kind[kind] += size
        gathered = max(0, gathered - world.on_host * sum(by_kind[kind] for kind in (ACTIVATIONS, LOSS)))
        cache_bytes = round(_CPU_BYTES + _CPU_FRACTION * _total_bytes(by_kind))
        by_kind |= {CHECKPOINT: copy_bytes, FRAMEWORK: process_bytes}
        host_bytes = _total_bytes(by_kind) + cache_bytes
    allocated = _total_bytes(by_kind)
    by_kind[ALLOCATOR] = cache_bytes
    return RankMemory(
        by_kind, allocated, allocated + cache_bytes, host_bytes, _SHARED_LIBRARY_BYTES, passes, optimizer_operations,
        writing_operations, gathered, swapped,
    )  # fmt: skip


def _total_bytes(peak: dict[str, int]) -> int:
    return sum(peak.values())


def _find_peaks(trace: Trace) -> list[dict[str, int]]:
    """Return bytes by kind at the peaks of each phase: of the total, and of each kind.

    In a longer model another one of these moments may be the peak of the total.
    """
    peak_kinds = ("", *(kind for kind in KINDS if kind != WEIGHTS))
    return [bytes_by_kind(trace.live.events, *phase, peak_kind) for phase in trace.phases for peak_kind in peak_kinds]


def _extrapolate(
    shorter_peaks: list[dict[str, int]], longer_peaks: list[dict[str, int]], layer_counts: tuple[int, int], layers: int
) -> list[dict[str, int]]:
    """Extrapolate each moment of two shorter models linearly to a model of `layers` layers.

    Skip a pair if a kind would become negative: its two peaks are not the same moment of a step.
    """
    factor = (layers - layer_counts[1]) / (layer_counts[1] - layer_counts[0])
    moments = [
        _extrapolate_moment(shorter, longer, factor)
        for shorter, longer in zip(shorter_peaks, longer_peaks, strict=True)
    ]
    return [moment for moment in moments if min(moment.values()) >= 0]


def _extrapolate_moment(shorter: dict[str, int], longer: dict[str, int], factor: float) -> dict[str, int]:
    return {kind: round(longer[kind] + factor * (longer[kind] - shorter[kind])) for kind in longer}


def copies_checkpoints(config: RunConfig) -> bool:
    """True if checkpoints are written from a copy while training continues (training/checkpoint/async_saver.py)."""
    return config.checkpoint.every != Interval() and config.checkpoint.asynchronous


def is_sharded(config: RunConfig, world: World) -> bool:
    """True if each rank holds and writes only a shard of the weights."""
    return not plan_parallelism(config, world.size, world.on_host).full_matrices
