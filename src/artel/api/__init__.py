"""`import artel`: commands as functions, models to use, runs to inspect. docs/python.md shows each."""

from artel.api.model import Answer, Entity, Filled, Model, Ranked, open
from artel.api.push import push
from artel.api.run import Run
from artel.api.runs import RunPlan, plan, prepare, train

__all__ = [
    "Answer",
    "Entity",
    "Filled",
    "Model",
    "Ranked",
    "Run",
    "RunPlan",
    "open",
    "plan",
    "prepare",
    "push",
    "train",
]
