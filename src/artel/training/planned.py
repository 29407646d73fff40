"""The plan that was made before the run, `RUN/plan.json`: the search for a micro-batch starts from it, and what is
measured is written beside it.
"""

from __future__ import annotations

from typing import Any

import orjson
import torch

from artel.host import process_memory
from artel.models.flops import tokens_a_second
from artel.storage import write_file
from artel.training.comparison import compared
from artel.training.memory.micro_batch import MicroBatchPlan
from artel.training.run import Run
from artel.training.run_folder import RunFolder

_FIRST_MINUTE = 60.0
_TRUSTED_ON_CPU = 0.7
"""Of the memory. A plan was up to 26 % too low (benchmarks/plan.md), and a CPU's process that takes more is killed."""


def planned_micro_batch(folder: RunFolder, device: torch.device) -> MicroBatchPlan | None:
    """The micro-batch of the run's plan, where it fits with room for the plan's error; else None."""
    plan = _read(folder)
    if plan is None or plan["verdict"] != "fits":
        return None
    if device.type == "cpu" and plan["memory_share"] > _TRUSTED_ON_CPU:
        return None
    return MicroBatchPlan(plan["micro_batch"], plan["activation_checkpointing"])


class CompareWithPlan:
    """Says after the first minute, or at the end, how near the plan came, and writes it into RUN/plan.json.

    The speed is that of all steps but the first, which may compile; the memory is the most that was held so far.
    """

    def __init__(self, run: Run) -> None:
        self._begun: tuple[int, float] | None = None
        self._done = run.finished

    def __call__(self, run: Run) -> None:
        """`run.first_rank_seconds` ends the minute for all ranks after the same step."""
        if self._done:
            return
        tokens, seconds = run.progress.tokens, run.progress.train_seconds
        if self._begun is None:
            self._begun = tokens, seconds
        if run.first_rank_seconds < _FIRST_MINUTE and not run.finished:
            return
        self._done = True
        speed = tokens_a_second(tokens - self._begun[0], seconds - self._begun[1])
        memory = _memory(run)
        plan = _read(run.folder) if run.world.first else None
        if plan is not None:
            measured = {"tokens_per_second": speed or None, **memory}
            write_file(run.folder.plan, orjson.dumps(plan | {"measured": measured}, option=orjson.OPT_INDENT_2))
            run.tell(f"measured after step {run.step:,}: {compared(_planned(plan), measured)}")


def _memory(run: Run) -> dict[str, float]:
    """GiB: of the fullest accelerator's allocator; on CPUs of all processes, what they share once."""
    if run.world.device.type == "cuda":
        peak = -run.strategy.all_reduce_min(-torch.cuda.max_memory_reserved(run.world.device))
        return {"per_rank_gib": peak / 2**30}
    shared = process_memory("RssFile") + process_memory("RssShmem")
    private = run.strategy.all_reduce_sum([float(max(0, process_memory("VmHWM") - shared))])[0]
    return {"host_gib": (private + shared) / 2**30}


def _planned(plan: dict[str, Any]) -> dict[str, float | None]:
    """The figures of a plan by the names of the measured ones."""
    return {
        "tokens_per_second": (plan["tokens_per_second"] or {}).get("mid"),
        "per_rank_gib": plan["per_rank_gib"]["reserved"] - plan["per_rank_gib"]["framework"],  # CUDA's context
        "host_gib": plan["host_gib"],
    }


def _read(folder: RunFolder) -> dict[str, Any] | None:
    """RUN/plan.json; None where there is none, or it is damaged."""
    try:
        plan = orjson.loads(folder.plan.read_bytes())
        return plan if isinstance(plan, dict) and "memory_share" in plan else None
    except (OSError, ValueError):
        return None
