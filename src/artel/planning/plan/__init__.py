"""Memory, disk, speed and length of a run before it starts: `artel plan`."""

from artel.planning.plan.length import with_planned_packing
from artel.planning.plan.run_plan import Plan, PlannedText, make_plan, plan_text
from artel.planning.plan.show import describe, describe_briefly

__all__ = ["Plan", "PlannedText", "describe", "describe_briefly", "make_plan", "plan_text", "with_planned_packing"]
