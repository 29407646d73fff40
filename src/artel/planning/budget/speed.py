"""How long a step of each size takes: measured here on two small models, or planned for hardware by its figures."""

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
from artel.planning.plan.plan import make_plan
from artel.training.memory import release_free_memory
from artel.training.optim.optimizer import Optimizer

_MEASURED = (Size(2), Size(5))
_PLANNED = (Size(8), Size(20))
_ROWS = 8  # of a micro-batch that is measured, beside one of a single row
_FEWEST, _MOST, _SECONDS = 3, 30, 2.0
"""Steps that are measured of each size, as many as the seconds allow; the first allocates. One is enough where it takes
twice the seconds."""
_WAITING = 2.0
"""How many times its processor time a step may take by the clock. Threads wait for one another, which is part of a
step: by processor time alone 5 × 320 on two cores had 9,746 tokens/s, and a run of it 5,030. Other programs are not:
beside one that took all it could, the same model had 875, 7,551 and 24,327 tokens/s by the clock alone."""
_LAUNCH = 5e-6
"""Seconds that a GPU needs at least for each operation: the host launches one after another. Not measured by artel."""


@dataclass(frozen=True, slots=True)
class Point:
    """What one size takes, of all processes together."""

    size: Size
    flops: float
    """FLOPs of a token."""
    per_token: float
    """Seconds of forward and backward for each token more in a step."""
    per_step: float
    """Seconds of a step beside that: the optimizer, and what forward and backward take however few tokens there are."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of a step of any size, by a power law through two sizes; FLOP/s beyond them stay what they are there."""

    small: Point
    large: Point
    vocabulary: int
    block: int
    source: str
    """For people: where it is from."""
    how: str = ""
    """For people: of which models it is."""

    def seconds(self, size: Size, tokens: int) -> float:
        """Seconds of a step of `tokens` tokens."""
        flops = size.flops_per_token(self.vocabulary, self.block)
        place = _place(flops, self.small.flops, self.large.flops)
        rates = (point.flops / point.per_token for point in (self.small, self.large))
        rate = _between(min(1.0, max(0.0, place)), *rates)
        place = _place(size.layer_parameters, self.small.size.layer_parameters, self.large.size.layer_parameters)
        return tokens * flops / rate + _between(place, self.small.per_step, self.large.per_step)


def _place(value: float, first: float, last: float) -> float:
    """Where a value is between two others, along the logarithm: 0 at the first, 1 at the last."""
    return math.log(value / first) / math.log(last / first)


def _between(place: float, first: float, last: float) -> float:
    return first * (last / first) ** place


