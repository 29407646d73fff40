"""What is learned: record to samples, batch to loss, and the figures that judge the model."""

from collections.abc import Callable

from artel.config import RunConfig
from artel.objectives.base import Batch, Objective
from artel.objectives.causal import Causal

_OBJECTIVES: dict[str, Callable[[], Objective]] = {"causal": Causal}


def objective_of(run: RunConfig) -> Objective:
    """The objective that a run names."""
    return _OBJECTIVES[run.objective]()


__all__ = ["Batch", "Causal", "Objective", "objective_of"]
