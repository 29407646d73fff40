"""Advice of `artel plan --fit`: the fastest configurations of a run on some hardware, or larger hardware."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any

from transformers import PreTrainedModel

from artel.config import Overrides, RunConfig, parse_run
from artel.errors import InputError
from artel.host import usable_cores
from artel.parallel.mesh import read_parallel_dims
from artel.planning.fit.estimate import ActivationModel, ModelSize
from artel.planning.fit.layouts import Layout, iterate_layouts
from artel.planning.fit.search import Budget, PlannedLayout, Search
from artel.planning.hardware import ACCELERATORS, Hardware, find_hardware
from artel.planning.machine import format_gib
from artel.planning.plan import Plan, PlannedText
from artel.planning.plan.deepspeed import ZeroSettings
from artel.planning.plan.models import ModelOutline
from artel.planning.plan.run_plan import plan_precision
from artel.training.optim.optimizer import check_optimizer

SAME, DIFFERENT, LARGER = "same_training", "different_training", "larger_hardware"
_MAX_SUGGESTIONS = 3
# Maximum number of traced plans, for each part of the advice
_PLANS, _OFFLOAD_PLANS, _PLANS_OF_A_CHANGE, _HARDWARE_PLANS = 9, 3, 2, 5
_KEYS = (
    "model.lora", "train.weights", "train.precision", "parallel.data", "parallel.shard", "parallel.tensor",
    "parallel.pipeline", "parallel.context", "parallel.expert", "parallel.offload", "parallel.deepspeed",
    "train.activation_checkpointing", "train.micro_batch",
)  # fmt: skip
_LORA_RANK = 16
_MAX_TIME_RATIO = 0.95  # of the step time: a different training must be this much faster
_ACCELERATOR_COUNTS = (1, 2, 4, 8)
_MAX_ACCELERATORS = 1024


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A suggested configuration, with its plan."""

    overrides: Mapping[str, Any]
    """Dotted keys of the run file with their new values; empty if nothing changes."""
    plan: Plan
    offloads: bool
    """True if host memory holds weights and optimizer state."""

    @property
    def hardware(self) -> Hardware:
        return self.plan.hardware

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments that set the overrides."""
        return Overrides(self.overrides).words


@dataclass(frozen=True, slots=True)
class Advice:
    """Suggested configurations, the fastest first."""

    same: tuple[Suggestion, ...]
    """The same training, with the same results."""
    different: tuple[Suggestion, ...]
    """A different training. It is faster than all of `same`, or fits if `same` is empty."""
    larger: tuple[Suggestion, ...]
    """The smallest sufficient hardware, if nothing fits on the hardware of the command."""


def advise(config: RunConfig, base_plan: Plan, text: PlannedText, nproc: int | None = None) -> Advice:
    """Search around `base_plan`, the plan of the unchanged run, with its `plan_text`.

    `nproc` fixes the processes per host. Logs a line for each traced plan. Raise InputError if the run cannot be
    planned.
    """
    return _Adviser(config, base_plan, text, nproc).advice()


class _Adviser:
    """One run on one kind of hardware."""

    def __init__(self, config: RunConfig, base_plan: Plan, text: PlannedText, nproc: int | None) -> None:
        self._unchanged = config
        self._base_plan = base_plan
        self._hardware = base_plan.hardware
        if config.parallel.deepspeed is not None:  # the advice is PyTorch's strategies
            config = ZeroSettings.read(config, self._hardware, base_plan.processes).traced_run(config)
        self._config = config
        self._text = text
        self._activations = ActivationModel()
        self._models: dict[tuple[Any, ...], PreTrainedModel] = {}
        self._on_host = base_plan.processes // base_plan.hardware.nodes
        self._counts = [self._on_host]
        """Numbers of processes per host to try."""
        if self._hardware.shares_memory and nproc is None:
            max_count = self._on_host if self._on_host > 1 else usable_cores()
            self._counts = sorted({self._on_host, *(2**power for power in range(max_count.bit_length()))})

    def advice(self) -> Advice:
        same = self._plan_same_training()
        different = list(self._plan_different_training(same))
        larger: list[PlannedLayout] = []
        if not any(self._surely_fits(planned) for planned in [*same, *different]):
            larger = list(self._plan_larger_hardware())
        return Advice(
            tuple(map(self._suggest, same)), tuple(map(self._suggest, different)), tuple(map(self._suggest, larger))
        )

    def _plan_same_training(self) -> list[PlannedLayout]:
        """Return the fastest layouts of the unchanged run."""
        dims = read_parallel_dims(self._config.parallel, self._base_plan.processes, self._on_host)
        base_layout = Layout(self._config, dims, self._on_host)
        self._activations.add(base_layout, self._base_plan)
        search = self._create_search(self._config, self._hardware)
        estimated_seconds = search.seconds(base_layout, self._base_plan.recompute, self._base_plan.micro_batch)
        fits = self._base_plan.memory_fraction <= 1
        planned = [PlannedLayout(self._unchanged, self._base_plan, estimated_seconds)] if fits else []
        best = search.fastest(self._list_layouts(self._config), Budget(_PLANS), planned, _MAX_SUGGESTIONS)
        if len(best) == _MAX_SUGGESTIONS or self._hardware.shares_memory:
            return best
        return search.fastest(
            self._list_layouts(self._config, offload="pinned"), Budget(_OFFLOAD_PLANS), best, _MAX_SUGGESTIONS
        )

    def _plan_different_training(self, same: list[PlannedLayout]) -> Iterator[PlannedLayout]:
        """Yield the fastest layout of each changed training that is faster than `same`, or fits if `same` is empty."""
        fastest = min((planned.seconds for planned in same if planned.seconds is not None), default=None)
        for changes in self._possible_changes():
            config = _apply_changes(self._config, changes)
            if config is None:
                continue
            search = self._create_search(config, self._hardware)
            for planned in search.fastest(self._list_layouts(config), Budget(_PLANS_OF_A_CHANGE), limit=1):
                is_faster = (
                    fastest is not None and planned.seconds is not None and planned.seconds < _MAX_TIME_RATIO * fastest
                )
                if is_faster or not same:
                    yield planned

    def _possible_changes(self) -> Iterator[dict[str, Any]]:
        """Yield changes that make a different training. Quantized weights are not advised yet."""
        peaks = self._hardware.peak_flops
        if self._base_plan.precision == "fp32" and ("bf16" in peaks or "fp16" in peaks):
            yield {"train.precision": "bf16" if "bf16" in peaks else "fp16"}
        if self._base_plan.precision == "bf16" and self._config.train.weights == "fp32":
            yield {"train.weights": "bf16"}
        if self._config.model.from_ is not None and self._config.model.lora is None and not self._config.model.freeze:
            yield {"model.lora.rank": _LORA_RANK}

    def _plan_larger_hardware(self) -> Iterator[PlannedLayout]:
        """Yield the smallest sufficient number of the same accelerators, and of larger ones if fewer are enough."""
        sufficient: int | None = None
        for candidates in (scale_up(self._hardware), larger_accelerators(self._hardware)):
            budget = Budget(_HARDWARE_PLANS)
            for hardware in candidates:
                if budget.remaining <= 0 or (sufficient is not None and hardware.world_size >= sufficient):
                    break
                planned = self._find_smallest(hardware, budget)
                if planned is not None:
                    yield planned
                    sufficient = hardware.world_size
                    break

    def _find_smallest(self, hardware: Hardware, budget: Budget) -> PlannedLayout | None:
        """Return the layout with the least memory. None if no layout fits that hardware."""
        model = self._get_model(self._config)
        search = self._create_search(self._config, hardware)
        training_bytes = search.size.training_bytes
        candidates: list[Layout] = []
        if training_bytes // hardware.world_size <= hardware.memory_bytes:
            candidates += iterate_layouts(self._config, model, hardware.world_size, hardware.count)
        if hardware.host_memory_bytes is not None and training_bytes // hardware.nodes <= hardware.host_memory_bytes:
            candidates += iterate_layouts(self._config, model, hardware.world_size, hardware.count, offload="pinned")
        return search.smallest(candidates, budget)

    def _create_search(self, config: RunConfig, hardware: Hardware) -> Search:
        size = ModelSize.measure(config, self._get_model(config), self._base_plan.parameters["active"])
        # The price is known only for the accelerators of the command.
        price = self._base_plan.price if hardware.name == self._hardware.name else None
        return Search(self._text, size, self._activations, hardware, plan_precision(config, hardware), price)

    def _list_layouts(self, config: RunConfig, offload: str = "none") -> list[Layout]:
        model = self._get_model(config)
        nodes = self._hardware.nodes
        return [
            layout
            for count in self._counts
            for layout in iterate_layouts(config, model, count * nodes, count, offload=offload)
        ]

    def _get_model(self, config: RunConfig) -> PreTrainedModel:
        """Return the model of a run on the meta device. Layouts do not change it."""
        precision = plan_precision(config, self._hardware)
        key = (str(config.model.lora), config.train.weights, precision)
        if key not in self._models:
            outline = ModelOutline.from_config(config, self._text[0].objective, self._text[0].tokenizer)
            self._models[key] = outline.build(precision)
        return self._models[key]

    def _surely_fits(self, planned: PlannedLayout) -> bool:
        """True unless it offloads to host memory of unknown size."""
        return planned.config.parallel.offload == "none" or self._hardware.host_memory_bytes is not None

    def _suggest(self, planned: PlannedLayout) -> Suggestion:
        return Suggestion(
            _find_differences(self._unchanged, planned.config), planned.plan, planned.config.parallel.offload != "none"
        )


def scale_up(hardware: Hardware) -> Iterator[Hardware]:
    """Yield hardware with more of the same accelerators, first in a node, then in more nodes. Nothing for a CPU."""
    if hardware.shares_memory:
        return
    for count in _ACCELERATOR_COUNTS:
        if count > hardware.count:
            yield replace(hardware, count=count)
    count = max(hardware.count, *_ACCELERATOR_COUNTS)
    nodes = hardware.nodes if count == hardware.count else hardware.nodes or 1
    while count * nodes * 2 <= _MAX_ACCELERATORS:
        nodes *= 2
        yield replace(hardware, count=count, nodes=nodes)


def larger_accelerators(hardware: Hardware) -> list[Hardware]:
    """Return accelerators with more memory than those of `hardware`, sorted by number and memory.

    For a CPU, return all accelerators.
    """
    min_memory = 0 if hardware.shares_memory else hardware.memory_bytes
    machines = [find_hardware(f"{name}:{count}") for name in ACCELERATORS for count in _ACCELERATOR_COUNTS]
    larger = [
        replace(machine, host_memory_bytes=hardware.host_memory_bytes)
        for machine in machines
        if machine.memory_bytes > min_memory
    ]
    clusters = [
        cluster for machine in larger if machine.count == _ACCELERATOR_COUNTS[-1] for cluster in scale_up(machine)
    ]
    return sorted([*larger, *clusters], key=lambda machine: (machine.world_size, machine.memory_bytes))


def _apply_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig | None:
    """Return the run with changed values. None if the result is invalid."""
    try:
        changed_run = parse_run(config.model_dump(mode="json", by_alias=True), changes, {})
        check_optimizer(changed_run.train)
    except InputError:
        return None
    return changed_run


def _find_differences(before: RunConfig, after: RunConfig) -> dict[str, Any]:
    """Return the changed dotted keys with their values."""
    changes: dict[str, Any] = {}
    for dotted in _KEYS:
        section, key = dotted.split(".")
        old, new = (getattr(getattr(config, section), key) for config in (before, after))
        if old != new:
            changes |= {"model.lora.rank": new.rank} if key == "lora" else {dotted: new}
    return changes


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The user's command, repeated in the suggested command lines."""

    name: str
    """The run file."""
    overrides: Overrides
    options: Mapping[str, str] = field(default_factory=dict)
    """Other options of `artel plan`: `--host-memory` and its value."""

    def train(self, suggestion: Suggestion) -> str:
        hardware = suggestion.hardware
        options = ["--nproc", str(suggestion.plan.processes // hardware.nodes)] if suggestion.plan.processes > 1 else []
        options += ["--nnodes", str(hardware.nodes)] if hardware.nodes > 1 else []
        return self._format_command("train", options, suggestion)

    def plan(self, suggestion: Suggestion) -> str:
        hardware = suggestion.hardware
        nodes = ["--nodes", str(hardware.nodes)] if hardware.nodes > 1 else []
        return self._format_command(
            "plan",
            ["--hardware", f"{hardware.name}:{hardware.count}", *nodes, *chain(*self.options.items())],
            suggestion,
        )

    def _format_command(self, command: str, options: Sequence[str], suggestion: Suggestion) -> str:
        overrides = Overrides(
            {key: value for key, value in self.overrides.items() if key not in suggestion.overrides}
        ).words
        return shlex.join(["artel", command, self.name, *options, *overrides, *suggestion.arguments])


def advice_json(advice: Advice, line: CommandLine) -> list[dict[str, Any]]:
    """Return the `advice` of `artel plan --json --fit`. `group` is SAME, DIFFERENT or LARGER."""
    groups = {SAME: advice.same, DIFFERENT: advice.different, LARGER: advice.larger}
    return [_suggestion_json(group, suggestion, line) for group, members in groups.items() for suggestion in members]


def _suggestion_json(group: str, suggestion: Suggestion, line: CommandLine) -> dict[str, Any]:
    plan = suggestion.plan
    planned = plan.to_json()
    keys = ("fits", "verdict", "processes", "micro_batch", "activation_checkpointing", "precision", "hours", "cost")
    return {
        "group": group,
        "overrides": suggestion.arguments,
        "command": line.plan(suggestion) if group == LARGER else line.train(suggestion),
        "hardware": {"name": plan.hardware.name, "count": plan.hardware.count, "nodes": plan.hardware.nodes},
        **{key: planned[key] for key in keys},
        "per_rank_gib": planned["per_rank_gib"],
        "host_gib": planned["host_gib"],
        "tokens_per_second": None if plan.tokens_per_second is None else asdict(plan.tokens_per_second),
    }


def describe_advice(advice: Advice, line: CommandLine, hardware: Hardware) -> str:
    """Return command lines to paste, each with its memory and speed."""
    target = "processes on this machine" if hardware.shares_memory else f"{hardware.world_size} × {hardware.name}"
    sections = []
    if advice.same:
        sections.append([f"advice: the fastest that fit {target}", *_format_suggestions(advice.same, line.train)])
    else:
        sections.append([f"advice: nothing that was planned fits {target} with the training as it is"])
    if advice.different:
        sections.append(["if you accept a different training", *_format_suggestions(advice.different, line.train)])
    if advice.larger:
        sections.append(["the smallest hardware that would do", *_format_suggestions(advice.larger, line.plan)])
    return "\n\n".join(map("\n".join, sections))


def _format_suggestions(suggestions: Sequence[Suggestion], command: Callable[[Suggestion], str]) -> list[str]:
    lines = []
    for index, suggestion in enumerate(suggestions, 1):
        lines += [f"  {index}  {command(suggestion)}", f"     {_memory_and_speed(suggestion)}"]
    return lines


def _memory_and_speed(suggestion: Suggestion) -> str:
    plan = suggestion.plan
    speed = plan.tokens_per_second
    speed_text = "speed unknown" if speed is None else f"{speed.mid:,.0f} tokens/s"
    text = f"{plan.verdict}: {plan.fullest.reserved / 2**30:.1f} GiB on the fullest rank, {speed_text}"
    if suggestion.offloads:
        condition = "if each host has" if plan.host_capacity is None else "with"
        text += f", {condition} {format_gib(plan.host_bytes)} of host memory"
    return text