def measure_speed(
    run: RunConfig, data: PlannedData, processes: int, on_host: int, tell: Callable[[str], None] = lambda _: None
) -> Speed:
    """Measure a few steps of two small models on a CPU, each process with its share of the cores; takes seconds."""
    threads = run.train.threads or max(1, usable_cores() // on_host)
    with _measuring(threads):
        points = []
        for number, size in enumerate(_MEASURED, 1):
            tell(f"measuring small model {number} of {len(_MEASURED)}: {size.layers} layers of {size.width}")
            points.append(_measure(run, data, size, processes))
    first, last = points
    small, large = within_reach(first, last), within_reach(last, first)
    each = f"{processes} processes with " if processes > 1 else ""
    plural = "" if threads == 1 else "s"
    source = f"measured just now for {each}{threads} thread{plural}"
    return Speed(small, large, data.tokenizer.vocabulary, run.data.block, source, "measured on two small models")


def measure_smallest(run: RunConfig, data: PlannedData, processes: int, on_host: int) -> Callable[[int], float]:
    """Measure the smallest model alone, which takes some seconds: tokens of a step -> seconds of the step."""
    with _measuring(run.train.threads or max(1, usable_cores() // on_host)):
        point = _measure(run, data, Size(DEPTHS[0]), processes)
    return lambda tokens: tokens * point.per_token + point.per_step


def within_reach(point: Point, other: Point) -> Point:
    """The point at no less than half of the other's FLOP/s.

    On an idle processor 128 × 2 reaches 0.8 of those of 320 × 5. Where others have the cores, two threads wait for each
    other at every small product, and all of its turns may be slow: it was measured at a fifteenth.
    """
    slowest = 2 * point.flops * other.per_token / other.flops
    return replace(point, per_token=min(point.per_token, slowest))


def _measure(run: RunConfig, data: PlannedData, size: Size, processes: int) -> Point:
    device, objective = torch.device("cpu"), data.objective
    config = ModelConfig.model_validate({"config": size.config()})
    request = objective.model_request(config, run.data.block, run.seed)
    model = build_model(request, data.tokenizer).model
    use_artel_attention(model)
    compute_experts_in_autocast(model)
    precision = pick_precision(run.train.precision, device)
    model.train()
    strategy = DataParallel(model, objective, World(0, 1, 0, device), precision)
    optimizer = Optimizer(model, run.train, run.seed, None, precision)
    tokens: list[int] = []
    in_pass: list[float] = []
    in_step: list[float] = []
    for batch in (data.batch(1), data.batch(_ROWS)):
        passes, steps = zip(*_steps(strategy, optimizer, batch), strict=True)
        tokens.append(batch.tokens)
        in_pass.append(usual(passes))
        in_step.append(usual(steps))
    # Measured times are not exact: a row more costs at least half of what each of the many rows does.
    per_token = max((in_pass[1] - in_pass[0]) / (tokens[1] - tokens[0]), in_pass[1] / tokens[1] / 2)
    fixed = max(0.0, in_pass[1] - per_token * tokens[1])
    flops = size.flops_per_token(data.tokenizer.vocabulary, run.data.block)
    return Point(size, flops, per_token / processes, min(in_step) + fixed)


_Times = tuple[float, float]
"""Seconds by the clock, and of this thread on a processor."""


def usual(times: Sequence[_Times]) -> float:
    """Seconds of the one in the middle: by the clock, but for what is likely to be other programs' time.

    A run takes its slow steps, too. Where the fastest counted, 6 × 384 was chosen for 3,151 tokens/s on two cores of a
    host that others shared, and reached 2,265.
    """
    by_clock, on_processor = (statistics.median(each) for each in zip(*times, strict=True))
    return min(by_clock, _WAITING * on_processor)


def _steps(strategy: DataParallel, optimizer: Optimizer, batch: Batch) -> Iterator[tuple[_Times, _Times]]:
    """What each of a few steps spends in forward and backward, and in the optimizer."""
    end = time.perf_counter() + _SECONDS
    for count in range(_MOST):
        now = time.perf_counter()
        if (count >= _FEWEST and now >= end) or (count and now >= end + _SECONDS):
            return
        started = time.perf_counter(), time.thread_time()
        strategy.run([batch], float(batch.targets), optimizer.loss_factor)
        passed = time.perf_counter(), time.thread_time()
        optimizer.clip_and_step(0.01, strategy.norm())
        ended = time.perf_counter(), time.thread_time()
        yield (passed[0] - started[0], passed[1] - started[1]), (ended[0] - passed[0], ended[1] - passed[1])


@contextmanager
def _measuring(threads: int) -> Iterator[None]:
    """Compute in so many threads. What the models took is given back: training would begin 450 MB fuller."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        gc.collect()
        release_free_memory()


def plan_speed(run: RunConfig, vocabulary: int, hardware: Hardware) -> Speed:
    """What `artel plan` says of two sizes on that hardware, with two batches each.

    Raises InputError where it cannot say how fast they are.
    """
    if not hardware.has_rates:
        what = f"true needs a plan's speed, and {hardware.name} is not in the table of accelerators"
        raise InputError.at("model.auto", what, "write model: {config: {model_type: …}}, or model: {from: FOLDER}")
    if run.parallel.offload != "none":
        what = "the model is chosen by a plan's speed, and transfers of offloaded weights are not planned"
        raise InputError.at("parallel.offload", what, "leave it out, or give the model's sizes")
    small, large = (_planned(run, size, vocabulary, hardware) for size in _PLANNED)
    return Speed(
        small, large, vocabulary, run.data.block, f"by {hardware.source}", "computed from the plans of two models"
    )


def _planned(run: RunConfig, size: Size, vocabulary: int, hardware: Hardware) -> Point:
    model = ModelConfig.model_validate({"config": size.config()})
    times, tokens = [], []
    for rows in (_ROWS, 4 * _ROWS):
        batch = {"batch": rows * hardware.world_size, "micro_batch": rows}
        train = run.train.model_copy(update={**batch, "budget": None, "steps": 1})
        plan = make_plan(run.model_copy(update={"model": model, "train": train}), hardware)
        assert plan.step is not None
        launched = _LAUNCH * max(
            sum(count for operation, count in rank.operations.items() if operation.kind != VIEW) for rank in plan.ranks
        )
        times.append(max(plan.step.seconds.mid, launched if hardware.device == "cuda" else 0.0))
        tokens.append(plan.tokens)
    flops = size.flops_per_token(vocabulary, run.data.block)
    per_token = max((times[1] - times[0]) / (tokens[1] - tokens[0]), times[1] / tokens[1] / 10)
    return Point(size, flops, per_token, max(times[0] - per_token * tokens[0], times[0] / 100))
