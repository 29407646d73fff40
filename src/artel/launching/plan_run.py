"""Plan a run: for `artel plan`, and when `artel train` starts."""

from __future__ import annotations

import math
import os
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import orjson
import xxhash

import artel
from artel.config import Overrides, RunConfig, RunFile, dump_run
from artel.config.schema.quantities import format_duration
from artel.errors import InputError
from artel.host import memory, swap_bytes
from artel.launching.quiet_libraries import quiet_libraries
from artel.launching.read_run import validate_run_file
from artel.launching.worker import module_command
from artel.messages import logger
from artel.preparing import resolve_from_records
from artel.storage import write_file
from artel.training.budget import FEWEST_STEPS
from artel.training.run_folder import RunFolder

if TYPE_CHECKING:
    from artel.planning.budget.choose import ModelChoice
    from artel.planning.plan import Plan, PlannedText
    from artel.preparing import PreparedText

_TOLERANCE = 0.15
"""Tolerated excess over the memory. No plan in benchmarks/plan.md is more than 10 % too high."""
_SHORT_FLOPS, _SHORT_SECONDS = 1e13, 60.0
"""A run that takes about as long as its plan, a minute on a laptop, is not planned."""
_TIMEOUT_SECONDS = 300
"""The largest recipe takes 30 s on a busy machine."""
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The hardware to plan for; by default this machine."""

    hardware: str = ""
    """Accelerators of a node: h100-80gb:8."""
    nodes: int = 1
    nproc: int | None = None
    """Processes on each node."""
    host_memory: str | None = None
    """Memory of each machine: 1TB."""
    interconnect: str | None = None
    """Rate of one accelerator to other machines: 400Gb/s."""
    price: float | None = None
    """Price per hour of one accelerator (of the machine, on a CPU)."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    config: RunConfig
    """The run, with the chosen model if it has `model.auto`."""
    plan: Plan
    text: PlannedText | None
    """Facts about its text, if requested."""
    choice: ModelChoice | None
    """The choice of its model, if it has `model.auto`."""


def plan_run(file: RunFile, overrides: Overrides, options: PlanOptions, *, with_text: bool = False) -> PlannedRun:
    """Plan the run of a run file: build its model on the meta device, and trace two steps.

    Raise InputError if the run is wrong or cannot be planned.
    """
    config = validate_run_file(file, overrides, here=not options.hardware)
    quiet_libraries()
    from artel.planning.hardware import find_hardware
    from artel.planning.plan import make_plan, plan_text, with_planned_packing

    choice = None
    hardware = find_hardware(options.hardware, options.nodes, options.host_memory, options.interconnect)
    if config.model.auto:
        from artel.planning.budget.choose import CHOOSING_MESSAGE, choose_model_for_plan

        logger.info(CHOOSING_MESSAGE)
        choice = choose_model_for_plan(config, hardware, options.nproc)
        for line in choice.lines:
            logger.info(line)
        config = choice.config
    config = with_planned_packing(resolve_from_records(config))
    logger.info("building the model on the meta device")
    text = plan_text(config) if with_text else None
    plan = make_plan(config, hardware, options.nproc, options.price, text)
    return PlannedRun(config, plan, text, choice)


def plan_at_start(config: RunConfig, prepared: PreparedText, processes: int, nodes: int, force: bool) -> None:
    """Plan a run when `artel train` starts, with `processes` on each of `nodes`, and log the plan in three lines.

    `artel plan` runs in a separate process, whose memory is freed before training begins. RUN/plan.json keeps the plan:
    the search for a micro-batch starts from it, and measured values are added to it. Runs of less than a minute or with
    DeepSpeed are not planned, and a start like the previous one is not planned again. Raise InputError if the plan
    exceeds the memory by more than its error, or if `train.budget` is too short for the first steps, unless `force`.
    """
    folder = RunFolder(Path(config.run))
    key = _plan_key(config, processes, nodes)
    plan = _read_earlier_plan(folder.plan, key)
    if plan is None:
        folder.plan.unlink(missing_ok=True)
        if config.parallel.deepspeed is not None or _is_short(config, prepared):  # DeepSpeed cannot be planned yet
            return
        logger.info("planning the run")
        plan = _run_plan_command(config, processes, nodes)
        if plan is None:
            return
        write_file(folder.plan, orjson.dumps({"key": key, **plan}, option=orjson.OPT_INDENT_2))
    for line in plan["summary"]:
        logger.info("plan: %s", line)
    if not force:
        _check_memory(plan)
        _check_budget(plan, config)


