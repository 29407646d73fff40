"""Plan a run before it runs: what `artel plan` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from artel.config import Overrides, RunConfig, RunFile
from artel.launching.quiet_libraries import quiet_libraries
from artel.launching.read_run import checked_run
from artel.preparing import settled

if TYPE_CHECKING:
    from artel.planning.budget.choose import Choice
    from artel.planning.plan import Plan, PlannedText


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """On what a run is planned; this machine where nothing is said."""

    hardware: str = ""
    """Accelerators of a node, as h100-80gb:8."""
    nodes: int = 1
    nproc: int | None = None
    """Processes on each node."""
    host_memory: str | None = None
    """Of each machine, as 1TB."""
    interconnect: str | None = None
    """Rate of one accelerator to other machines, as 400Gb/s."""
    price: float | None = None
    """Of one accelerator (of the machine, on a CPU) for an hour."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    run: RunConfig
    """With the model that was chosen for it, where it has `model.auto`."""
    plan: Plan
    text: PlannedText | None
    """What was found out about its text, where advice needs it."""
    choice: Choice | None
    """Of its model, where it has `model.auto`."""


def plan_run(
    file: RunFile,
    overrides: Overrides,
    options: PlanOptions,
    announce: Callable[[str], None],
    *,
    with_text: bool = False,
) -> PlannedRun:
    """What the run of a run file will need: its model is built without memory, and two steps of it are traced.

    Raises InputError for what is wrong with the run, and for what cannot be planned.
    """
    run = checked_run(file, overrides, here=not options.hardware)
    quiet_libraries()
    from artel.planning.hardware import find_hardware
    from artel.planning.plan import make_plan, planned_text, with_planned_packing

    choice = None
    hardware = find_hardware(options.hardware, options.nodes, options.host_memory, options.interconnect)
    if run.model.auto:
        from artel.planning.budget.choose import CHOOSING, choose_for_plan

        announce(CHOOSING)
        choice = choose_for_plan(run, hardware, options.nproc, announce)
        for line in choice.lines:
            announce(line)
        run = choice.run
    run = with_planned_packing(settled(run, announce))
    announce("building the model without memory")
    text = planned_text(run) if with_text else None
    plan = make_plan(run, hardware, options.nproc, options.price, text, announce)
    return PlannedRun(run, plan, text, choice)
