"""How fast a run goes, and how long it will take."""

from __future__ import annotations

import numpy as np

from artel.reports.run_data import RunData

_PART = 0.2
"""The newest part of the run that says how fast it goes."""


def elapsed_seconds(run: RunData) -> float | None:
    """Wall time of the run so far, all its starts together; None where it does not tell."""
    if run.result is not None and isinstance(run.result.get("wall_seconds"), int | float):
        return float(run.result["wall_seconds"])
    seconds = run.curves.newest.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) else None


def steps_per_second(run: RunData) -> float | None:
    """Over the newest fifth of what is logged, with validations and checkpoints; None where that cannot be told."""
    loss = run.curves.training.get("loss")
    if loss is None or len(loss.step) < 2 or not np.isfinite(loss.seconds).all():
        return None
    first = min(int(len(loss.step) * (1 - _PART)), len(loss.step) - 2)
    seconds = float(loss.seconds[-1] - loss.seconds[first])
    return float(loss.step[-1] - loss.step[first]) / seconds if seconds > 0 else None


def share_done(run: RunData) -> float | None:
    """From 0 to 1, by steps, or under `train.budget` by the time; None where that is not known."""
    used = run.curves.newest.get("budget_used")
    if isinstance(used, int | float):
        return min(1.0, float(used))
    return min(1.0, run.status.step / run.steps) if run.steps else None


def seconds_left(run: RunData) -> float | None:
    """Until the last step, at the newest pace; under `train.budget`, what is left of it."""
    train = run.config.get("train")
    budget, used = train.get("budget") if isinstance(train, dict) else None, run.curves.newest.get("budget_used")
    if isinstance(budget, int | float) and isinstance(used, int | float):
        return max(0.0, (1 - used) * budget)
    pace = steps_per_second(run)
    if pace is None or run.steps is None or pace <= 0:
        return None
    return max(0.0, (run.steps - run.status.step) / pace)