def _run_plan_command(config: RunConfig, processes: int, nodes: int) -> dict[str, Any] | None:
    """Run `artel plan` for this machine and return its JSON. If that fails, log it and return None."""
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    lines: list[str] = []
    with TemporaryDirectory() as folder:
        file = Path(folder, "run.yaml")
        result = Path(folder, "plan.json")
        file.write_text(dump_run(config, secrets=True), encoding="utf-8")
        command = [*module_command("artel"), "plan", str(file), f"--nproc={processes}", f"--nodes={nodes}", "--json"]
        with (
            result.open("wb") as out,
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, errors="replace"
            ) as process,
        ):
            timer = threading.Timer(_TIMEOUT_SECONDS, process.kill)
            timer.start()
            try:
                assert process.stderr is not None
                for line in process.stderr:
                    lines.append(line.strip())
                    if line.startswith("tracing "):  # progress
                        logger.info(lines[-1])
            finally:
                was_in_time = timer.is_alive()
                timer.cancel()
                process.kill()  # if interrupted
        content = result.read_bytes()
    try:
        plan: dict[str, Any] = orjson.loads(content)
    except ValueError:
        reason = f"planning took more than {_TIMEOUT_SECONDS} s"
        if was_in_time:
            output = [line for line in lines if line] or [f"exit status {process.returncode}"]
            reason = output[-1].removeprefix("artel: ")
        logger.info("no plan: %s", reason)
        return None
    return plan


def _check_memory(plan: dict[str, Any]) -> None:
    """Raise InputError if the plan exceeds the memory by more than its error. Swap counts as host memory."""
    swap_fraction = swap_bytes() / (memory().limit or memory().total) if plan["device"] == "cpu" else 0.0
    if plan["memory_share"] <= 1 + _TOLERANCE + swap_fraction:
        return
    fix = "use a smaller model, data.block or train.micro_batch, or shard it (parallel.data=fsdp); --force tries it"
    raise InputError.at("train", "; ".join(plan["summary"][:2]), fix)


def _check_budget(plan: dict[str, Any], config: RunConfig) -> None:
    """Raise InputError if the budget is too short for the minimum number of steps."""
    shortest = plan.get("shortest_budget_seconds")
    budget = config.train.budget
    if shortest is None or budget is None or shortest <= budget:
        return
    least = format_duration(60 * math.ceil(shortest / 60))
    what = f"{format_duration(budget)} is too short: {FEWEST_STEPS} steps take at least {least}; {plan['summary'][2]}"
    raise InputError.at("train.budget", what, f"set {least} or more, a smaller train.batch, or a smaller model")


def _is_short(config: RunConfig, prepared: PreparedText) -> bool:
    """True if the run takes about a minute at most, by its budget or by 6 N D FLOPs (Kaplan et al. 2020)."""
    quiet_libraries()
    from artel.objectives import build_objective
    from artel.planning.outline import outline_model
    from artel.training.schedule import run_length

    if config.train.budget is not None:
        return config.train.budget < _SHORT_SECONDS
    try:
        objective = build_objective(config, prepared.tokenizer())
        parameters = sum(parameter.numel() for parameter in outline_model(config, objective.auto_class).parameters())
    except InputError:  # the model is unknown here
        return False
    train_split = prepared.open().train
    length = run_length(config, objective.dataset(train_split), train_split)
    if not length.samples:  # less than a block, which is reported when the store is opened
        return True
    assert length.total_samples is not None
    return 6.0 * parameters * length.total_samples * train_split.tokens / length.samples < _SHORT_FLOPS


def _plan_key(config: RunConfig, processes: int, nodes: int) -> str:
    """Return a digest of all that the plan depends on: the run, the machine, its measured rates, and versions."""
    quiet_libraries()
    import torch
    import transformers

    from artel.planning.hardware import find_hardware
    from artel.planning.rates import read_rates

    rates = read_rates(processes, torch.device("cpu"))
    programs = [artel.__version__, torch.__version__, transformers.__version__]
    content = [config.model_dump(mode="json"), processes, nodes, repr(find_hardware()), repr(rates), programs]
    return xxhash.xxh3_128_hexdigest(orjson.dumps(content, default=str, option=orjson.OPT_SORT_KEYS))


def _read_earlier_plan(file: Path, key: str) -> dict[str, Any] | None:
    """Return the plan of an earlier start with the same key."""
    try:
        plan: dict[str, Any] = orjson.loads(file.read_bytes())
        return plan if plan["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
