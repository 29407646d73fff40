"""The fastest layouts that fit some hardware, found with few plans: each takes seconds to trace.

Layouts are planned in the order of `estimate.step_seconds`. What cannot fit by `estimate.smallest_need` is not planned,
nor what is slower than what was found, by as much as plans have been from their estimates. Memory is a straight line in
the rows of a micro-batch: one or two plans tell which is the largest that fits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from artel.config import RunConfig
from artel.errors import InputError
from artel.models.activation_checkpointing import Recompute
from artel.planning.fit.estimate import (
    RECOMPUTES,
    Known,
    Size,
    device_floor,
    guessed_activations,
    guessed_buffers,
    host_floor,
    smallest_need,
    step_seconds,
)
from artel.planning.fit.layouts import Layout
from artel.planning.hardware import Hardware
from artel.planning.plan import Plan, PlannedText, make_plan
from artel.planning.plan.live_bytes import ACTIVATIONS, LOSS
from artel.planning.plan.plan import TIGHT
from artel.planning.plan.untraced import FRAMEWORK
from artel.training.micro_batch import sizes_to_try

_PLANS_A_LAYOUT = 3
_HOPELESS = 1.25  # of the memory: guesses of what a layout takes are not as far off
_STAGE_LAYERS = 6  # a pipeline is traced with all its layers, everything else with about so many
_STAGE_BATCHES = 4  # micro-batches for each stage: a pipeline then waits for less than a quarter of its time


@dataclass(frozen=True, slots=True)
class Found:
    """A layout with its plan."""

    run: RunConfig
    plan: Plan
    estimated: float
    """Seconds of a step, for what has no planned time."""

    @property
    def order(self) -> tuple[bool, bool, float]:
        """What fits before what is tight, known speeds before unknown ones, fast before slow."""
        seconds = self.seconds
        return (self.plan.share > TIGHT, seconds is None, self.estimated if seconds is None else seconds)

    @property
    def seconds(self) -> float | None:
        """Of a step, planned."""
        return self.plan.step.seconds.mid if self.plan.step else None


class Promise(NamedTuple):
    """What is expected of a layout before it is planned; the better ones come first."""

    is_too_large: bool
    """Whether it is expected not to fit."""
    seconds: float
    """Of a step."""
    is_hopeless: bool
    """Whether it need not be planned."""


class Budget:
    """How many plans may still be traced, and what tells people of each."""

    def __init__(self, plans: int, tell: Callable[[str], None]) -> None:
        self.left = plans
        self._tell = tell

    def spend(self, layout: Layout, how: Recompute, rows: int, hardware: Hardware, cost: int) -> None:
        self.left -= cost
        place = "here" if hardware.shares_memory else f"on {layout.processes} × {hardware.name}"
        self._tell(f"advice: planning {in_words(layout)}, recomputed {how}, micro-batches of {rows}, {place}")


def in_words(layout: Layout) -> str:
    """`fsdp, tensor 2`."""
    names = ("tensor", "pipeline", "context", "expert")
    splits = [f"{name} {size}" for name, size in zip(names, layout.splits, strict=True) if size > 1]
    data = f"parallel.data {layout.run.parallel.data}" if layout.processes > 1 or layout.offloads else "one process"
    return ", ".join([data, *splits, *["offload"] * layout.offloads])


class Search:
    """Looks for what fits one kind of hardware; what its plans show of activations serves all later ones."""

    def __init__(
        self, text: PlannedText, size: Size, known: Known, hardware: Hardware, precision: str, price: float | None
    ) -> None:
        self._text, self.size, self._known = text, size, known
        self._hardware, self._precision, self._price = hardware, precision, price

    def fastest(
        self, layouts: Iterable[Layout], budget: Budget, found: Iterable[Found] = (), most: int = 3
    ) -> list[Found]:
        """The `most` fastest of what is `found` already and of `layouts`, with the largest micro-batch that fits."""
        best = sorted(found, key=lambda each: each.order)
        planned = {_identity(each.run, each.plan) for each in best}
        pairs = [
            (layout, how) for layout in layouts for how in RECOMPUTES if not self._promise(layout, how).is_hopeless
        ]
        while pairs and budget.left > 0:
            promise, layout, how = min(((self._promise(*pair), *pair) for pair in pairs), key=lambda each: each[0])
            pairs.remove((layout, how))
            guess = (layout.run.parallel, layout.processes, how, self._guess(layout, how))
            if promise.is_hopeless or guess in planned or self._is_slower(layout, promise.seconds, best, most):
                continue
            plan = self._largest(layout, how, budget)
            if plan is None or _identity(layout.run, plan) in planned:
                continue
            planned.add(_identity(layout.run, plan))
            each = Found(layout.at(plan.recompute, plan.micro_batch), plan, promise.seconds)
            best = sorted([*best, each], key=lambda each: each.order)
        return best[:most]

    def smallest(self, layouts: Iterable[Layout], budget: Budget) -> Found | None:
        """The smallest of `layouts`: all is recomputed, in the smallest micro-batch. None: not even that fits."""
        may = [layout for layout in layouts if self.may_fit(layout, "full") and self._cost(layout) <= budget.left]
        quick = [layout for layout in may if self._cost(layout) == 1] or may
        promises = sorted(quick, key=lambda layout: self._promise(layout, "full"))
        for layout in dict.fromkeys([*promises[:1], *sorted(quick, key=self._least)[:1]]):
            rows = self._rows(layout)[0]
            plan = self._plan(layout, "full", rows, budget)
            if plan is not None and plan.share <= TIGHT:
                return Found(layout.at("full", rows), plan, 0.0)
        return None

    def may_fit(self, layout: Layout, how: Recompute) -> bool:
        """Whether nothing that is known says that the smallest micro-batch does not fit."""
        need = smallest_need(layout, self.size, self._known, how, self._rows(layout)[0], self._precision)
        hardware, host = self._hardware, host_floor(layout, self.size)
        if hardware.shares_memory:
            return need * layout.on_host <= hardware.memory_bytes
        return need <= hardware.memory_bytes and host <= (hardware.host_memory_bytes or host)

    def seconds(self, layout: Layout, how: Recompute, rows: int) -> float:
        """Of a step, about."""
        return step_seconds(layout, self.size, how, rows, self._text[0].row_tokens, self._hardware, self._precision)

    def _is_slower(self, layout: Layout, estimated: float, best: Sequence[Found], most: int) -> bool:
        """Whether a plan of `layout` could only show that it is none of the `most` fastest."""
        for each in best:  # with all in one micro-batch, recomputing gains nothing
            is_same = (each.run.parallel, each.plan.processes) == (layout.run.parallel, layout.processes)
            if is_same and each.plan.share <= TIGHT and each.plan.micro_batch >= self._rows(layout)[-1]:
                return each.plan.recompute == "none" or each.estimated < estimated
        fitting = [each for each in best if each.plan.share <= TIGHT and each.seconds is not None]
        if len(fitting) < most:
            return False
        nearest = min(each.seconds / each.estimated for each in fitting if each.seconds is not None)
        return estimated * nearest > (fitting[most - 1].seconds or 0.0)

    def _promise(self, layout: Layout, how: Recompute) -> Promise:
        """What is to be expected, by all that is known so far."""
        least = self._need(layout, how, self._rows(layout)[0]) / self._room(layout)
        seconds = self.seconds(layout, how, self._guess(layout, how))
        return Promise(least > TIGHT, seconds, least > _HOPELESS or not self.may_fit(layout, how))

    def _largest(self, layout: Layout, how: Recompute, budget: Budget) -> Plan | None:
        """The plan with the largest micro-batch that fits; one that is tight where none fits; None: none is neither."""
        sizes = self._rows(layout)
        rows = self._guess(layout, how)
        points: dict[int, float] = {}
        best: Plan | None = None
        for _ in range(_PLANS_A_LAYOUT):
            plan = self._plan(layout, how, rows, budget)
            if plan is None:
                break
            points[rows] = plan.share
            if best is None or _worth(plan) > _worth(best):
                best = plan
            fitting = max((size for size, share in points.items() if share <= TIGHT), default=0)
            failing = min((size for size, share in points.items() if share > TIGHT), default=sizes[-1] + 1)
            between = [size for size in sizes if fitting < size < failing and self._share(plan, points, size) <= TIGHT]
            if not between or budget.left <= 0:
                break
            rows = between[-1]
        return best if best is not None and best.share <= 1 else None

    def _share(self, plan: Plan, points: dict[int, float], rows: int) -> float:
        """The part of memory that micro-batches of `rows` rows will take."""
        if len(points) > 1:
            (fewer, less), (more, most) = min(points.items()), max(points.items())
            return less + (rows - fewer) * (most - less) / (more - fewer)
        (known, share) = next(iter(points.items()))
        kinds = plan.fullest.kinds
        a_row = (kinds.get(ACTIVATIONS, 0) + kinds.get(LOSS, 0)) / known
        processes = plan.processes // self._hardware.nodes if self._hardware.shares_memory else 1
        return share + (rows - known) * a_row * processes / self._hardware.memory_bytes

    def _guess(self, layout: Layout, how: Recompute) -> int:
        """The largest micro-batch that should fit."""
        sizes = self._rows(layout)
        room = TIGHT * self._room(layout)
        return sizes[max(0, bisect_right(sizes, room, key=lambda rows: self._need(layout, how, rows)) - 1)]

    def _need(self, layout: Layout, how: Recompute, rows: int) -> float:
        """Bytes on a process's device, about."""
        activations = self._known.about(layout, how, rows)
        if activations is None:
            activations = rows * guessed_activations(layout, self.size, how, self._text[0].row_tokens)
        buffers = guessed_buffers(layout, self.size, self._precision)
        return device_floor(layout, self.size, self._precision) + buffers + activations + FRAMEWORK

    def _room(self, layout: Layout) -> float:
        """Bytes that each process may take."""
        return self._hardware.memory_bytes / (layout.on_host if self._hardware.shares_memory else 1)

    def _least(self, layout: Layout) -> tuple[float, float]:
        """What is smaller the less memory a layout takes; of equal ones the faster."""
        rows = self._rows(layout)[0]
        return self._need(layout, "full", rows), self.seconds(layout, "full", rows)

    def _rows(self, layout: Layout) -> list[int]:
        """Micro-batches worth trying, smallest first."""
        most = -(-layout.run.train.batch // layout.dims.dp_degree)
        sizes = sizes_to_try(most, self._text[0].row_tokens, torch.device(self._hardware.device))
        stages = layout.run.parallel.pipeline
        return [size for size in sizes if stages == 1 or size * _STAGE_BATCHES * stages <= most] or sizes[:1]

    def _cost(self, layout: Layout) -> int:
        """What a plan takes of the budget."""
        stages = layout.run.parallel.pipeline
        return 1 if stages == 1 else max(1, self.size.layers // _STAGE_LAYERS)

    def _plan(self, layout: Layout, how: Recompute, rows: int, budget: Budget) -> Plan | None:
        """None where the plan itself finds that the layout does not go, or costs more than is left."""
        if self._cost(layout) > budget.left:
            return None
        budget.spend(layout, how, rows, self._hardware, self._cost(layout))
        try:
            plan = make_plan(layout.at(how, rows), self._hardware, layout.on_host, self._price, self._text)
        except InputError:
            return None
        self._known.add(layout, plan)
        return plan


def _worth(plan: Plan) -> tuple[bool, float]:
    """What is more the better a plan is: of those that fit the largest micro-batch, else the least memory."""
    fits = plan.share <= TIGHT
    return fits, plan.micro_batch if fits else -plan.share


def _identity(run: RunConfig, plan: Plan) -> tuple[object, ...]:
    return (run.parallel, plan.processes, plan.recompute, plan.micro_batch)
