"""The plan of a run: peak memory of each rank, host memory, disk, speed, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from artel.config import RunConfig
from artel.host import memory
from artel.integers import ceil_div
from artel.messages import logger
from artel.models.activation_checkpointing import Recompute, SelectiveUnsupported
from artel.models.compile import OFF, compile_choice
from artel.models.device import pick_precision
from artel.models.loading.language_part import get_multimodal
from artel.models.quantization import num_weights as count_weights
from artel.objectives import Objective, objective_type
from artel.parallel import World
from artel.parallel.mesh import read_parallel_dims
from artel.planning.hardware import Hardware
from artel.planning.operations import COLLECTIVE, Operation
from artel.planning.performance import Forecast, Range, StepTime, find_slowest_stage, forecast_run, predict_step_time
from artel.planning.plan.batches import AverageStep, PlannedData, find_average_step, plan_data
from artel.planning.plan.deepspeed import ZeroSettings
from artel.planning.plan.length import PlannedLength, disk_bytes, plan_length
from artel.planning.plan.models import ModelOutline
from artel.planning.plan.rank_memory import CHECKPOINT, RankMemory, estimate_rank_memory, is_sharded
from artel.planning.plan.rounds import PlannedRound, plan_round
from artel.planning.rates import read_rates
from artel.training.budget import FEWEST_STEPS
from artel.training.micro_batch import enough_rows, sizes_to_try
from artel.training.model_setup import check_layout

GIB = 2**30
WRITING, SCORING, LEARNING = "writing", "scoring", "learning"
"""Parts of the time of a round. The first two are kinds of a step's time."""
TIGHT = 0.9
"""Fraction of the memory above which a plan is tight. The search for a micro-batch leaves the same margin."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The needs of a run."""

    hardware: Hardware
    processes: int
    parameters: dict[str, int]
    """total, active (used by one token), trained."""
    micro_batch: int
    recompute: Recompute
    precision: str
    ranks: tuple[RankMemory, ...]
    """The ranks that differ: one of each pipeline stage, else the first."""
    host_bytes: int
    """Memory of all processes on the fullest host."""
    host_capacity: int | None
    disk: dict[str, int]
    data_note: str
    tokens: float
    """Tokens of a step: the maximum with blocks, the average if rows are as long as their samples."""
    step: StepTime | None
    """None if neither the table nor `artel hardware` has the rates."""
    length: PlannedLength | None = None
    """None if only `artel prepare` can tell, or if `budget` sets the length."""
    budget: float | None = None
    """Length of the run in seconds, if `train.budget` sets it."""
    price: float | None = None
    """Price per hour of one accelerator (of the machine, on a CPU), given by the user."""
    round: PlannedRound | None = None
    """A round of answers; None if the run learns from stored samples."""
    gathered_bytes: int = 0
    """Part of `host_bytes` that only the first host needs, while it gathers a checkpoint (DeepSpeed)."""

    @property
    def tokens_per_second(self) -> Range | None:
        """Tokens of text per second. Padding is computed but not counted."""
        return None if self.step is None else self.step.tokens_per_second(self._text_tokens)

    @property
    def _text_tokens(self) -> float:
        return self.tokens if self.length is None else self.tokens * (1 - self.length.padding)

    @property
    def forecast(self) -> Forecast | None:
        """Time, energy and cost of the whole run. None if its speed or its length is unknown."""
        if self.step is None or (self.length is None and self.budget is None):
            return None
        machines = self.hardware.nodes if self.hardware.shares_memory else self.hardware.world_size
        price = None if self.price is None else self.price * machines
        if self.length is None:
            budget = (self.budget or 0.0) / 3600
            hours = Range(budget, budget, budget)
        else:
            hours = self.step.seconds.scaled(self.length.steps / 3600)
        return forecast_run(self.step, self._text_tokens, hours, self.hardware, price)

    @property
    def shortest_budget(self) -> float | None:
        """Seconds that the minimum number of steps takes at least. None without a budget or a known speed."""
        return None if self.step is None or self.budget is None else FEWEST_STEPS * self.step.seconds.low

    @property
    def fullest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.reserved)

    @property
    def memory_fraction(self) -> float:
        """Used fraction of the scarcest memory."""
        return max(self.device_fraction, self.host_fraction)

    @property
    def device_fraction(self) -> float:
        """Used fraction of the fullest accelerator's memory."""
        return 0.0 if self.hardware.shares_memory else self.fullest.reserved / self.hardware.memory_bytes

    @property
    def host_fraction(self) -> float:
        """Used fraction of the fullest host's memory; 0 if its size is unknown."""
        return self.host_bytes / self.host_capacity if self.host_capacity else 0.0

    @property
    def verdict(self) -> str:
        return "fits" if self.memory_fraction <= TIGHT else "tight" if self.memory_fraction <= 1 else "does not fit"

    def to_json(self) -> dict[str, Any]:
        rank = self.fullest
        forecast = {} if self.forecast is None else asdict(self.forecast)
        per_rank = {kind: round(size / GIB, 3) for kind, size in rank.by_kind.items()}
        return {
            "fits": self.memory_fraction <= 1,
            "verdict": self.verdict,
            "memory_share": round(self.memory_fraction, 4),
            "hardware": self.hardware.name,
            "device": self.hardware.device,
            "parameters": self.parameters,
            "processes": self.processes,
            "micro_batch": self.micro_batch,
            "activation_checkpointing": self.recompute,
            "precision": self.precision,
            "per_rank_gib": per_rank
            | {"allocated": round(rank.allocated / GIB, 3), "reserved": round(rank.reserved / GIB, 3)},
            "tokens_per_second": None if self.tokens_per_second is None else asdict(self.tokens_per_second),
            "steps": None if self.length is None else self.length.steps,
            "tokens": None if self.length is None else round(self.length.tokens),
            "hours": forecast.get("hours"),
            "shortest_budget_seconds": self.shortest_budget,
            "energy_kwh": forecast.get("energy_kwh"),
            "cost": forecast.get("cost"),
            "round": self._round_json(),
            "host_gib": round(self.host_bytes / GIB, 3),
            "disk_gib": {name: round(size / GIB, 3) for name, size in self.disk.items()},
        }

    def _round_json(self) -> dict[str, Any] | None:
        if self.round is None:
            return None
        unknown: dict[str, float | None] = dict.fromkeys((WRITING, SCORING, LEARNING))
        return {
            "prompts": self.round.prompts,
            "answers": self.round.answers,
            "tokens": round(self.round.tokens),
            "tokens_per_answer": round(self.round.mean_length, 1),
            "lengths_of_round": self.round.from_round,
            "seconds": unknown | self.round_seconds,
        }

    @property
    def round_seconds(self) -> dict[str, float | None]:
        """Seconds of a round: writing, scoring, and the steps that learn from it. None if unknown."""
        if self.round is None or self.step is None:
            return {}
        by_kind, steps = self.step.by_kind, self.round.settings.steps
        parts = {kind: by_kind[kind] * steps if kind in by_kind else None for kind in (WRITING, SCORING)}
        rest = sum(seconds for kind, seconds in by_kind.items() if kind not in parts)
        return parts | {LEARNING: rest * steps}


