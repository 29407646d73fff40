"""The advice of `artel plan --fit`: the fastest ways to run a run file on some hardware, or larger hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from artel.config import Overrides, RunConfig, run_from
from artel.errors import InputError
from artel.host import usable_cores
from artel.parallel.mesh import read_parallel_dims
from artel.planning.fit.estimate import Known, Size
from artel.planning.fit.larger import more_of, others
from artel.planning.fit.layouts import Layout, layouts
from artel.planning.fit.search import Budget, Found, Search
from artel.planning.hardware import Hardware
from artel.planning.plan import Plan, PlannedText
from artel.planning.plan.models import ModelOutline
from artel.planning.plan.plan import planned_precision
from artel.training.optim.optimizer import check_optimizer

_MOST = 3
# Plans that are traced at most, for each part of the advice.
_PLANS, _OFFLOAD_PLANS, _PLANS_OF_A_CHANGE, _HARDWARE_PLANS = 9, 3, 2, 5
_KEYS = (
    "model.lora", "train.weights", "train.precision", "parallel.data", "parallel.shard", "parallel.tensor",
    "parallel.pipeline", "parallel.context", "parallel.expert", "parallel.offload", "train.activation_checkpointing",
    "train.micro_batch",
)  # fmt: skip
_LORA_RANK = 16
_WORTH = 0.95  # of the time of a step: what is gained must be worth a different training


@dataclass(frozen=True, slots=True)
class Advised:
    """A way to run it, with its plan."""

    overrides: Mapping[str, Any]
    """Dotted keys of the run file, with what to write instead; empty: as it is."""
    plan: Plan
    offloads: bool
    """Whether weights and the optimizer's state lie in host memory."""

    @property
    def hardware(self) -> Hardware:
        return self.plan.hardware

    @property
    def words(self) -> list[str]:
        """As on a command line."""
        return Overrides(self.overrides).words


@dataclass(frozen=True, slots=True)
class Advice:
    """What fits, the fastest first."""

    same: tuple[Advised, ...]
    """The same is learned, with the same numbers."""
    different: tuple[Advised, ...]
    """Another training: faster than all of `same`, or fits where nothing else does."""
    larger: tuple[Advised, ...]
    """Where nothing fits: the smallest hardware that would do, by what is planned."""


