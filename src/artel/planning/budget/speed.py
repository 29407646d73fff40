"""Time of a step for each size, measured on two small models or planned from published speeds."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from artel.config import ModelConfig, RunConfig
from artel.errors import InputError
from artel.host import usable_cores
from artel.messages import logger, silence_messages
from artel.models.attention_switch import use_artel_attention
from artel.models.device import pick_precision
from artel.models.experts import compute_experts_in_autocast
from artel.models.loading.build import build_model
from artel.objectives import Batch
from artel.parallel import World
from artel.parallel.data_parallel import DataParallel
from artel.planning.budget.sizes import DEPTHS, Size
from artel.planning.hardware import Hardware
from artel.planning.operations import VIEW
from artel.planning.plan.batches import PlannedData
from artel.planning.plan.run_plan import make_plan
from artel.training.memory import release_free_memory
from artel.training.optim.optimizer import Optimizer

_MEASURED_SIZES = (Size(2), Size(5))
_PLANNED_SIZES = (Size(8), Size(20))
_ROWS = 8  # rows of the larger measured micro-batch; the smaller one has a single row
_MIN_STEPS, _MAX_STEPS, _MEASURE_SECONDS = 3, 30, 2.0
"""Steps to measure for each size: as many as fit into `_MEASURE_SECONDS`. The first one allocates. One is enough if it
takes twice as long."""
_MAX_WALL_RATIO = 2.0
"""Maximum wall time of a step, in multiples of its CPU time. Wall time includes threads that wait for each other, and a
step really takes that time: by CPU time 5 × 320 on two cores had 9,746 tokens/s, but a run of it 5,030. Wall time also
includes other programs, which a step does not: next to a busy program the same model had 875, 7,551 and 24,327 tokens/s
by wall time."""
_LAUNCH_SECONDS = 5e-6
"""Minimum seconds per operation on a GPU, because the host launches one after another. Not measured by artel."""


@dataclass(frozen=True, slots=True)
class SizeTimes:
    """Times of one model size, for all processes together."""

    size: Size
    flops: float
    """FLOPs per token."""
    seconds_per_token: float
    """Seconds of forward and backward per additional token in a step."""
    seconds_per_step: float
    """Fixed seconds of a step: the optimizer, and the part of forward and backward that does not depend on the
    tokens."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of a step for any size: a power law through two sizes. Beyond them FLOP/s stay constant."""

    small: SizeTimes
    large: SizeTimes
    vocabulary: int
    block: int
    source: str
    """Source of the times, for people."""
    method: str = ""
    """Origin of the times, as a phrase for messages."""

    def seconds(self, size: Size, tokens: int) -> float:
        """Return the seconds of a step of `tokens` tokens."""
        flops = size.flops_per_token(self.vocabulary, self.block)
        position = _log_position(flops, self.small.flops, self.large.flops)
        rates = (times.flops / times.seconds_per_token for times in (self.small, self.large))
        rate = _interpolate(min(1.0, max(0.0, position)), *rates)
        position = _log_position(
            size.layer_parameters, self.small.size.layer_parameters, self.large.size.layer_parameters
        )
        return tokens * flops / rate + _interpolate(position, self.small.seconds_per_step, self.large.seconds_per_step)


def _log_position(value: float, first: float, last: float) -> float:
    """Return the position of `value` on a log scale: 0 at `first`, 1 at `last`."""
    return math.log(value / first) / math.log(last / first)


def _interpolate(position: float, first: float, last: float) -> float:
    return first * (last / first) ** position


