"""The plan of a run: what each rank's memory holds at its fullest moment, host memory, disk, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from artel.config import RunConfig
from artel.errors import InputError
from artel.models.activation_checkpointing import NotSelective, Recompute
from artel.models.compile import OFF, compile_choice
from artel.models.device import pick_precision
from artel.models.loading.language_part import multimodal_of
from artel.models.quantization import num_weights as count_weights
from artel.objectives import Objective, objective_type
from artel.parallel import World
from artel.parallel.mesh import read_parallel_dims
from artel.planning.hardware import Hardware
from artel.planning.operations import COLLECTIVE, Operation
from artel.planning.performance import (
    Forecast,
    Range,
    StepTime,
    forecast,
    slowest_stage,
    step_time,
)
from artel.planning.plan.batches import PlannedData, planned_data
from artel.planning.plan.disk import disk_bytes
from artel.planning.plan.first_steps import UsualStep, usual_step
from artel.planning.plan.length import PlannedLength, planned_length
from artel.planning.plan.models import ModelOutline
from artel.planning.plan.rank_memory import CHECKPOINT, RankMemory, is_sharded, rank_memory
from artel.planning.rates import read_rates
from artel.training.budget import FEWEST_STEPS
from artel.training.micro_batch import enough_rows, sizes_to_try
from artel.training.model_setup import check_layout

GIB = 2**30
TIGHT = 0.9
"""Of the memory, beyond which a plan is tight: artel leaves as much free itself when it looks for a micro-batch."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will need."""

    hardware: Hardware
    processes: int
    parameters: dict[str, int]
    """total, active (for a token), trained."""
    micro_batch: int
    recompute: Recompute
    precision: str
    ranks: tuple[RankMemory, ...]
    """Of the ranks that differ: of a pipeline one of each stage, else the first."""
    host_bytes: int
    """Of the fullest host, of all its processes."""
    host_room: int | None
    disk: dict[str, int]
    data_note: str
    tokens: float
    """Of a step: what blocks hold at most, or on average where rows are as long as their samples."""
    step: StepTime | None
    """None: neither the table nor `artel hardware` has the rates; or offload, whose transfers are not planned."""
    length: PlannedLength | None = None
    """None: only `artel prepare` can tell, or the run is as long as its `budget`."""
    budget: float | None = None
    """Seconds, where that is the length of the run."""
    price: float | None = None
    """Of one accelerator (of the machine, on a CPU) for an hour, as the user gave it."""

    @property
    def tokens_per_second(self) -> Range | None:
        """Of the text: what fills rows up is computed and is none of it."""
        return None if self.step is None else self.step.tokens_per_second(self._text_tokens)

    @property
    def _text_tokens(self) -> float:
        return self.tokens if self.length is None else self.tokens * (1 - self.length.filler)

    @property
    def forecast(self) -> Forecast | None:
        """What the whole run takes; None where its speed or its length is not known."""
        if self.step is None or (self.length is None and self.budget is None):
            return None
        machines = self.hardware.nodes if self.hardware.shares_memory else self.hardware.world_size
        price = None if self.price is None else self.price * machines
        if self.length is None:
            budget = (self.budget or 0.0) / 3600
            hours = Range(budget, budget, budget)
        else:
            hours = self.step.seconds.scaled(self.length.steps / 3600)
        return forecast(self.step, self._text_tokens, hours, self.hardware, price)

    @property
    def shortest_budget(self) -> float | None:
        """Seconds that the fewest steps of a run on a budget take at least; None without a budget or a known speed."""
        return None if self.step is None or self.budget is None else FEWEST_STEPS * self.step.seconds.low

    @property
    def fullest(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.reserved)

    @property
    def share(self) -> float:
        """The part of the memory that is used where it is scarcest."""
        return max(self.device_share, self.host_share)

    @property
    def device_share(self) -> float:
        """Of an accelerator's memory, on the fullest one."""
        return 0.0 if self.hardware.shares_memory else self.fullest.reserved / self.hardware.memory_bytes

    @property
    def host_share(self) -> float:
        """Of the fullest host's memory; 0 where that is not known."""
        return self.host_bytes / self.host_room if self.host_room else 0.0

    @property
    def verdict(self) -> str:
        return "fits" if self.share <= TIGHT else "tight" if self.share <= 1 else "does not fit"

    def to_json(self) -> dict[str, Any]:
        rank = self.fullest
        total = {} if self.forecast is None else asdict(self.forecast)
        per_rank = {kind: round(size / GIB, 3) for kind, size in rank.kinds.items()}
        return {
            "fits": self.share <= 1,
            "verdict": self.verdict,
            "memory_share": round(self.share, 4),
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
            "hours": total.get("hours"),
            "shortest_budget_seconds": self.shortest_budget,
            "energy_kwh": total.get("energy_kwh"),
            "cost": total.get("cost"),
            "host_gib": round(self.host_bytes / GIB, 3),
            "disk_gib": {name: round(size / GIB, 3) for name, size in self.disk.items()},
        }