PlannedText = tuple[PlannedData, PlannedLength | None]


def plan_text(config: RunConfig) -> PlannedText:
    """Return the data and the length that all plans of a run share. Raise InputError without a usable sample."""
    data = plan_data(config)
    return data, plan_length(config, data)


def processes_on_host(config: RunConfig, hardware: Hardware, nproc: int | None) -> int:
    """Return `nproc`, else one process per GPU of a node, or on a CPU as many as `parallel` needs."""
    if nproc is not None:
        return nproc
    needed = config.parallel.processes // hardware.nodes if hardware.shares_memory else 1
    return max(hardware.count, needed)


def make_plan(
    config: RunConfig,
    hardware: Hardware,
    nproc: int | None = None,
    price: float | None = None,
    text: PlannedText | None = None,
) -> Plan:
    """Plan a run on `hardware`. Raise InputError if it cannot be planned.

    `nproc` processes run on each node: by default one per GPU, or on a CPU as many as `parallel` needs. `price` is per
    hour of one accelerator (of a machine, on a CPU). `text` is the run's `plan_text`, if it is known.
    """
    on_host = processes_on_host(config, hardware, nproc)
    if not hardware.shares_memory:
        hardware = replace(hardware, count=on_host)
    world_size = on_host * hardware.nodes
    zero = None
    if config.parallel.deepspeed is not None:
        zero = ZeroSettings.read(config, hardware, world_size)
        config = zero.traced_run(config)
    dims = read_parallel_dims(config.parallel, world_size, on_host)
    check_layout(config, objective_type(config).auto_class, world_size, on_host)
    data, length = text or plan_text(config)
    outline = ModelOutline.from_config(config, data.objective, data.tokenizer)
    precision = plan_precision(config, hardware)
    data = data.with_layout_for(lambda: outline.build_for_training(precision), hardware.device)
    max_rows = ceil_div(config.train.batch, dims.dp_degree)
    mode = config.train.activation_checkpointing
    modes: tuple[Recompute, ...] = ("none", "selective", "full") if mode == "auto" else (mode,)

    device = torch.device(hardware.device)
    train = config.train
    compiled = compile_choice(train.compile, device, train.steps, train.budget, config.model.quantize).value != OFF
    compiled &= zero is None  # DeepSpeed's engine hooks into uncompiled layers
    round_ = plan_round(config, data)

    @cache
    def find_average(num_rows: int, dp_degree: int) -> AverageStep | None:
        if round_ is None:
            return find_average_step(config, data, num_rows, dp_degree)
        data.objective.assume_answer_length(round(round_.mean_length))
        try:
            return find_average_step(config, data, num_rows, dp_degree)
        finally:
            data.objective.assume_answer_length(None)

    def plan_rows(num_rows: int, mode: Recompute, compiled: bool = compiled) -> Plan:
        num_micro_batches = ceil_div(max_rows, num_rows)
        num_rows = ceil_div(max_rows, num_micro_batches)
        suffix = "" if mode == "none" else f", activation_checkpointing: {mode}"
        logger.info("tracing two steps with micro-batches of %s%s", num_rows, suffix)
        average = find_average(num_rows, dims.dp_degree)
        plan = _build_plan(
            config, hardware, outline, data, length, on_host, num_micro_batches, num_rows, average, mode, compiled,
            round_, zero,
        )  # fmt: skip
        return replace(plan, price=price)

    # Training tries micro-batches before it compiles, and on a GPU eager layers take more memory.
    searches_eager = compiled and not hardware.shares_memory
    candidate = partial(plan_rows, compiled=False) if searches_eager else plan_rows
    if config.train.micro_batch == "auto":
        sizes = sizes_to_try(max_rows, data.row_tokens, device)
        plan = _search_micro_batch(candidate, sizes, modes, enough_rows(data.row_tokens, device))
    elif len(modes) > 1:
        plan = _first_fitting(candidate(config.train.micro_batch, mode) for mode in modes)
    else:
        return plan_rows(config.train.micro_batch, modes[0])
    return plan_rows(plan.micro_batch, plan.recompute) if searches_eager else plan


