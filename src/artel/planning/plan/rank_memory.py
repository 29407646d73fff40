"""What one rank holds at its fullest moment, by kind: from the trace of its steps, and from what is not traced."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.config.schema.quantities import Interval
from artel.models.activation_checkpointing import Recompute
from artel.objectives import Batch
from artel.parallel import World, plan_parallelism
from artel.parallel.mesh import read_parallel_dims
from artel.planning.operations import Operation
from artel.planning.performance import extended
from artel.planning.plan import cpu_heap, untraced
from artel.planning.plan.batches import PlannedData
from artel.planning.plan.compiled_kernels import KERNEL_BYTES
from artel.planning.plan.fake_run import Trace, trace_steps
from artel.planning.plan.live_bytes import COMMUNICATION, GRADIENTS, KINDS, OPTIMIZER, WEIGHTS, bytes_by_kind
from artel.planning.plan.mapped_weights import mapped_bytes
from artel.planning.plan.micro_batch_sizes import micro_batch_sizes
from artel.planning.plan.models import ModelOutline

FRAMEWORK, CHECKPOINT, ALLOCATOR = "framework", "checkpoint_copy", "allocator"
ROUNDS_IN_SHARDS = 3
"""While a layer computes, the next is gathered and the gradients of the one before travel: only from three layers on is
the fullest moment of a longer model the same."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank."""

    kinds: dict[str, int]
    """At the fullest moment."""
    allocated: int
    """What lives then."""
    reserved: int
    """What the process holds, with what its allocator keeps between tensors."""
    host: int
    """Of host memory, without what processes share."""
    shared: int
    """Of host memory, which all processes of the host share."""
    passes: Mapping[Operation, int]
    """What the forward and backward passes of a step do, and how often."""
    stepping: Mapping[Operation, int]
    """What the optimizer's step does."""

    @property
    def operations(self) -> dict[Operation, int]:
        """What a step does, and how often."""
        return dict(Counter(self.passes) + Counter(self.stepping))


def rank_memory(
    run: RunConfig,
    outline: ModelOutline,
    data: PlannedData,
    world: World,
    how: Recompute,
    precision: str,
    rows: int,
    count: int,
    *,
    usual: Batch | None,
    on_gpu: bool,
    compiled: bool,
) -> RankMemory:
    """Memory of the rank of `world`, with `count` micro-batches of `rows` rows a step.

    Memory is that of micro-batches of the longest sample, operations are those of `usual` ones.
    """
    traced = min(count, 2 * max(1, run.parallel.pipeline))
    shards = is_sharded(run, world)
    rounds = ROUNDS_IN_SHARDS if shards else 1
    counts = outline.layer_counts(run.parallel.pipeline, rounds) if run.parallel.pipeline == 1 else None
    batches = [data.batch(rows)] * traced
    traces = [
        trace_steps(
            run,
            outline.build(precision, layers),
            data.objective,
            batches,
            world,
            how,
            precision,
            usual=usual,
            on_gpu=on_gpu,
            compiled=compiled,
        )
        for layers in counts or (None,)
    ]
    lines = [_peaks(trace) for trace in traces]
    peaks = lines[0] if counts is None else _extended(lines[0], lines[1], counts, outline.layers)
    times = 0.0 if counts is None else (outline.layers - counts[1]) / (counts[1] - counts[0])
    stepping = extended(traces[0].stepping, traces[-1].stepping, times)
    of_traced = extended(traces[0].passes, traces[-1].passes, times)
    passes = {operation: round(often * count / traced) for operation, often in of_traced.items()}
    kinds = max(peaks, key=_total).copy()
    slack = kinds.pop(ALLOCATOR)
    kept = round(traces[-1].kept_bytes + times * (traces[-1].kept_bytes - traces[0].kept_bytes))
    copy = kept if copies_checkpoints(run) else 0
    process = untraced.FRAMEWORK + untraced.ADAPTERS * (run.model.lora is not None)
    if on_gpu:
        offloaded = [WEIGHTS, GRADIENTS, OPTIMIZER] if run.parallel.offload != "none" else []
        host = process + untraced.CUDA_HOST + copy + sum(kinds.pop(kind) for kind in offloaded)
        kinds[COMMUNICATION] += untraced.CUBLAS_WORKSPACE
        tensors = sum(kinds.values())
        kinds[FRAMEWORK] = untraced.CUDA_CONTEXT
        allocated = tensors + kinds[FRAMEWORK]
        kinds[ALLOCATOR] = round(untraced.CUDA_CACHED + untraced.CUDA_CACHED_SHARE * tensors)
        return RankMemory(kinds, allocated, allocated + kinds[ALLOCATOR], host, untraced.LIBRARIES, passes, stepping)
    kernels = _compiled_bytes(run, outline.build(precision), data, world, rows, traces[-1])
    kinds |= {CHECKPOINT: copy, FRAMEWORK: process + kernels}
    allocated = sum(kinds.values())
    kinds |= {ALLOCATOR: slack}
    held = allocated + slack
    mapped, read_from = (0, 0) if shards else mapped_bytes(outline, precision)
    shared = untraced.LIBRARIES + mapped + read_from
    return RankMemory(kinds, allocated, held, held - mapped, shared, passes, stepping)


