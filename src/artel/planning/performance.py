"""Predicted time of a training step: the sum over its operations, each by the slower of its limits.

On a machine measured by `artel hardware`, times are the measured ones (`rates`). For other hardware they come from data
sheets and from published measurements of how much of the peak is reached:

    matmuls       FLOPs over peak x `_MATMUL_FRACTION`, or bytes over memory bandwidth, whichever is longer
    attention     the same with `_ATTENTION_FRACTION`
    other work    bytes over memory bandwidth x `_MEMORY_FRACTION`
    collectives   latency of each hop + bytes through a link over its bandwidth in NCCL (alpha-beta)
    offload       bytes over the PCIe link x `_PCIE_FRACTION`, over the host's memory bandwidth x `_HOST_FRACTION`
                  (the optimizer's step), over the disks; the processes of a host share the last two

On a GPU a step takes at least as long as the host needs to launch its operations (`_LAUNCH`). This limits small models.
On a CPU the same core launches and computes. So the time of launches (`start`) and the overhead of DTensors
(`dispatch`) are added.

On a GPU, collectives of data parallelism (gradients, weights of FSDP) overlap with computation. Only their excess over
it, and the first and last of them, count. Collectives of tensor, context and expert parallelism do not overlap. On a
CPU the cores that compute also communicate, so all collectives count. Copies of offloaded weights and gradients overlap
too, in both directions at the same time. The optimizer's step on the host does not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from artel.planning.hardware import Hardware
from artel.planning.operations import (
    ATTENTION,
    COLLECTIVE,
    DISK,
    DISPATCH,
    FUSED,
    HOST,
    MATMUL,
    MEMORY,
    PAGEABLE,
    READ_AHEAD,
    TO_DEVICE,
    TO_HOST,
    TRANSFER,
    VIEW,
    Operation,
)
from artel.planning.rates import FLASH_BACKWARD, Rates, rate_key

# Range of error: all but a few of 34 cases were within it by wall time, on a shared host
# (benchmarks/plan_speed.md).
MEASURED_ERROR = 0.15
PUBLIC_ERROR = 0.30

# Best rate of bf16 matmuls of any shape: S. Bekman, "Machine Learning Engineering", compute/accelerator,
# "Maximum Achievable Matmul FLOPS" (2025); an H200 as an H100.
_MATMUL_FRACTION = {
    "a100-40gb": 0.869,
    "a100-80gb": 0.869,
    "a100-40gb-pcie": 0.811,
    "a100-80gb-pcie": 0.811,
    "h100-80gb": 0.803,
    "h100-96gb": 0.803,
    "h200": 0.803,
    "b200": 0.776,
    "mi300x": 0.514,
}
# For other accelerators, as assumed by PyTorch's inductor (torch/utils/_runtime_estimation.py, flops_to_ns).
_DEFAULT_MATMUL_FRACTION = 0.75
# cuDNN on an H100, heads of 128, causal, forward: 539 of 989.5 TFLOP/s (Shah et al. 2024, "FlashAttention-3", figure
# 5). On an A100 FlashAttention 2 reaches more of the peak (Dao 2023); that is not used.
_ATTENTION_FRACTION = 0.54
# Relative to the forward pass: 63 % of the peak, the forward pass 73 % (Dao 2023, "FlashAttention-2", section 4).
_ATTENTION_BACKWARD = 63 / 73
# Fraction of the peak reached by plain loads: 2.8 of 3.35 TB/s on an H100 by Nsight Compute (mikamirai.com/blog/
# gpu-memory-bandwidth, 2026).
_MEMORY_FRACTION = 0.84
# Bandwidth of each link in NCCL's model, relative to its peak in one direction (src/graph/topo.h: 370 of 450 GB/s for
# NVLink 4, 240 of 300 for NVLink 3, 120 of 150 for NVLink 2, 720 of 900 for NVLink 5). For PCIe 24 of 32, from
# PyTorch's torch/_inductor/comm_analysis.py.
_LINK_FRACTION = {"NVLink 4": 370 / 450, "NVLink 3": 0.8, "NVLink 2": 0.8, "NVLink 5": 0.8}
_DEFAULT_LINK_FRACTION = 0.75
# Pinned memory: 12 of 16 GB/s for a V100 (Rajbhandari et al. 2021, "ZeRO-Infinity", figure 2b), 24 of 32 with PCIe 4 as
# above. Memory that is not pinned is copied to a pinned buffer first: half of that is assumed.
_PCIE_FRACTION, _PAGEABLE_FRACTION = 0.75, 0.375
# DeepSpeed's CPU-Adam on two Xeon 8168 (256 GB/s): 10 billion weights in 2.57 s, 28 bytes each = 109 GB/s (Ren et al.
# 2021, "ZeRO-Offload", table 4). PyTorch's fused AdamW moves the same bytes.
_HOST_FRACTION = 0.43
# Seconds of a ring: at its start, and per hop (NCCL, src/graph/tuning.cc: base and hardware latency of LL).
_RING_LATENCY = 6.6e-6
_HOP_LATENCY, _NETWORK_HOP_LATENCY = 0.6e-6, 2.7e-6

_OFFLOAD, _BESIDE = (TRANSFER, HOST, DISK), (TO_DEVICE, TO_HOST, READ_AHEAD)

# Seconds to launch an operation on a GPU. PyTorch's smallest matmuls and elementwise operators took 16 to 18
# microseconds on an H200, including the wait for their end (benchmarks/NOTES.md); most of that is the launch.
_LAUNCH = 1e-5


@dataclass(frozen=True, slots=True)
class Range:
    """A value with its range of error."""

    low: float
    mid: float
    high: float

    def scaled(self, factor: float) -> Range:
        return Range(self.low * factor, self.mid * factor, self.high * factor)

    def inverse(self, factor: float = 1.0) -> Range:
        """Return `factor` divided by this range."""
        return Range(factor / self.high, factor / self.mid, factor / self.low)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step."""

    seconds: Range
    by_kind: dict[str, float]
    """Seconds by kind, in the middle of the range. `collective`: the part that does not overlap. `launches`: time that
    a GPU waits for launches, or that a CPU spends on them. `transfer`, `host`, `disk`: what offload adds. `waiting`: a
    pipeline's bubble and, on a CPU, waiting for slower processes."""
    source: str

    def tokens_per_second(self, tokens: float) -> Range:
        """Return the speed, given the tokens of a step on all processes."""
        return self.seconds.inverse(tokens)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Time, energy and cost of a whole run."""

    tokens_per_second: Range
    hours: Range
    energy_kwh: Range | None
    """Upper bound: the maximum power of the accelerators, without the hosts. None if unknown."""
    cost: Range | None
    """In the currency of the price; None without a price."""


class Cost(Protocol):
    """Seconds of one operation on some hardware."""

    def seconds(self, operation: Operation) -> float: ...


def predict_step_time(
    operations: Mapping[Operation, int], hardware: Hardware, rates: Rates | None = None, *, bubble: float = 0.0
) -> StepTime:
    """Predict the time of a step that runs `operations`, each as often as its count, on every process.

    `rates` were measured on this machine, if the plan is for it. `bubble` is the waiting time of a pipeline stage over
    its working time (`pipeline_bubble`).
    """
    cost: Cost = PublicCost(hardware) if rates is None else MeasuredCost(rates)
    by_kind: defaultdict[str, float] = defaultdict(float)
    overlapped, longest_overlapped = 0.0, 0.0
    offloaded: defaultdict[str, float] = defaultdict(float)
    beside: defaultdict[str, float] = defaultdict(float)
    """Seconds of copies beside the computation, by direction."""
    for operation, count in operations.items():
        seconds = cost.seconds(operation)
        if operation.kind == COLLECTIVE and hardware.device != "cpu" and _is_overlapped(operation):
            overlapped += count * seconds
            longest_overlapped = max(longest_overlapped, seconds)
        elif operation.kind in _OFFLOAD and operation.name in _BESIDE:
            beside[operation.name] += count * seconds
        elif operation.kind in _OFFLOAD:
            offloaded[operation.kind] += count * seconds
        else:
            by_kind[operation.kind] += count * seconds
    compute_seconds = sum(by_kind.values())
    counts: Counter[str] = Counter()
    for operation, count in operations.items():
        counts[operation.kind] += count
    num_launches = counts.total() - sum(counts[kind] for kind in (COLLECTIVE, DISPATCH, *_OFFLOAD))
    if hardware.device != "cpu":
        by_kind["launches"] = max(0.0, _LAUNCH * (num_launches - counts[VIEW]) - compute_seconds)
    elif rates is not None and "start" in rates:
        by_kind["launches"] = rates.seconds("start", num_launches)
    compute_seconds += by_kind["launches"]
    by_kind[COLLECTIVE] += max(overlapped - compute_seconds, min(2 * longest_overlapped, overlapped))
    for name, seconds in beside.items():
        if seconds == max(beside.values()):  # the others run at the same time
            kind = DISK if name == READ_AHEAD else TRANSFER
            offloaded[kind] += max(0.0, seconds - max(compute_seconds, overlapped))
            break
    by_kind |= offloaded
    step_seconds = sum(by_kind.values())
    by_kind["waiting"] = bubble * step_seconds
    barriers = sum(count for operation, count in operations.items() if _waits_for_slowest(operation))
    if barriers and hardware.device == "cpu" and rates is not None and "waiting" in rates:
        by_kind["waiting"] += barriers * rates.seconds("waiting", (step_seconds - by_kind[COLLECTIVE]) / barriers)
    step_seconds += by_kind["waiting"]
    error = PUBLIC_ERROR if rates is None else MEASURED_ERROR
    source = hardware.source if rates is None else "artel hardware"
    return StepTime(Range(step_seconds * (1 - error), step_seconds, step_seconds * (1 + error)), dict(by_kind), source)


def extrapolate(small: Mapping[Operation, int], large: Mapping[Operation, int], factor: float) -> dict[Operation, int]:
    """Extrapolate operations linearly: `large` plus `factor` times the difference between `large` and `small`.

    An operation over all layers (the optimizer's step) gets larger. All other operations occur more often.
    """
    added, replaced = Counter(large) - Counter(small), Counter(small) - Counter(large)
    counts = Counter(large)
    for old in replaced.elements():
        larger = [new for new in +added if _is_same_at_other_size(old, new) and new.bytes >= old.bytes]
        if larger:
            new = min(larger, key=lambda operation: operation.bytes)
            sizes = {
                name: round(getattr(new, name) + factor * (getattr(new, name) - getattr(old, name)))
                for name in ("flops", "bytes", "exponentials")
            }
            counts[replace(new, **sizes)] += 1
            counts[new] -= 1
            added[new] -= 1
    for operation, count in added.items():
        counts[operation] += round(factor * count)
    return dict(+counts)


def _is_same_at_other_size(one: Operation, other: Operation) -> bool:
    return one == replace(other, flops=one.flops, bytes=one.bytes, exponentials=one.exponentials)


def forecast_run(
    step: StepTime, tokens: float, hours: Range, hardware: Hardware, price_per_hour: float | None = None
) -> Forecast:
    """Return the forecast of a run of `hours`, with `tokens` per step. The price is for all nodes, per hour."""
    watts = None if hardware.watts is None else hardware.watts * hardware.world_size
    return Forecast(
        tokens_per_second=step.tokens_per_second(tokens),
        hours=hours,
        energy_kwh=None if watts is None else hours.scaled(watts / 1000),
        cost=None if price_per_hour is None else hours.scaled(price_per_hour),
    )


def pipeline_bubble(schedule: str, stages: int, micro_batches: int, chunks: int = 2) -> float:
    """Return the waiting time of a pipeline stage over its working time (Narayanan et al. 2021, section 2.2).

    (p - 1) / m for 1F1B and GPipe, divided by `chunks` for interleaved stages, 0 for zero-bubble (Qi et al. 2023). With
    sequential micro-batches only one stage works at a time.
    """
    if schedule == "sequential":
        return stages - 1
    if schedule == "zero_bubble":
        return 0.0
    return (stages - 1) / micro_batches / (chunks if schedule == "interleaved" else 1)


def find_slowest_stage(
    schedule: str, micro_batches: int, step_seconds: Sequence[float], pass_seconds: Sequence[float]
) -> tuple[int, float]:
    """Return the slowest stage of a pipeline and its bubble: its waiting time over its working time.

    `step_seconds` and `pass_seconds` have a value per stage, with and without the optimizer's step. While the slowest
    stage waits, the others run a micro-batch. For equal stages the bubble is `pipeline_bubble`.
    """
    slowest = max(range(len(step_seconds)), key=step_seconds.__getitem__)
    if len(step_seconds) == 1:
        return slowest, 0.0
    mean_seconds = (sum(pass_seconds) - pass_seconds[slowest]) / (len(pass_seconds) - 1)
    return slowest, pipeline_bubble(schedule, len(step_seconds), micro_batches) * mean_seconds / step_seconds[slowest]


class MeasuredCost:
    """Seconds of operations, from measurements of this machine."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates

    def seconds(self, operation: Operation) -> float:
        if operation.kind == COLLECTIVE:
            return self._collective_seconds(operation)
        if operation.kind == DISPATCH:
            return self._look_up("dispatch", 1) if "dispatch" in self._rates else 0.0
        if operation.kind == VIEW:
            return 0.0
        if operation.kind == FUSED:
            return self._look_up("fused", operation.bytes) + self._look_up("exponentials", operation.exponentials)
        key = self._nearest_key(operation)
        if operation.kind == MEMORY:
            return self._look_up(key, operation.bytes)
        return operation.num_matmuls * self._look_up(key, operation.flops / operation.num_matmuls)

    def _nearest_key(self, operation: Operation) -> str:
        """Return the key of the measured rate, or of the nearest one.

        The nearest has another dtype, another layout of a matmul, or another kernel or pass of attention. Unmeasured
        memory-bound operations count as additions.
        """
        exact = rate_key(operation)
        if exact in self._rates:
            return exact
        if operation.kind == MEMORY:
            similar = [operation, replace(operation, name="aten.add")]
        elif operation.kind == MATMUL:
            similar = [operation, replace(operation, layout="nn")]
        else:
            kernels = [replace(operation, name=name) for name in (ATTENTION, FLASH_BACKWARD)]
            similar = [
                operation,
                *kernels,
                *(replace(kernel, is_backward=not kernel.is_backward) for kernel in kernels),
            ]
        dtypes = (operation.dtype, "bf16", "fp32") if operation.dtype == "fp16" else (operation.dtype, "fp32", "bf16")
        keys = (rate_key(replace(candidate, dtype=dtype)) for candidate in similar for dtype in dtypes)
        return next((key for key in keys if key in self._rates), exact)

    def _look_up(self, key: str, size: float) -> float:
        return self._rates.seconds(key, size) if size else 0.0

    def _collective_seconds(self, operation: Operation) -> float:
        """Scale the measurement of two processes. Sending the tensor once takes half of an all-reduce.

        No collective is faster than the smallest measured one, which is the time to synchronize.
        """
        name = operation.name
        num_ranks = len(operation.ranks)
        key = "all_gather" if "gather" in name else "reduce_scatter" if "reduce_scatter" in name else "all_reduce"
        if num_ranks < 2 or key not in self._rates:
            return 0.0
        num_bytes = max(operation.bytes, self._rates.points[key][0][0])
        sends = _sends_per_process(operation) if key == "all_reduce" else 2
        return self._look_up(key, num_bytes) * sends * (num_ranks - 1) / num_ranks


class PublicCost:
    """Seconds of operations, from data sheets and published measurements."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._matmul_fraction = _MATMUL_FRACTION.get(hardware.name, _DEFAULT_MATMUL_FRACTION)

    def seconds(self, operation: Operation) -> float:
        if operation.kind == COLLECTIVE:
            return self._collective_seconds(operation)
        if operation.kind in (DISPATCH, VIEW):  # not measured with a GPU
            return 0.0
        if operation.kind in _OFFLOAD:
            return self._offload_seconds(operation)
        assert self._hardware.memory_bandwidth is not None
        memory_seconds = operation.bytes / (self._hardware.memory_bandwidth * _MEMORY_FRACTION)
        if operation.kind == MATMUL:
            return max(memory_seconds, operation.flops / (self._peak_flops(operation.dtype) * self._matmul_fraction))
        if operation.kind == ATTENTION:
            fraction = _ATTENTION_FRACTION * (_ATTENTION_BACKWARD if operation.is_backward else 1)
            return max(memory_seconds, operation.flops / (self._peak_flops(operation.dtype) * fraction))
        return memory_seconds

    def _offload_seconds(self, operation: Operation) -> float:
        host, count = self._hardware.host, self._hardware.count
        assert host is not None  # as for every accelerator with a memory bandwidth
        if operation.kind == TRANSFER:
            fraction = _PAGEABLE_FRACTION if operation.dtype == PAGEABLE else _PCIE_FRACTION
            rate = min(host.link, host.links / count) * fraction
        else:
            rate = (host.memory * _HOST_FRACTION if operation.kind == HOST else host.disk) / count
        return operation.bytes / (rate * 1e9)

    def _peak_flops(self, dtype: str) -> float:
        """Return peak FLOP/s. A dtype without hardware support is computed in float32."""
        peaks = self._hardware.peak_flops
        return peaks.get(dtype) or peaks["fp32"]

    def _collective_seconds(self, operation: Operation) -> float:
        num_ranks = len(operation.ranks)
        if num_ranks < 2:
            return 0.0
        crosses_nodes = len({rank // self._hardware.count for rank in operation.ranks}) > 1
        link = self._hardware.network if crosses_nodes else self._hardware.link
        assert link is not None
        hop = _NETWORK_HOP_LATENCY if crosses_nodes else _HOP_LATENCY
        sends = _sends_per_process(operation)
        latency = _RING_LATENCY + sends * (num_ranks - 1) * hop
        fraction = 1.0 if link.name == "network" else _LINK_FRACTION.get(link.name, _DEFAULT_LINK_FRACTION)
        return latency + sends * (num_ranks - 1) / num_ranks * operation.bytes / (link.bandwidth * fraction)


def _sends_per_process(operation: Operation) -> int:
    """Return how often each process sends the tensor: twice in a ring all-reduce."""
    return 2 if "all_reduce" in operation.name or "allreduce" in operation.name else 1


def _waits_for_slowest(operation: Operation) -> bool:
    """True if processes wait in the operation for the slowest one. A pipeline's send and receive are in its bubble."""
    return (
        operation.kind == COLLECTIVE and len(operation.ranks) > 1 and operation.name not in ("c10d.send", "c10d.recv_")
    )


def _is_overlapped(operation: Operation) -> bool:
    """True for collectives of data parallelism, which overlap with computation: FSDP and DDP call c10d directly."""
    return operation.name in ("c10d.allreduce_", "c10d._allgather_base_", "c10d._reduce_scatter_base_")