def _first_fitting(plans: Iterator[Plan]) -> Plan:
    """Return the first plan that fits, else the last one."""
    for plan in plans:
        if plan.memory_fraction <= TIGHT:
            break
    return plan


def _search_micro_batch(
    plan_rows: Callable[[int, Recompute], Plan], sizes: list[int], modes: tuple[Recompute, ...], sufficient: int
) -> Plan:
    """Search as training does (`find_micro_batch`): the first mode that fits `sufficient` rows, else the last mode.

    Memory is linear in the rows, so two plans tell which of the ascending `sizes` is the largest that fits.
    """
    for mode in modes:
        try:
            largest = plan = plan_rows(sizes[-1], mode)
        except SelectiveUnsupported:
            if mode == modes[-1]:
                raise
            continue
        if largest.memory_fraction <= TIGHT:
            return largest
        smallest = plan = plan_rows(sizes[0], mode)
        if smallest.memory_fraction > TIGHT:
            continue
        fraction_per_row = (largest.memory_fraction - smallest.memory_fraction) / (sizes[-1] - sizes[0])
        fitting = [size for size in sizes if smallest.memory_fraction + fraction_per_row * (size - sizes[0]) <= TIGHT]
        if fitting[-1] >= sufficient or mode == modes[-1]:
            return _first_fitting(plan_rows(size, mode) for size in reversed(fitting))
    return plan