def _total(peak: dict[str, int]) -> int:
    return sum(peak.values())


def _tensors(peak: dict[str, int]) -> int:
    return _total(peak) - peak.get(ALLOCATOR, 0)


def _peaks(trace: Trace) -> list[dict[str, int]]:
    """By kind, the fullest moments of each phase; and what the allocator holds beyond the fullest of all.

    Besides the moment that is the fullest in all, those at which one kind is: in a longer model another may be fuller.
    """
    moments = ("", *(kind for kind in KINDS if kind != WEIGHTS))
    peaks = [bytes_by_kind(trace.live.events, *phase, most) for phase in trace.phases for most in moments]
    before = bytes_by_kind(trace.live.events, trace.begin - 1, trace.begin)
    heap = _heap_bytes(trace) + sum(before.values())
    highest = max(sum(peak.values()) for peak in peaks)
    for peak in peaks:
        peak[ALLOCATOR] = max(0, heap - highest)
    return peaks


def _extended(
    fewer: list[dict[str, int]], more: list[dict[str, int]], counts: tuple[int, int], layers: int
) -> list[dict[str, int]]:
    """Each moment of a model of so many layers, from those of two shorter ones: a straight line in the layers.

    Where the two are not the same moment of a step, a kind would become less than nothing: such a pair is left out.
    What the allocator holds beyond the tensors is at most the share that it is of them in the longer one: it jumps with
    where the pieces happen to lie, and a line through two jumps would multiply them by the layers.
    """
    times = (layers - counts[1]) / (counts[1] - counts[0])
    extended = [
        {kind: round(longer[kind] + times * (longer[kind] - shorter[kind])) for kind in longer}
        for shorter, longer in zip(fewer, more, strict=True)
    ]
    share = max(moment.get(ALLOCATOR, 0) for moment in more) / max(map(_tensors, more))
    most = round(share * max(map(_tensors, extended)))
    for moment in extended:
        moment[ALLOCATOR] = min(max(0, moment.get(ALLOCATOR, 0)), most)
    return [moment for moment in extended if min(moment.values()) >= 0]


def _heap_bytes(trace: Trace) -> int:
    """Pages that a process takes for the tensors of the steps, where they are on a CPU."""
    numbers: dict[int, int] = {}
    lines = []
    for storage, comes in trace.live.events[trace.begin :]:
        if comes:
            numbers[id(storage)] = len(numbers) + 1
            lines.append(f"{numbers[id(storage)]} {storage.size}")
        elif id(storage) in numbers:
            lines.append(f"-{numbers[id(storage)]} 0")
    command = [sys.executable, str(Path(cpu_heap.__file__))]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)
    return int(done.stdout)


def _compiled_bytes(
    run: RunConfig, model: PreTrainedModel, data: PlannedData, world: World, rows: int, trace: Trace
) -> int:
    """Of the kernels that oneDNN compiles for the products of a rank's micro-batches of `rows` rows."""
    dims = read_parallel_dims(run.parallel, world.size, world.on_host)
    widths = {side for parameter in model.parameters() for side in parameter.shape}
    sizes = micro_batch_sizes(run, data, rows, dims.dp_degree)
    return KERNEL_BYTES * trace.live.kernels.count(widths, sizes)


def copies_checkpoints(run: RunConfig) -> bool:
    """Whether checkpoints are written from a copy, while training goes on (training/checkpoint/async_saver.py)."""
    return run.checkpoint.every != Interval() and run.checkpoint.asynchronous


def is_sharded(run: RunConfig, world: World) -> bool:
    """Whether each rank holds, and writes, a part of its own."""
    return not plan_parallelism(run, world.size, world.on_host).full_matrices