def measure_speed(config: RunConfig, data: PlannedData, processes: int, on_host: int) -> Speed:
    """Measure a few steps of two small models on this CPU, with the cores of one process. Takes about 15 s."""
    threads = config.train.threads or max(1, usable_cores() // on_host)
    with _use_threads(threads):
        times = []
        for index, size in enumerate(_MEASURED_SIZES, 1):
            logger.info(
                "measuring small model %s of %s: %s layers of %s", index, len(_MEASURED_SIZES), size.layers, size.width
            )
            times.append(_measure_size(config, data, size, processes))
    small, large = limit_slowdown(times[0], times[1]), limit_slowdown(times[1], times[0])
    prefix = f"{processes} processes with " if processes > 1 else ""
    plural = "" if threads == 1 else "s"
    source = f"measured just now for {prefix}{threads} thread{plural}"
    return Speed(small, large, data.tokenizer.vocabulary, config.data.block, source, "measured on two small models")


def measure_smallest(config: RunConfig, data: PlannedData, processes: int, on_host: int) -> Callable[[int], float]:
    """Measure only the smallest model, in a few seconds. Return a function from tokens to seconds of a step."""
    with _use_threads(config.train.threads or max(1, usable_cores() // on_host)):
        times = _measure_size(config, data, Size(DEPTHS[0]), processes)
    return lambda tokens: tokens * times.seconds_per_token + times.seconds_per_step


def limit_slowdown(times: SizeTimes, reference: SizeTimes) -> SizeTimes:
    """Return the times with at least half of the FLOP/s of `reference`.

    On an idle processor 128 × 2 reaches 0.8 of the FLOP/s of 320 × 5. If other programs use the cores, two threads wait
    for each other at every small matmul. Then all steps may be slow: a fifteenth was measured.
    """
    max_seconds = 2 * times.flops * reference.seconds_per_token / reference.flops
    return replace(times, seconds_per_token=min(times.seconds_per_token, max_seconds))


def _measure_size(config: RunConfig, data: PlannedData, size: Size, processes: int) -> SizeTimes:
    device = torch.device("cpu")
    objective = data.objective
    model_config = ModelConfig.model_validate({"config": size.config()})
    request = objective.model_request(model_config, config.data.block, config.seed)
    model = build_model(request, data.tokenizer).model
    use_artel_attention(model)
    compute_experts_in_autocast(model)
    precision = pick_precision(config.train.precision, device)
    model.train()
    strategy = DataParallel(model, objective, World(0, 1, 0, device), precision)
    optimizer = Optimizer(model, config.train, config.seed, None, precision)
    tokens: list[int] = []
    pass_seconds: list[float] = []
    step_seconds: list[float] = []
    for batch in (data.batch(1), data.batch(_ROWS)):
        passes, steps = zip(*_time_steps(strategy, optimizer, batch), strict=True)
        tokens.append(batch.tokens)
        pass_seconds.append(typical_seconds(passes))
        step_seconds.append(typical_seconds(steps))
    # Measured times are noisy: another row takes at least half of the mean time per row.
    seconds_per_token = max(
        (pass_seconds[1] - pass_seconds[0]) / (tokens[1] - tokens[0]), pass_seconds[1] / tokens[1] / 2
    )
    fixed_seconds = max(0.0, pass_seconds[1] - seconds_per_token * tokens[1])
    flops = size.flops_per_token(data.tokenizer.vocabulary, config.data.block)
    return SizeTimes(size, flops, seconds_per_token / processes, min(step_seconds) + fixed_seconds)


_WallAndCpuSeconds = tuple[float, float]
"""Wall seconds, and CPU seconds of this thread."""


def typical_seconds(times: Sequence[_WallAndCpuSeconds]) -> float:
    """Return the median wall time, capped by CPU time to exclude other programs.

    The minimum would be too optimistic, because a run has slow steps too. By its fastest step 6 × 384 was chosen for
    3,151 tokens/s on two cores of a shared host, but it reached 2,265.
    """
    wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
    return min(wall, _MAX_WALL_RATIO * cpu)


def _time_steps(
    strategy: DataParallel, optimizer: Optimizer, batch: Batch
) -> Iterator[tuple[_WallAndCpuSeconds, _WallAndCpuSeconds]]:
    """Yield the times of a few steps: of forward and backward, and of the optimizer."""
    end = time.perf_counter() + _MEASURE_SECONDS
    for num_steps in range(_MAX_STEPS):
        now = time.perf_counter()
        if (num_steps >= _MIN_STEPS and now >= end) or (num_steps and now >= end + _MEASURE_SECONDS):
            return
        started = time.perf_counter(), time.thread_time()
        strategy.run([batch], float(batch.targets), optimizer.loss_factor)
        pass_end = time.perf_counter(), time.thread_time()
        optimizer.clip_and_step(0.01, strategy.gradient_norm())
        step_end = time.perf_counter(), time.thread_time()
        yield (
            (pass_end[0] - started[0], pass_end[1] - started[1]),
            (step_end[0] - pass_end[0], step_end[1] - pass_end[1]),
        )


@contextmanager
def _use_threads(threads: int) -> Iterator[None]:
    """Use `threads` threads inside the block. Then release free memory, or training would start with 450 MB more."""
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)
        gc.collect()
        release_free_memory()


def plan_speed(config: RunConfig, vocabulary: int, hardware: Hardware) -> Speed:
    """Plan two sizes on `hardware`, with two batches each, as `artel plan` does.

    Raise InputError if their speed is unknown.
    """
    if not hardware.has_rates:
        what = f"true needs the planned speed, but {hardware.name} is not in the table of accelerators"
        raise InputError.at("model.auto", what, "write model: {config: {model_type: …}}, or model: {from: FOLDER}")
    if config.parallel.offload != "none":
        what = "model.auto needs the planned speed, but transfers of offloaded weights are not planned"
        raise InputError.at("parallel.offload", what, "remove it, or set the model's sizes")
    small, large = (_plan_size(config, size, vocabulary, hardware) for size in _PLANNED_SIZES)
    return Speed(
        small, large, vocabulary, config.data.block, f"by {hardware.source}", "computed from the plans of two models"
    )


@silence_messages()
def _plan_size(config: RunConfig, size: Size, vocabulary: int, hardware: Hardware) -> SizeTimes:
    model = ModelConfig.model_validate({"config": size.config()})
    seconds, tokens = [], []
    for rows in (_ROWS, 4 * _ROWS):
        batch = {"batch": rows * hardware.world_size, "micro_batch": rows}
        train = config.train.model_copy(update={**batch, "budget": None, "steps": 1})
        plan = make_plan(config.model_copy(update={"model": model, "train": train}), hardware)
        assert plan.step is not None
        launch_seconds = _LAUNCH_SECONDS * max(
            sum(count for operation, count in rank.operations.items() if operation.kind != VIEW) for rank in plan.ranks
        )
        seconds.append(max(plan.step.seconds.mid, launch_seconds if hardware.device == "cuda" else 0.0))
        tokens.append(plan.tokens)
    flops = size.flops_per_token(vocabulary, config.data.block)
    seconds_per_token = max((seconds[1] - seconds[0]) / (tokens[1] - tokens[0]), seconds[1] / tokens[1] / 10)
    return SizeTimes(size, flops, seconds_per_token, max(seconds[0] - seconds_per_token * tokens[0], seconds[0] / 100))
