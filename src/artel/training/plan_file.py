"""Uses `RUN/plan.json`, the plan made before the run: it seeds the search for a micro-batch, and gets measurements."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from typing import Any

import orjson
import torch

from artel.host import process_memory, usable_cores
from artel.messages import logger
from artel.models.flops import token_rate
from artel.storage import write_file
from artel.training.comparison import choice_values, comparison_line, read_choice
from artel.training.micro_batch import AMPLE, MicroBatchPlan
from artel.training.run import Run
from artel.training.run_folder import RunFolder

_MIN_SECONDS = 10.0
"""Seconds of steps before their speed is compared with the plan."""
_SLOW_FRACTION = 0.6
"""Fraction of the planned speed below which a warning is printed. No plan in benchmarks/plan.md was that far off."""
_BUSY_LOAD = 1.5
"""Load per core above which other programs must be running. A run alone gives a load of one per core."""
_TRUSTED_CPU_FRACTION = 0.7
"""Fraction of the memory up to which a plan is trusted. Plans were up to 26 % too low (benchmarks/plan.md), and a
process on a CPU that takes too much is killed."""


def planned_micro_batch(folder: RunFolder, device: torch.device) -> MicroBatchPlan | None:
    """Return the micro-batch of the run's plan if it fits with a margin for the plan's error, or None."""
    plan = _read_plan(folder)
    if plan is None or plan["verdict"] != "fits":
        return None
    if device.type == "cpu" and plan["memory_share"] > _TRUSTED_CPU_FRACTION:
        return None
    return MicroBatchPlan(plan["micro_batch"], plan["activation_checkpointing"])


def plans_ample_memory(folder: RunFolder) -> bool:
    """True if the planned run needs so little memory that its micro-batch can be used untried."""
    plan = _read_plan(folder)
    return plan is not None and plan["verdict"] == "fits" and plan["memory_share"] < AMPLE


class CompareWithPlan:
    """Compares the plan with the first measured steps, and prints the time left at their speed.

    Writes the measurements into plan.json, and again at the end of the run. The speed is that of this start without its
    first step, as in `Progress.tokens_per_second`. The memory is the peak so far.
    """

    def __init__(self, run: Run) -> None:
        self._seconds_before = run.progress.train_seconds
        self._after_first_step: tuple[int, float] | None = None
        self._is_logged = self._is_final = run.finished

    def __call__(self, run: Run) -> None:
        if self._is_final or (self._is_logged and not run.finished):
            return
        progress = run.progress
        if self._after_first_step is None:
            self._after_first_step = progress.tokens, progress.train_seconds
        if not (run.finished or self._is_due(run)):
            return
        self._is_final = run.finished
        tokens, seconds = self._after_first_step
        speed = token_rate(progress.tokens - tokens, progress.train_seconds - seconds)
        measured: dict[str, float | None] = {
            "tokens_per_second": speed or progress.tokens_per_second,
            **_measure_memory(run),
        }
        if run.world.first:
            self._record(run, measured)
        self._is_logged = True

    def _is_due(self, run: Run) -> bool:
        """True once the steps of this start took long enough, on the first rank's clock."""
        seconds = run.progress.train_seconds - self._seconds_before
        return run.strategy.all_reduce_sum([seconds if run.world.first else 0.0])[0] >= _MIN_SECONDS

    def _record(self, run: Run, measured: dict[str, float | None]) -> None:
        plan, choice = _read_plan(run.folder), read_choice(run.folder)
        planned = {} if plan is None else _comparable_values(plan)
        if plan is not None:
            write_file(run.folder.plan, orjson.dumps(plan | {"measured": measured}, option=orjson.OPT_INDENT_2))
        expected = {} if choice is None else choice_values(choice, "expected")
        planned["tokens_per_second"] = planned.get("tokens_per_second") or expected.get("tokens_per_second")
        if self._is_logged or not any(planned.values()):
            return
        logger.info("measured after step %s: %s", f"{run.step:,}", comparison_line(planned, measured))
        speed, planned_speed = measured["tokens_per_second"], planned["tokens_per_second"]
        if not run.finished and speed:
            logger.info(_remaining_line(run, speed, planned_speed, "bits_per_byte" in expected))


def _remaining_line(run: Run, speed: float, planned_speed: float | None, expects_bits: bool) -> str:
    """Return a line with the time left at this speed, and, if it is slow, a possible reason."""
    is_slow = planned_speed is not None and speed < _SLOW_FRACTION * planned_speed
    tokens_per_step = max(1.0, run.progress.tokens / run.step)
    if run.length.steps is None:
        seconds = max(0.0, run.budget.seconds - run.seconds - run.budget.end_seconds)
        steps = seconds * speed / tokens_per_step
        line = f"at this speed about {steps:,.0f} more steps fit into the remaining {_format_seconds(seconds)}"
        if is_slow and planned_speed is not None:
            line += f", where {seconds * planned_speed / tokens_per_step:,.0f} were planned"
            line += "; the expected bits per byte assume the planned steps" if expects_bits else ""
    else:
        steps = run.length.steps - run.step
        time_left = _format_seconds(steps * tokens_per_step / speed)
        line = f"at this speed the remaining {steps:,.0f} steps take about {time_left}"
        if is_slow and planned_speed is not None:
            line += f", where {_format_seconds(steps * tokens_per_step / planned_speed)} were planned"
    if is_slow and run.world.device.type == "cpu":
        with suppress(OSError):  # some containers have no load average
            load, cores = os.getloadavg()[0], usable_cores()
            if load > _BUSY_LOAD * cores:
                line += f"; other programs are using the processor (load {load:.0f} on {cores} cores)"
    return line


def _format_seconds(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _measure_memory(run: Run) -> dict[str, float]:
    """Return the peak memory in GiB: of the fullest GPU's allocator, or of all processes on CPUs together."""
    if run.world.device.type == "cuda":
        peak = -run.strategy.all_reduce_min(-torch.cuda.max_memory_reserved(run.world.device))
        return {"per_rank_gib": peak / 2**30}
    shared = process_memory("RssFile") + process_memory("RssShmem")
    private = run.strategy.all_reduce_sum([float(max(0, process_memory("VmHWM") - shared))])[0]
    return {"host_gib": (private + shared) / 2**30}


def _comparable_values(plan: dict[str, Any]) -> dict[str, float | None]:
    """Return a plan's values under the names of the measurements."""
    return {
        "tokens_per_second": (plan["tokens_per_second"] or {}).get("mid"),
        "per_rank_gib": plan["per_rank_gib"]["reserved"] - plan["per_rank_gib"]["framework"],  # CUDA's context
        "host_gib": plan["host_gib"],
    }


def _read_plan(folder: RunFolder) -> dict[str, Any] | None:
    """Return RUN/plan.json, or None if it is missing or damaged."""
    try:
        plan = orjson.loads(folder.plan.read_bytes())
        return plan if isinstance(plan, dict) and "memory_share" in plan else None
    except (OSError, ValueError):
        return None