def advise(
    run: RunConfig,
    own: Plan,
    text: PlannedText,
    nproc: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Advice:
    """Search around `own`, the plan of the run as it is, with its `planned_text`; `nproc` holds those of a host.

    `tell` hears of each plan that is traced. Raises InputError for what cannot be planned.
    """
    return _Adviser(run, own, text, nproc, tell).advice()


class _Adviser:
    """One run on one kind of hardware."""

    def __init__(
        self, run: RunConfig, own: Plan, text: PlannedText, nproc: int | None, tell: Callable[[str], None]
    ) -> None:
        self._run, self._own, self._hardware, self._tell = run, own, own.hardware, tell
        self._text = text
        self._known = Known()
        self._models: dict[tuple[Any, ...], PreTrainedModel] = {}
        self._on_host = own.processes // own.hardware.nodes
        self._counts = [self._on_host]
        """Processes on each host."""
        if self._hardware.shares_memory and nproc is None:
            most = self._on_host if self._on_host > 1 else usable_cores()
            self._counts = sorted({self._on_host, *(2**power for power in range(most.bit_length()))})

    def advice(self) -> Advice:
        same = self._same()
        different = list(self._different(same))
        larger: list[Found] = []
        if not any(self._is_sure(each) for each in [*same, *(found for _, found in different)]):
            larger = list(self._larger())
        return Advice(
            tuple(self._advised(each) for each in same),
            tuple(self._advised(each) for _, each in different),
            tuple(self._advised(each) for each in larger),
        )

    def _same(self) -> list[Found]:
        """The fastest layouts of the run as it is."""
        dims = read_parallel_dims(self._run.parallel, self._own.processes, self._on_host)
        own = Layout(self._run, dims, self._on_host)
        self._known.add(own, self._own)
        search, candidates = self._search(self._run, self._hardware), self._layouts(self._run)
        estimated = search.seconds(own, self._own.recompute, self._own.micro_batch)
        found = [Found(self._run, self._own, estimated)] if self._own.share <= 1 else []
        best = search.fastest(candidates, Budget(_PLANS, self._tell), found, _MOST)
        if len(best) == _MOST or self._hardware.shares_memory:
            return best
        return search.fastest(
            self._layouts(self._run, offload="pinned"), Budget(_OFFLOAD_PLANS, self._tell), best, _MOST
        )

    def _different(self, same: list[Found]) -> Iterator[tuple[RunConfig, Found]]:
        """The fastest layout of each change of what is learned, where that gains anything."""
        fastest = min((each.seconds for each in same if each.seconds is not None), default=None)
        for changes in self._changes():
            run = _with(self._run, changes)
            if run is None:
                continue
            search = self._search(run, self._hardware)
            for found in search.fastest(self._layouts(run), Budget(_PLANS_OF_A_CHANGE, self._tell), most=1):
                is_faster = fastest is not None and found.seconds is not None and found.seconds < _WORTH * fastest
                if is_faster or not same:
                    yield run, found

    def _changes(self) -> Iterator[dict[str, Any]]:
        """What may be changed at the price of a different training. Quantized weights are not planned yet."""
        peaks = self._hardware.peak_flops
        if self._own.precision == "fp32" and ("bf16" in peaks or "fp16" in peaks):
            yield {"train.precision": "bf16" if "bf16" in peaks else "fp16"}
        if self._own.precision == "bf16" and self._run.train.weights == "fp32":
            yield {"train.weights": "bf16"}
        if self._run.model.from_ is not None and self._run.model.lora is None and not self._run.model.freeze:
            yield {"model.lora.rank": _LORA_RANK}

    def _larger(self) -> Iterator[Found]:
        """The smallest number of the same accelerators that would do, and of others if they are fewer."""
        most: int | None = None
        for kinds in (more_of(self._hardware), others(self._hardware)):
            budget = Budget(_HARDWARE_PLANS, self._tell)
            for hardware in kinds:
                if budget.left <= 0 or (most is not None and hardware.world_size >= most):
                    break
                found = self._smallest(hardware, budget)
                if found is not None:
                    yield found
                    most = hardware.world_size
                    break

    def _smallest(self, hardware: Hardware, budget: Budget) -> Found | None:
        """What fits that hardware with the least memory; None: nothing does, or may."""
        model, search = self._model(self._run), self._search(self._run, hardware)
        held = search.size.held
        candidates: list[Layout] = []
        if held // hardware.world_size <= hardware.memory_bytes:
            candidates += layouts(self._run, model, hardware.world_size, hardware.count)
        if hardware.host_memory_bytes is not None and held // hardware.nodes <= hardware.host_memory_bytes:
            candidates += layouts(self._run, model, hardware.world_size, hardware.count, offload="pinned")
        return search.smallest(candidates, budget)

    def _search(self, run: RunConfig, hardware: Hardware) -> Search:
        size = Size.of(run, self._model(run), self._own.parameters["active"])
        # A price is that of the accelerators that were asked about.
        price = self._own.price if hardware.name == self._hardware.name else None
        return Search(self._text, size, self._known, hardware, planned_precision(run, hardware), price)

    def _layouts(self, run: RunConfig, offload: str = "none") -> list[Layout]:
        model, nodes = self._model(run), self._hardware.nodes
        return [
            layout for count in self._counts for layout in layouts(run, model, count * nodes, count, offload=offload)
        ]

    def _model(self, run: RunConfig) -> PreTrainedModel:
        """The model of a run, on the meta device; layouts do not change it."""
        precision = planned_precision(run, self._hardware)
        key = (str(run.model.lora), run.train.weights, precision)
        if key not in self._models:
            outline = ModelOutline.of(run, self._text[0].objective, self._text[0].tokenizer)
            self._models[key] = outline.build(precision)
        return self._models[key]

    def _is_sure(self, found: Found) -> bool:
        """Whether it fits without host memory of unknown size."""
        return found.run.parallel.offload == "none" or self._hardware.host_memory_bytes is not None

    def _advised(self, found: Found) -> Advised:
        return Advised(_differences(self._run, found.run), found.plan, found.run.parallel.offload != "none")


def _with(run: RunConfig, changes: Mapping[str, Any]) -> RunConfig | None:
    """The run with other values; None where they do not go with it."""
    try:
        other = run_from(run.model_dump(mode="json", by_alias=True), changes, {})
        check_optimizer(other.train)
    except InputError:
        return None
    return other


def _differences(before: RunConfig, after: RunConfig) -> dict[str, Any]:
    """Dotted keys that were changed, with their values."""
    changes: dict[str, Any] = {}
    for dotted in _KEYS:
        section, key = dotted.split(".")
        old, new = (getattr(getattr(run, section), key) for run in (before, after))
        if old != new:
            changes |= {"model.lora.rank": new.rank} if key == "lora" else {dotted: new}
    return changes