def _build_plan(
    config: RunConfig,
    hardware: Hardware,
    outline: ModelOutline,
    data: PlannedData,
    length: PlannedLength | None,
    on_host: int,
    num_micro_batches: int,
    num_rows: int,
    average: AverageStep | None,
    mode: Recompute,
    compiled: bool,
    round_: PlannedRound | None,
    zero: ZeroSettings | None,
) -> Plan:
    """Plan with `num_micro_batches` micro-batches of `num_rows` rows on each rank."""
    world_size = on_host * hardware.nodes
    precision = plan_precision(config, hardware)
    stages = config.parallel.pipeline
    worlds = [
        World(rank, world_size, 0, torch.device("cpu"), on_host) for rank in range(0, world_size, world_size // stages)
    ]
    on_gpu = not hardware.shares_memory
    average_batch = None if average is None else average.batch
    memory_bytes = hardware.memory_bytes if on_gpu else memory().free // on_host
    estimate = partial(
        estimate_rank_memory, average_batch=average_batch, round_=round_, memory_bytes=memory_bytes, on_gpu=on_gpu,
        compiled=compiled, zero=zero,
    )  # fmt: skip
    ranks = tuple(
        estimate(config, outline, data, world, mode, precision, num_rows, num_micro_batches) for world in worlds
    )
    host_bytes = sum(rank.host for rank in ranks) * on_host // stages + ranks[0].shared
    if not on_gpu and not is_sharded(config, worlds[0]):  # only the first rank writes checkpoints
        host_bytes -= ranks[0].by_kind[CHECKPOINT] * (on_host - 1)
    if on_gpu:
        host_bytes = on_host * max(rank.host for rank in ranks)
    host_bytes += ranks[0].gathered
    model = outline.build(precision)
    disk = disk_bytes(config, model, get_multimodal(outline.full_model), data, length)
    if ranks[0].swapped:
        disk["swapped on each host"] = on_host * ranks[0].swapped
    step = _predict_step_time(config, hardware, ranks, model, world_size, on_host, num_micro_batches)
    if round_ is not None and average is not None:
        step = step and _add_round(
            step, round_, ranks[0], model, data.tokenizer.vocabulary, on_host, world_size, hardware
        )
        if length is not None:  # its tokens are those of the prompts alone
            length = replace(length, tokens=length.steps * average.tokens)
    return Plan(
        hardware,
        world_size,
        _count_parameters(model),
        num_rows,
        mode,
        precision,
        ranks,
        host_bytes,
        hardware.host_memory_bytes,
        disk,
        data.note + _uncounted_note(data.objective, step),
        config.train.batch * data.row_tokens if average is None else average.tokens,
        step,
        length,
        config.train.budget,
        round=round_,
        gathered_bytes=ranks[0].gathered,
    )


def _add_round(
    step: StepTime,
    round_: PlannedRound,
    rank: RankMemory,
    model: Any,
    vocabulary: int,
    on_host: int,
    world_size: int,
    hardware: Hardware,
) -> StepTime:
    """Add the time in which a round is written and scored, divided among its steps, as far as it is known."""
    rates = read_rates(on_host, torch.device("cpu")) if hardware.shares_memory else None
    seconds: dict[str, float] = {} if round_.scoring_seconds is None else {SCORING: round_.scoring_seconds}
    if rates is not None and rank.writing_operations and round_.settings.engine is None:
        seconds[WRITING] = round_.writing_seconds(rank.writing_operations, model, vocabulary, rates, world_size)
    by_kind = {kind: value / round_.settings.steps for kind, value in seconds.items()}
    total = step.seconds.mid + sum(by_kind.values())
    return replace(step, seconds=step.seconds.scaled(total / step.seconds.mid), by_kind=step.by_kind | by_kind)


def _uncounted_note(objective: Objective, step: StepTime | None) -> str:
    """Return a note on what the plan does not count: the work of a teacher, or of rounds. Empty if it counts all."""
    rounds, teacher = objective.rounds, objective.teacher
    uncounted = []
    if rounds is not None and not rounds.is_scored:
        uncounted.append("the time and memory in which the model writes answers")
    elif rounds is not None:
        times = {WRITING: "the time in which answers are written", SCORING: "the time of rewards"}
        uncounted += [phrase for kind, phrase in times.items() if step is None or kind not in step.by_kind]
    if teacher is not None and teacher.settings is None:
        role = "model before training" if teacher.is_initial_model else "teacher"
        uncounted.append(f"the {role}, which stays in memory and reads each batch first")
    elif teacher is not None:
        uncounted.append("the time in which the teacher reads all samples, before the first step")
    listed = " and ".join(filter(None, (", ".join(uncounted[:-1]), *uncounted[-1:])))
    return f"; not counted: {listed}" if listed else ""


def _predict_step_time(
    config: RunConfig,
    hardware: Hardware,
    ranks: tuple[RankMemory, ...],
    model: torch.nn.Module,
    world_size: int,
    on_host: int,
    num_micro_batches: int,
) -> StepTime | None:
    """Return the time of the slowest rank's step. None if no rates are known."""
    rates = read_rates(on_host, torch.device("cpu")) if hardware.shares_memory else None
    if rates is None and not hardware.has_rates:
        return None
    dims = read_parallel_dims(config.parallel, world_size, on_host)
    reducer_operations = {}
    if dims.sums_replica_gradients:  # DistributedDataParallel's reducer is not traced
        gradient_bytes = sum(4 * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        group = range(0, world_size, world_size // dims.dp_replicate)
        reducer_operations[Operation(COLLECTIVE, "c10d.allreduce_", bytes=gradient_bytes, ranks=tuple(group))] = 1
    steps = [
        predict_step_time({**rank.operations, **reducer_operations}, hardware, rates).seconds.mid for rank in ranks
    ]
    passes = [predict_step_time(rank.passes, hardware, rates).seconds.mid for rank in ranks]
    slowest, bubble = find_slowest_stage(config.parallel.schedule, num_micro_batches, steps, passes)
    return predict_step_time({**ranks[slowest].operations, **reducer_operations}, hardware, rates, bubble=bubble)


def plan_precision(config: RunConfig, hardware: Hardware) -> str:
    """Return the precision that layers compute in on `hardware`."""
    if hardware.shares_memory:
        return pick_precision(config.train.precision, torch.device("cpu"), config.train.weights)
    if config.train.precision != "auto":
        return config.train.precision
    return "bf16" if config.train.weights == "bf16" or "bf16" in hardware.peak_flops else "fp32"


def _count_parameters(model: torch.nn.Module) -> dict[str, int]:
    """Count all parameters, the ones used by one token, and the trained ones. A tied parameter counts once."""
    model_config: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    sizes = [getattr(model_config, name, None) for name in ("num_local_experts", "num_experts")]
    experts = next(filter(None, sizes), 1)
    experts_per_token = getattr(model_config, "num_experts_per_tok", None) or experts
    total = active = trained = 0
    for parameter in model.parameters():
        weights = count_weights(parameter)
        total += weights
        active += (
            weights * experts_per_token // experts if parameter.ndim == 3 and parameter.shape[0] == experts else weights
        )
        trained += weights if parameter.requires_grad else 0
    return {"total": total, "active": active, "trained": trained}
