"""Memory, disk, speed and length of a run before it starts: `artel plan`."""

from artel.planning.plan.length import with_planned_packing
from artel.planning.plan.run_plan import Plan, PlannedText, make_plan, planned_text
from artel.planning.plan.show import describe, in_brief

__all__ = ["Plan", "PlannedText", "describe", "in_brief", "make_plan", "planned_text", "with_planned_packing"]
