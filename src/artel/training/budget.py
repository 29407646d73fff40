"""Keeps a run within `train.budget`: measures the used fraction of the time, and predicts the last step.

The end of a run also takes time: a validation, the samples, the last checkpoint, the final model. `MeasureEnd`
(callbacks.py) measures it early in each start, and the budget reserves it. Validation and samples are measured again
each time. Checkpoints are not, since most are written while training continues. Each checkpoint saves the measurements,
and the next start uses them in its first steps. The first rank measures, and `synchronize` (loop.py) passes its numbers
to the other ranks in every step: all use one clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

FEWEST_STEPS = 4
"""Steps of the shortest run with a budget. Two measure the pace, and a third is taken only if a fourth would fit."""
_COMPUTED_PHASES = {"validation", "samples"}
"""Phases of the end that the model computes. The others write files."""
_PACE_STEPS = 5  # steps whose median is the pace: a single delayed step hardly changes it, a slower machine soon does


class Budget:
    """The time that a run may take, and the first rank's measurements. All in seconds; infinite without a limit."""

    def __init__(
        self, seconds: float | None, end: Mapping[str, list[float]] | None = None, used_fraction: float = 0.0
    ) -> None:
        """`end` and `used_fraction`: from the previous start, if the run resumes."""
        self.seconds = math.inf if seconds is None else seconds
        self._steps: deque[float] = deque(maxlen=_PACE_STEPS)
        self._first_step_is_over = False
        self._used_fraction = used_fraction
        self.end = dict(end or {})
        """Phase of the end -> [its seconds, seconds per step at that time]."""
        self.is_measured = False
        """True once all phases of the end have been measured in this start."""

    @property
    def step_seconds(self) -> float:
        """Seconds per step at the current pace. 0 before the second step of this start."""
        return median(self._steps) if self._steps else 0.0

    @property
    def end_seconds(self) -> float:
        """Seconds that the end of the run takes at the current pace.

        Phases that the model computes scale with the duration of a step. Writing files gets slower when steps do, but
        not faster.
        """
        total_seconds = 0.0
        step_seconds = self.step_seconds
        for phase, (seconds, step_seconds_then) in self.end.items():
            slowdown = step_seconds / step_seconds_then if step_seconds and step_seconds_then else 1.0
            total_seconds += seconds * (slowdown if phase in _COMPUTED_PHASES else max(1.0, slowdown))
        return total_seconds

    def note_step(self, seconds: float) -> None:
        """Record the duration of a step. Ignores the first step of a start, which compiles and allocates memory."""
        if self._first_step_is_over:
            self._steps.append(seconds)
        self._first_step_is_over = True

    def note_end(self, phase: str, seconds: float) -> None:
        """Record the duration, measured or estimated, of a phase of the end."""
        self.end[phase] = [seconds, self.step_seconds]

    def update_used_fraction(self, elapsed: float, in_steps: float) -> float:
        """Return the used fraction of the time for steps. `in_steps` of the `elapsed` seconds were steps.

        The fraction never falls, even if the end turns out to take less than expected, or if the run resumes.
        """
        remaining = self.seconds - elapsed - self.end_seconds
        used_fraction = in_steps / (in_steps + remaining) if remaining > 0 else 1.0
        self._used_fraction = max(self._used_fraction, used_fraction)
        return self._used_fraction

    def needed_seconds(self, elapsed: float) -> float:
        """Return the total duration of the run if the step that begins now is not its last one."""
        return elapsed + 2 * self.step_seconds + self.end_seconds
