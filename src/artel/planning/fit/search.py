"""Search for the fastest layouts that fit some hardware, with few plans: each takes seconds to trace.

Layouts are planned in the order of `estimate.step_seconds`. A layout is skipped if it cannot fit by
`estimate.min_device_bytes`, or if it is slower than the best ones, given how far plans were from their estimates.
Memory is linear in the rows of a micro-batch: one or two plans tell which is the largest that fits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from artel.config import RunConfig
from artel.errors import InputError
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
_MAX_ESTIMATED_SHARE = 1.25  # of the memory: estimates are more accurate than that
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
        return (self.plan.share > TIGHT, seconds is None, self.estimated_seconds if seconds is None else seconds)

    @property
    def seconds(self) -> float | None:
        """Planned seconds of a step."""
        return self.plan.step.seconds.mid if self.plan.step else None


class Expectation(NamedTuple):
    """Expectation of a layout before it is planned. Better ones sort first."""

    is_too_large: bool
    """True if it is expected not to fit."""
    seconds: float
    """Seconds of a step."""
    is_hopeless: bool
    """True if it need not be planned."""


class Budget:
    """Number of plans that may still be traced. Announces each one."""

    def __init__(self, plans: int) -> None:
        self.remaining = plans

    def spend(self, layout: Layout, mode: Recompute, rows: int, hardware: Hardware, cost: int) -> None:
        self.remaining -= cost
        target = "here" if hardware.shares_memory else f"on {layout.processes} × {hardware.name}"
        logger.info(
            "advice: planning %s, recomputed %s, micro-batches of %s, %s", describe_layout(layout), mode, rows, target
        )


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
        known: ActivationModel,
        hardware: Hardware,
        precision: str,
        price: float | None,
    ) -> None:
        self._text, self.size, self._activations = text, size, known
        self._hardware, self._precision, self._price = hardware, precision, price

    def fastest(
        self, layouts: Iterable[Layout], budget: Budget, found: Iterable[PlannedLayout] = (), limit: int = 3
    ) -> list[PlannedLayout]:
        """Return the `limit` fastest of `found` and of `layouts`, each with the largest micro-batch that fits."""
        best = sorted(found, key=lambda each: each.order)
        planned = {_identity(each.config, each.plan) for each in best}
        pairs = [
            (layout, mode) for layout in layouts for mode in RECOMPUTES if not self._expect(layout, mode).is_hopeless
        ]
        while pairs and budget.remaining > 0:
            promise, layout, mode = min(((self._expect(*pair), *pair) for pair in pairs), key=lambda each: each[0])
            pairs.remove((layout, mode))
            guess = (layout.config.parallel, layout.processes, mode, self._guess(layout, mode))
            if promise.is_hopeless or guess in planned or self._is_slower(layout, promise.seconds, best, limit):
                continue
            plan = self._plan_largest(layout, mode, budget)
            if plan is None or _identity(layout.config, plan) in planned:
                continue
            planned.add(_identity(layout.config, plan))
            each = PlannedLayout(layout.with_micro_batch(plan.recompute, plan.micro_batch), plan, promise.seconds)
            best = sorted([*best, each], key=lambda each: each.order)
        return best[:limit]

    def smallest(self, layouts: Iterable[Layout], budget: Budget) -> PlannedLayout | None:
        """Return the layout with the least memory, with full recomputation and the smallest micro-batch.

        None if not even that fits.
        """
        fitting = [
            layout for layout in layouts if self.may_fit(layout, "full") and self._cost(layout) <= budget.remaining
        ]
        quick_to_plan = [layout for layout in fitting if self._cost(layout) == 1] or fitting
        promises = sorted(quick_to_plan, key=lambda layout: self._expect(layout, "full"))
        for layout in dict.fromkeys([*promises[:1], *sorted(quick_to_plan, key=self._memory_order)[:1]]):
            rows = self._rows(layout)[0]
            plan = self._plan(layout, "full", rows, budget)
            if plan is not None and plan.share <= TIGHT:
                return PlannedLayout(layout.with_micro_batch("full", rows), plan, 0.0)
        return None

    def may_fit(self, layout: Layout, mode: Recompute) -> bool:
        """True unless the smallest micro-batch is known not to fit."""
        need = min_device_bytes(layout, self.size, self._activations, mode, self._rows(layout)[0], self._precision)
        hardware, host = self._hardware, min_host_bytes(layout, self.size)
        if hardware.shares_memory:
            return need * layout.on_host <= hardware.memory_bytes
        return need <= hardware.memory_bytes and host <= (hardware.host_memory_bytes or host)

    def seconds(self, layout: Layout, mode: Recompute, rows: int) -> float:
        """Estimate the seconds of a step."""
        return step_seconds(layout, self.size, mode, rows, self._text[0].row_tokens, self._hardware, self._precision)

    def _is_slower(self, layout: Layout, estimated_seconds: float, best: Sequence[PlannedLayout], limit: int) -> bool:
        """True if `layout` cannot be one of the `limit` fastest."""
        for each in best:  # recomputation gains nothing if all rows fit into one micro-batch
            is_same = (each.config.parallel, each.plan.processes) == (layout.config.parallel, layout.processes)
            if is_same and each.plan.share <= TIGHT and each.plan.micro_batch >= self._rows(layout)[-1]:
                return each.plan.recompute == "none" or each.estimated_seconds < estimated_seconds
        fitting = [each for each in best if each.plan.share <= TIGHT and each.seconds is not None]
        if len(fitting) < limit:
            return False
        nearest = min(each.seconds / each.estimated_seconds for each in fitting if each.seconds is not None)
        return estimated_seconds * nearest > (fitting[limit - 1].seconds or 0.0)

    def _expect(self, layout: Layout, mode: Recompute) -> Expectation:
        """Return the expectation of a layout from what is known so far."""
        share = self._need(layout, mode, self._rows(layout)[0]) / self._capacity(layout)
        seconds = self.seconds(layout, mode, self._guess(layout, mode))
        return Expectation(share > TIGHT, seconds, share > _MAX_ESTIMATED_SHARE or not self.may_fit(layout, mode))

    def _plan_largest(self, layout: Layout, mode: Recompute, budget: Budget) -> Plan | None:
        """Return the plan with the largest micro-batch that fits, else a tight one, else None."""
        sizes = self._rows(layout)
        rows = self._guess(layout, mode)
        points: dict[int, float] = {}
        best: Plan | None = None
        for _ in range(_MAX_PLANS_PER_LAYOUT):
            plan = self._plan(layout, mode, rows, budget)
            if plan is None:
                break
            points[rows] = plan.share
            if best is None or _preference(plan) > _preference(best):
                best = plan
            fitting = max((size for size, share in points.items() if share <= TIGHT), default=0)
            failing = min((size for size, share in points.items() if share > TIGHT), default=sizes[-1] + 1)
            between = [size for size in sizes if fitting < size < failing and self._share(plan, points, size) <= TIGHT]
            if not between or budget.remaining <= 0:
                break
            rows = between[-1]
        return best if best is not None and best.share <= 1 else None

    def _share(self, plan: Plan, points: dict[int, float], rows: int) -> float:
        """Estimate the fraction of memory with micro-batches of `rows` rows."""
        if len(points) > 1:
            (rows_0, share_0), (rows_1, share_1) = min(points.items()), max(points.items())
            return share_0 + (rows - rows_0) * (share_1 - share_0) / (rows_1 - rows_0)
        (known_rows, share) = next(iter(points.items()))
        kinds = plan.fullest.kinds
        row_bytes = (kinds.get(ACTIVATIONS, 0) + kinds.get(LOSS, 0)) / known_rows
        processes = plan.processes // self._hardware.nodes if self._hardware.shares_memory else 1
        return share + (rows - known_rows) * row_bytes * processes / self._hardware.memory_bytes

    def _guess(self, layout: Layout, mode: Recompute) -> int:
        """Return the largest micro-batch that should fit."""
        sizes = self._rows(layout)
        capacity = TIGHT * self._capacity(layout)
        return sizes[max(0, bisect_right(sizes, capacity, key=lambda rows: self._need(layout, mode, rows)) - 1)]

    def _need(self, layout: Layout, mode: Recompute, rows: int) -> float:
        """Estimate the bytes of a process on its device."""
        activations = self._activations.estimate(layout, mode, rows)
        if activations is None:
            activations = rows * estimate_activations(layout, self.size, mode, self._text[0].row_tokens)
        buffers = estimate_buffers(layout, self.size, self._precision)
        return min_state_bytes(layout, self.size, self._precision) + buffers + activations + FRAMEWORK_BYTES

    def _capacity(self, layout: Layout) -> float:
        """Return the bytes available to each process."""
        return self._hardware.memory_bytes / (layout.on_host if self._hardware.shares_memory else 1)

    def _memory_order(self, layout: Layout) -> tuple[float, float]:
        """Sort key: less memory first, then faster."""
        rows = self._rows(layout)[0]
        return self._need(layout, "full", rows), self.seconds(layout, "full", rows)

    def _rows(self, layout: Layout) -> list[int]:
        """Return the micro-batches worth trying, smallest first."""
        max_rows = -(-layout.config.train.batch // layout.dims.dp_degree)
        sizes = sizes_to_try(max_rows, self._text[0].row_tokens, torch.device(self._hardware.device))
        stages = layout.config.parallel.pipeline
        return [size for size in sizes if stages == 1 or size * _STAGE_BATCHES * stages <= max_rows] or sizes[:1]

    def _cost(self, layout: Layout) -> int:
        """Return the cost of a plan in the budget."""
        stages = layout.config.parallel.pipeline
        return 1 if stages == 1 else max(1, self.size.layers // _STAGE_LAYERS)

    def _plan(self, layout: Layout, mode: Recompute, rows: int, budget: Budget) -> Plan | None:
        """Plan a layout. None if it is invalid, or costs more than is left of the budget."""
        if self._cost(layout) > budget.remaining:
            return None
        budget.spend(layout, mode, rows, self._hardware, self._cost(layout))
        try:
            with silence_messages():
                plan = make_plan(
                    layout.with_micro_batch(mode, rows), self._hardware, layout.on_host, self._price, self._text
                )
        except InputError:
            return None
        self._activations.add(layout, plan)
        return plan


def _preference(plan: Plan) -> tuple[bool, float]:
    """Return a value that grows with a plan's worth: the micro-batch if it fits, else less memory."""
    fits = plan.share <= TIGHT
    return fits, plan.micro_batch if fits else -plan.share


def _identity(config: RunConfig, plan: Plan) -> tuple[object, ...]:
    return (config.parallel, plan.processes, plan.recompute, plan.micro_batch)
