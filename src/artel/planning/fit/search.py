"""Search for the fastest layouts that fit some hardware, with few plans: each takes seconds to trace.

Layouts are planned in the order of `estimate.step_seconds`. A layout is skipped if it cannot fit by
`estimate.min_device_bytes`, or if it cannot be faster than the best ones, given the error of earlier estimates. Memory
is linear in the rows of a micro-batch, so one or two plans tell the largest that fits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from artel.config import RunConfig
from artel.errors import InputError
from artel.integers import ceil_div
from artel.messages import logger, silence_messages
from artel.models.activation_checkpointing import Recompute
from artel.planning.fit.estimate import (
    RECOMPUTES,
    ActivationModel,
    ModelSize,
    estimate_activations,
    estimate_buffers,
    min_device_bytes,
    min_host_bytes,
    min_state_bytes,
    step_seconds,
)
from artel.planning.fit.layouts import Layout
from artel.planning.hardware import Hardware
from artel.planning.plan import Plan, PlannedText, make_plan
from artel.planning.plan.live_bytes import ACTIVATIONS, LOSS
from artel.planning.plan.rank_memory import FRAMEWORK_BYTES
from artel.planning.plan.run_plan import TIGHT
from artel.training.micro_batch import sizes_to_try

_MAX_PLANS_PER_LAYOUT = 3
_MAX_ESTIMATED_FRACTION = 1.25  # of the memory: estimates are more accurate than that
_STAGE_LAYERS = 6  # a pipeline is traced with all layers, other layouts with about this many
_STAGE_BATCHES = 4  # micro-batches per stage: a pipeline then waits less than a quarter of the time


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A layout with its plan."""

    config: RunConfig
    plan: Plan
    estimated_seconds: float
    """Seconds of a step, if the plan has none."""

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Sort key: fitting before tight, known speeds before unknown ones, fast before slow."""
        seconds = self.seconds
        return (
            self.plan.memory_fraction > TIGHT,
            seconds is None,
            self.estimated_seconds if seconds is None else seconds,
        )

    @property
    def seconds(self) -> float | None:
        """Planned seconds per step."""
        return self.plan.step.seconds.mid if self.plan.step else None


class Expectation(NamedTuple):
    """Expected size and speed of a layout before it is planned. Better ones sort first."""

    is_too_large: bool
    """True if it is expected not to fit."""
    seconds: float
    """Seconds of a step."""
    is_hopeless: bool
    """True if it need not be planned."""


class Budget:
    """Number of plans that may still be traced. Logs each one."""

    def __init__(self, plans: int) -> None:
        self.remaining = plans

    def spend(self, layout: Layout, mode: Recompute, num_rows: int, hardware: Hardware, cost: int) -> None:
        self.remaining -= cost
        where = "here" if hardware.shares_memory else f"on {layout.processes} × {hardware.name}"
        description = describe_layout(layout)
        logger.info("advice: planning %s, recomputed %s, micro-batches of %s, %s", description, mode, num_rows, where)


def describe_layout(layout: Layout) -> str:
    """Describe a layout: `fsdp, tensor 2`."""
    names = ("tensor", "pipeline", "context", "expert")
    splits = [f"{name} {size}" for name, size in zip(names, layout.splits, strict=True) if size > 1]
    data = f"parallel.data {layout.config.parallel.data}" if layout.processes > 1 or layout.offloads else "one process"
    return ", ".join([data, *splits, *["offload"] * layout.offloads])


class Search:
    """Searches layouts for one kind of hardware. Later searches reuse the activation memory found by its plans."""

    def __init__(
        self,
        text: PlannedText,
        size: ModelSize,
        activations: ActivationModel,
        hardware: Hardware,
        precision: str,
        price: float | None,
    ) -> None:
        self.size = size
        self._text = text
        self._activations = activations
        self._hardware = hardware
        self._precision = precision
        self._price = price

    def fastest(
        self, layouts: Iterable[Layout], budget: Budget, earlier: Iterable[PlannedLayout] = (), limit: int = 3
    ) -> list[PlannedLayout]:
        """Return the `limit` fastest of `earlier` and of `layouts`, each with the largest micro-batch that fits."""
        best = sorted(earlier, key=lambda planned: planned.order)
        identities = {_plan_identity(planned.config, planned.plan) for planned in best}
        pairs = [
            (layout, mode) for layout in layouts for mode in RECOMPUTES if not self._expect(layout, mode).is_hopeless
        ]
        while pairs and budget.remaining > 0:
            expectation, layout, mode = min(
                ((self._expect(*pair), *pair) for pair in pairs), key=lambda entry: entry[0]
            )
            pairs.remove((layout, mode))
            guess = (layout.config.parallel, layout.processes, mode, self._guess_rows(layout, mode))
            if (
                expectation.is_hopeless
                or guess in identities
                or self._is_slower(layout, expectation.seconds, best, limit)
            ):
                continue
            plan = self._plan_largest(layout, mode, budget)
            if plan is None or _plan_identity(layout.config, plan) in identities:
                continue
            identities.add(_plan_identity(layout.config, plan))
            config = layout.with_micro_batch(plan.recompute, plan.micro_batch)
            best = sorted([*best, PlannedLayout(config, plan, expectation.seconds)], key=lambda planned: planned.order)
        return best[:limit]

    def smallest(self, layouts: Iterable[Layout], budget: Budget) -> PlannedLayout | None:
        """Return the layout with the least memory, with full recomputation and the smallest micro-batch.

        None if that does not fit.
        """
        fitting = [
            layout for layout in layouts if self.may_fit(layout, "full") and self._plan_cost(layout) <= budget.remaining
        ]
        quick_to_plan = [layout for layout in fitting if self._plan_cost(layout) == 1] or fitting
        by_expectation = sorted(quick_to_plan, key=lambda layout: self._expect(layout, "full"))
        for layout in dict.fromkeys([*by_expectation[:1], *sorted(quick_to_plan, key=self._memory_order)[:1]]):
            num_rows = self._row_counts(layout)[0]
            plan = self._plan_layout(layout, "full", num_rows, budget)
            if plan is not None and plan.memory_fraction <= TIGHT:
                return PlannedLayout(layout.with_micro_batch("full", num_rows), plan, 0.0)
        return None

    def may_fit(self, layout: Layout, mode: Recompute) -> bool:
        """True unless the smallest micro-batch is known not to fit."""
        needed_bytes = min_device_bytes(
            layout, self.size, self._activations, mode, self._row_counts(layout)[0], self._precision
        )
        hardware = self._hardware
        host_bytes = min_host_bytes(layout, self.size)
        if hardware.shares_memory:
            return needed_bytes * layout.processes_per_host <= hardware.memory_bytes
        return needed_bytes <= hardware.memory_bytes and host_bytes <= (hardware.host_memory_bytes or host_bytes)

    def seconds(self, layout: Layout, mode: Recompute, num_rows: int) -> float:
        """Estimate the seconds per step."""
        return step_seconds(
            layout, self.size, mode, num_rows, self._text[0].row_tokens, self._hardware, self._precision
        )

    def _is_slower(self, layout: Layout, estimated_seconds: float, best: Sequence[PlannedLayout], limit: int) -> bool:
        """True if `layout` cannot be one of the `limit` fastest layouts."""
        for planned in best:  # recomputation gains nothing if all rows fit into one micro-batch
            is_same = (planned.config.parallel, planned.plan.processes) == (layout.config.parallel, layout.processes)
            if (
                is_same
                and planned.plan.memory_fraction <= TIGHT
                and planned.plan.micro_batch >= self._row_counts(layout)[-1]
            ):
                return planned.plan.recompute == "none" or planned.estimated_seconds < estimated_seconds
        fitting = [planned for planned in best if planned.plan.memory_fraction <= TIGHT and planned.seconds is not None]
        if len(fitting) < limit:
            return False
        ratio = min(planned.seconds / planned.estimated_seconds for planned in fitting if planned.seconds is not None)
        return estimated_seconds * ratio > (fitting[limit - 1].seconds or 0.0)

    def _expect(self, layout: Layout, mode: Recompute) -> Expectation:
        """Return the expected size and speed of a layout, from the plans so far."""
        fraction = self._estimate_bytes(layout, mode, self._row_counts(layout)[0]) / self._capacity(layout)
        seconds = self.seconds(layout, mode, self._guess_rows(layout, mode))
        return Expectation(
            fraction > TIGHT, seconds, fraction > _MAX_ESTIMATED_FRACTION or not self.may_fit(layout, mode)
        )

    def _plan_largest(self, layout: Layout, mode: Recompute, budget: Budget) -> Plan | None:
        """Return the plan with the largest micro-batch that fits, else a tight one, else None."""
        sizes = self._row_counts(layout)
        num_rows = self._guess_rows(layout, mode)
        points: dict[int, float] = {}
        best: Plan | None = None
        for _ in range(_MAX_PLANS_PER_LAYOUT):
            plan = self._plan_layout(layout, mode, num_rows, budget)
            if plan is None:
                break
            points[num_rows] = plan.memory_fraction
            if best is None or _preference(plan) > _preference(best):
                best = plan
            fitting = max((size for size, fraction in points.items() if fraction <= TIGHT), default=0)
            failing = min((size for size, fraction in points.items() if fraction > TIGHT), default=sizes[-1] + 1)
            untried = [
                size
                for size in sizes
                if fitting < size < failing and self._estimate_fraction(plan, points, size) <= TIGHT
            ]
            if not untried or budget.remaining <= 0:
                break
            num_rows = untried[-1]
        return best if best is not None and best.memory_fraction <= 1 else None

    def _estimate_fraction(self, plan: Plan, points: dict[int, float], num_rows: int) -> float:
        """Estimate the fraction of memory with micro-batches of `num_rows` rows."""
        if len(points) > 1:
            (rows_0, fraction_0), (rows_1, fraction_1) = min(points.items()), max(points.items())
            return fraction_0 + (num_rows - rows_0) * (fraction_1 - fraction_0) / (rows_1 - rows_0)
        known_rows, fraction = next(iter(points.items()))
        by_kind = plan.fullest.by_kind
        row_bytes = (by_kind.get(ACTIVATIONS, 0) + by_kind.get(LOSS, 0)) / known_rows
        processes = plan.processes // self._hardware.nodes if self._hardware.shares_memory else 1
        return fraction + (num_rows - known_rows) * row_bytes * processes / self._hardware.memory_bytes

    def _guess_rows(self, layout: Layout, mode: Recompute) -> int:
        """Return the largest micro-batch that should fit."""
        sizes = self._row_counts(layout)
        capacity = TIGHT * self._capacity(layout)
        return sizes[
            max(0, bisect_right(sizes, capacity, key=lambda size: self._estimate_bytes(layout, mode, size)) - 1)
        ]

    def _estimate_bytes(self, layout: Layout, mode: Recompute, num_rows: int) -> float:
        """Estimate the bytes of a process on its device."""
        activations = self._activations.estimate(layout, mode, num_rows)
        if activations is None:
            activations = num_rows * estimate_activations(layout, self.size, mode, self._text[0].row_tokens)
        buffers = estimate_buffers(layout, self.size, self._precision)
        return min_state_bytes(layout, self.size, self._precision) + buffers + activations + FRAMEWORK_BYTES

    def _capacity(self, layout: Layout) -> float:
        """Return the bytes available to each process."""
        return self._hardware.memory_bytes / (layout.processes_per_host if self._hardware.shares_memory else 1)

    def _memory_order(self, layout: Layout) -> tuple[float, float]:
        """Sort key: less memory first, then faster."""
        num_rows = self._row_counts(layout)[0]
        return self._estimate_bytes(layout, "full", num_rows), self.seconds(layout, "full", num_rows)

    def _row_counts(self, layout: Layout) -> list[int]:
        """Return the micro-batches worth trying, smallest first."""
        max_rows = ceil_div(layout.config.train.batch, layout.dims.dp_degree)
        sizes = sizes_to_try(max_rows, self._text[0].row_tokens, torch.device(self._hardware.device))
        stages = layout.config.parallel.pipeline
        return [size for size in sizes if stages == 1 or size * _STAGE_BATCHES * stages <= max_rows] or sizes[:1]

    def _plan_cost(self, layout: Layout) -> int:
        """Return the cost of a plan in the budget."""
        stages = layout.config.parallel.pipeline
        return 1 if stages == 1 else max(1, self.size.layers // _STAGE_LAYERS)

    def _plan_layout(self, layout: Layout, mode: Recompute, num_rows: int, budget: Budget) -> Plan | None:
        """Plan a layout. None if it is invalid, or costs more than the remaining budget."""
        if self._plan_cost(layout) > budget.remaining:
            return None
        budget.spend(layout, mode, num_rows, self._hardware, self._plan_cost(layout))
        try:
            with silence_messages():
                run = layout.with_micro_batch(mode, num_rows)
                plan = make_plan(run, self._hardware, layout.processes_per_host, self._price, self._text)
        except InputError:
            return None
        self._activations.add(layout, plan)
        return plan


def _preference(plan: Plan) -> tuple[bool, float]:
    """Sort key, the best last: plans that do not fit by falling memory, then those that fit by micro-batch."""
    fits = plan.memory_fraction <= TIGHT
    return fits, plan.micro_batch if fits else -plan.memory_fraction


def _plan_identity(config: RunConfig, plan: Plan) -> tuple[object, ...]:
    return (config.parallel, plan.processes, plan.recompute, plan.micro_batch)
