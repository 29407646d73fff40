"""The best checkpoint: by which figure, and how long there was no better one."""

from __future__ import annotations

import math

from artel.training.run import Run


def compare_with_best(
    run: Run, value: float, figures: dict[str, float], *, higher_is_better: bool, counts: bool
) -> None:
    """Take note of `checkpoint.best` after the newest step: a better one is saved, and `patience` may end the run.

    `figures` are all of this step. Not everything `counts` toward `patience`: what only the run's end caused does not,
    since a longer run lacks it. All ranks call this with the same values.
    """
    name, progress = run.config.checkpoint.best, run.progress
    assert name is not None
    if progress.best_figure != name:
        progress.best = None  # the run was resumed with another one
    is_better = progress.best is None or (value > progress.best if higher_is_better else value < progress.best)
    if is_better and not math.isnan(value):
        progress.best, progress.best_figure, progress.best_step = value, name, run.step
        progress.best_validation, progress.best_calibration = figures, progress.calibration
        progress.validations_since_best = 0
        return
    progress.validations_since_best += counts
    patience = run.config.validate_.patience
    if patience is not None and progress.validations_since_best >= patience and not run.finished:
        progress.stopped_early = True
        run.tell(f"step {run.step}: {name} has not improved since step {progress.best_step}; stopping")