PlannedText = tuple[PlannedData, PlannedLength | None]


def planned_text(run: RunConfig) -> PlannedText:
    """What a plan knows of a run's data: the same for all plans of one run. Raises InputError."""
    data = planned_data(run)
    return data, planned_length(run, data)


def processes_on_host(run: RunConfig, hardware: Hardware, nproc: int | None) -> int:
    """`nproc`; else one for each GPU of a node, or on a CPU as many as the numbers in `parallel` need."""
    if nproc is not None:
        return nproc
    needed = run.parallel.processes // hardware.nodes if hardware.shares_memory else 1
    return max(hardware.count, needed)


def make_plan(
    run: RunConfig,
    hardware: Hardware,
    nproc: int | None = None,
    price: float | None = None,
    text: PlannedText | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Plan `run` on `hardware`. Raises InputError for what cannot be planned.

    `nproc` processes run on each node; else one for each GPU, or on a CPU as many as the numbers in `parallel` need.
    `price` is that of one accelerator (of a machine, on a CPU) for an hour. `text` is the run's `planned_text`, where
    that is known.
    """
    on_host = processes_on_host(run, hardware, nproc)
    if not hardware.shares_memory:
        hardware = replace(hardware, count=on_host)
    world_size = on_host * hardware.nodes
    if run.parallel.deepspeed is not None:
        what = "DeepSpeed shares out weights in its own way, which is not planned yet"
        raise InputError.at("parallel.deepspeed", what, "plan it as parallel.data: fsdp, which holds about as much")
    dims = read_parallel_dims(run.parallel, world_size, on_host)
    check_layout(run, objective_type(run).auto_class, world_size, on_host)
    data, length = text or planned_text(run)
    outline = ModelOutline.of(run, data.objective, data.tokenizer)
    precision = planned_precision(run, hardware)
    data = data.laid_out_for(lambda: outline.build_for_training(precision), hardware.device)
    most = -(-run.train.batch // dims.dp_degree)
    mode = run.train.activation_checkpointing
    modes: tuple[Recompute, ...] = ("none", "selective", "full") if mode == "auto" else (mode,)

    device = torch.device(hardware.device)
    compiled = _is_compiled(run, device)
    usual_of = cache(partial(usual_step, run, data))

    def planned(rows: int, how: Recompute, compiled: bool = compiled) -> Plan:
        count = -(-most // rows)
        rows = -(-most // count)
        again = "" if how == "none" else f", activation_checkpointing: {how}"
        tell(f"tracing two steps with micro-batches of {rows}{again}")
        usual = usual_of(rows, dims.dp_degree)
        plan = _planned(
            run, hardware, outline, data, length, world_size, on_host, precision, count, rows, usual, how, compiled
        )
        return replace(plan, price=price)

    # Training tries micro-batches before it compiles, and on a GPU what is not compiled takes more.
    searches_eager = compiled and not hardware.shares_memory
    candidate = partial(planned, compiled=False) if searches_eager else planned
    if run.train.micro_batch == "auto":
        sizes = sizes_to_try(most, data.row_tokens, device)
        chosen = _with_largest_micro_batch(candidate, sizes, modes, enough_rows(data.row_tokens, device))
    elif len(modes) > 1:
        chosen = _first_that_fits(candidate(run.train.micro_batch, how) for how in modes)
    else:
        return planned(run.train.micro_batch, modes[0])
    return planned(chosen.micro_batch, chosen.recompute) if searches_eager else chosen


def _first_that_fits(plans: Iterator[Plan]) -> Plan:
    """The first with room to spare; else the last."""
    for plan in plans:
        if plan.share <= TIGHT:
            break
    return plan


def _with_largest_micro_batch(
    planned: Callable[[int, Recompute], Plan], sizes: list[int], modes: tuple[Recompute, ...], enough: int
) -> Plan:
    """As training finds it (`find_micro_batch`): the first mode in which `enough` rows fit; of the last, what fits.

    Memory grows in a straight line with the rows, so two plans tell which of the ascending `sizes` is the largest.
    """
    for how in modes:
        try:
            largest = plan = planned(sizes[-1], how)
        except NotSelective:
            if how == modes[-1]:
                raise
            continue
        if largest.share <= TIGHT:
            return largest
        smallest = plan = planned(sizes[0], how)
        if smallest.share > TIGHT:
            continue
        for_a_row = (largest.share - smallest.share) / (sizes[-1] - sizes[0])
        fitting = [size for size in sizes if smallest.share + for_a_row * (size - sizes[0]) <= TIGHT]
        if fitting[-1] >= enough or how == modes[-1]:
            return _first_that_fits(planned(size, how) for size in reversed(fitting))
    return plan


def _planned(
    run: RunConfig,
    hardware: Hardware,
    outline: ModelOutline,
    data: PlannedData,
    length: PlannedLength | None,
    world_size: int,
    on_host: int,
    precision: str,
    count: int,
    rows: int,
    usual: UsualStep | None,
    how: Recompute,
    compiled: bool,
) -> Plan:
    """The plan with `count` micro-batches of `rows` rows on each rank."""
    stages = run.parallel.pipeline
    worlds = [
        World(rank, world_size, 0, torch.device("cpu"), on_host) for rank in range(0, world_size, world_size // stages)
    ]
    on_gpu = not hardware.shares_memory
    batch = None if usual is None else usual.batch
    ranks = tuple(
        rank_memory(
            run, outline, data, world, how, precision, rows, count, usual=batch, on_gpu=on_gpu, compiled=compiled
        )
        for world in worlds
    )
    host = sum(rank.host for rank in ranks) * on_host // stages + ranks[0].shared
    if not on_gpu and not is_sharded(run, worlds[0]):  # the first rank alone writes checkpoints
        host -= ranks[0].kinds[CHECKPOINT] * (on_host - 1)
    if on_gpu:
        host = on_host * max(rank.host for rank in ranks)
    model = outline.build(precision)
    return Plan(
        hardware,
        world_size,
        _parameters(model),
        rows,
        how,
        precision,
        ranks,
        host,
        hardware.host_memory_bytes,
        disk_bytes(run, model, multimodal_of(outline.whole), data, length),
        data.note + _left_out(data.objective),
        run.train.batch * data.row_tokens if usual is None else usual.tokens,
        _step_time(run, hardware, ranks, model, world_size, on_host, count),
        length,
        run.train.budget,
    )


def _left_out(objective: Objective) -> str:
    """What of a teacher the plan does not count, in words; empty without one."""
    teacher = objective.teacher
    if teacher is None:
        return ""
    if teacher.settings is None:
        return "; not counted: the teacher, which stays in memory and reads each batch first"
    return "; not counted: the time in which the teacher reads all samples, before the first step"


def _step_time(
    run: RunConfig,
    hardware: Hardware,
    ranks: tuple[RankMemory, ...],
    model: torch.nn.Module,
    world_size: int,
    on_host: int,
    count: int,
) -> StepTime | None:
    """The time of the slowest rank's step; None where no rates are known, or weights travel from host memory."""
    if run.parallel.offload != "none":
        return None
    rates = read_rates(on_host, torch.device("cpu")) if hardware.shares_memory else None
    if rates is None and not hardware.has_rates:
        return None
    dims = read_parallel_dims(run.parallel, world_size, on_host)
    exchanged = {}
    if dims.sums_replica_gradients:  # DistributedDataParallel's reducer is not traced
        size = sum(4 * parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        group = range(0, world_size, world_size // dims.dp_replicate)
        exchanged[Operation(COLLECTIVE, "c10d.allreduce_", bytes=size, ranks=tuple(group))] = 1
    steps = [step_time({**rank.operations, **exchanged}, hardware, rates).seconds.mid for rank in ranks]
    passes = [step_time(rank.passes, hardware, rates).seconds.mid for rank in ranks]
    slowest, bubble = slowest_stage(run.parallel.schedule, count, steps, passes)
    return step_time({**ranks[slowest].operations, **exchanged}, hardware, rates, bubble=bubble)


def planned_precision(run: RunConfig, hardware: Hardware) -> str:
    """What layers will compute in there."""
    if hardware.shares_memory:
        return pick_precision(run.train.precision, torch.device("cpu"), run.train.weights)
    if run.train.precision != "auto":
        return run.train.precision
    return "bf16" if run.train.weights == "bf16" or "bf16" in hardware.peak_flops else "fp32"


def _parameters(model: torch.nn.Module) -> dict[str, int]:
    """Parameters in all, those that a token uses, and those that are trained; a tied one counts once."""
    config: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
    experts = max(getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1, 1)
    chosen = getattr(config, "num_experts_per_tok", None) or experts
    total = active = trained = 0
    for parameter in model.parameters():
        weights = count_weights(parameter)
        total += weights
        active += weights * chosen // experts if parameter.ndim == 3 and parameter.shape[0] == experts else weights
        trained += weights if parameter.requires_grad else 0
    return {"total": total, "active": active, "trained": trained}


def _is_compiled(run: RunConfig, device: torch.device) -> bool:
    train = run.train
    return compile_choice(train.compile, device, train.steps, train.budget, run.model.quantize).value != OFF
