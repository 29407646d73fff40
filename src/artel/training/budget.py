"""Keeps a run within `train.budget`: the fraction of its time that is used, and the last step.

The end of a run takes time, too: a validation, the samples, the last checkpoint, the final model. `MeasureEnd`
(callbacks.py) measures it early in each start, and the budget reserves it. Validation and samples are measured again
each time; checkpoints are not, since most are written while training continues. Checkpoints save the measurements for
the first steps of the next start. The first rank measures, and `synchronize` (loop.py) passes its numbers to the others
in every step, so that all use one clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

FEWEST_STEPS = 4
"""Steps of the shortest run with a budget: two measure the pace, and a third is taken only if a fourth would fit."""
_COMPUTED_PARTS = {"validation", "samples"}
"""Parts of the end that the model computes. The others write files."""
_PACE_STEPS = 5  # steps whose median is the pace: one delayed step does not count, a slower machine soon does


class Budget:
    """The time that a run may take, and the first rank's measurements, all in seconds. Without a limit: infinite."""

    def __init__(self, seconds: float | None, end: Mapping[str, list[float]] | None = None, share: float = 0.0) -> None:
        """`end` and `share`: from the previous start, if the run resumes."""
        self.seconds = math.inf if seconds is None else seconds
        self._steps: deque[float] = deque(maxlen=_PACE_STEPS)
        self._first_is_over = False
        self._share = share
        self.end = dict(end or {})
        """Part of the end -> [its seconds, seconds per step at that time]."""
        self.is_measured = False
        """True once all parts of the end have been measured in this start."""

    @property
    def step_seconds(self) -> float:
        """Seconds per step at the current pace. 0 before the second step of this start."""
        return median(self._steps) if self._steps else 0.0

    @property
    def end_seconds(self) -> float:
        """Seconds that the end of the run takes at the current pace.

        Parts that the model computes scale with the duration of a step. Writing files gets slower with it, but not
        faster.
        """
        now, total = self.step_seconds, 0.0
        for part, (seconds, then) in self.end.items():
            pace = now / then if now and then else 1.0
            total += seconds * (pace if part in _COMPUTED_PARTS else max(1.0, pace))
        return total

    def note_step(self, seconds: float) -> None:
        """Record the duration of a step. The first one of a start does not count, since it compiles and allocates."""
        if self._first_is_over:
            self._steps.append(seconds)
        self._first_is_over = True

    def note_end(self, part: str, seconds: float) -> None:
        """Record the duration, measured or estimated, of a part of the end."""
        self.end[part] = [seconds, self.step_seconds]

    def share(self, elapsed: float, in_steps: float) -> float:
        """Return the used fraction of the time for steps, given that `in_steps` of the `elapsed` seconds were steps.

        It never falls, even if the end turns out to take less than expected, or if the run resumes.
        """
        left = self.seconds - elapsed - self.end_seconds
        self._share = max(self._share, in_steps / (in_steps + left) if left > 0 else 1.0)
        return self._share

    def needed(self, elapsed: float) -> float:
        """Return the total duration of the run if the step that begins now is not its last one."""
        return elapsed + 2 * self.step_seconds + self.end_seconds
