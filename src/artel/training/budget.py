"""Keeps a run to `train.budget`: what share of its time has passed, and which step is the last.

The end of a run takes time, too: a validation, the samples, the last checkpoint, the final model. What it takes is
measured early in each start (`MeasureEnd` in callbacks.py) and kept free. Validation and samples are measured again
whenever they happen; a checkpoint is not, since most are written while training goes on. Checkpoints keep what was
measured, for the first steps of the next start. The first rank measures; `synchronize` (loop.py) tells the others in
every step, so that all go by one clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

FEWEST_STEPS = 4
"""Of a run on a budget: two tell the pace, and the one after them is taken only where there is time for another."""
_COMPUTED = {"validation", "samples"}
"""Parts of the end that the model computes; the others write files."""
_NEWEST = 5  # steps whose median is the pace: one that was held up does not count, a slower machine soon does


class Budget:
    """The time that a run may take, and what the first rank has measured of its parts. Without a limit it never ends.

    All times are in seconds.
    """

    def __init__(self, seconds: float | None, end: Mapping[str, list[float]] | None = None, share: float = 0.0) -> None:
        """`end` and `share` are those of the start before, where a run resumes."""
        self.seconds = math.inf if seconds is None else seconds
        self._steps: deque[float] = deque(maxlen=_NEWEST)
        self._first_is_over = False
        self._share = share
        self.end = dict(end or {})
        """Part of the end -> the seconds that it took, and those of a step at that time."""
        self.is_measured = False
        """True once all that the end takes has been measured in this start."""

    @property
    def step_seconds(self) -> float:
        """What a step takes at the present pace; 0 before the second step of this start."""
        return median(self._steps) if self._steps else 0.0

    @property
    def end_seconds(self) -> float:
        """Seconds that the end of the run takes at the present pace.

        What the model computes takes longer where steps take longer than they did when it was measured, and less where
        they take less. Files that are written do not get faster with the steps.
        """
        now, total = self.step_seconds, 0.0
        for part, (seconds, then) in self.end.items():
            pace = now / then if now and then else 1.0
            total += seconds * (pace if part in _COMPUTED else max(1.0, pace))
        return total

    def note_step(self, seconds: float) -> None:
        """A step took so long. The first one of a start, which compiles and allocates, says nothing of the pace."""
        if self._first_is_over:
            self._steps.append(seconds)
        self._first_is_over = True

    def note_end(self, part: str, seconds: float) -> None:
        """A part of what happens at the end took so long just now, or would have."""
        self.end[part] = [seconds, self.step_seconds]

    def share(self, elapsed: float, in_steps: float) -> float:
        """How much of the time for steps has passed, from 0 to 1: `in_steps` of the `elapsed` seconds were spent so.

        It never falls, also where the end turns out to take less than was thought, and where the run resumes.
        """
        left = self.seconds - elapsed - self.end_seconds
        self._share = max(self._share, in_steps / (in_steps + left) if left > 0 else 1.0)
        return self._share

    def needed(self, elapsed: float) -> float:
        """The seconds that the run takes in all if the step that begins now is not its last one."""
        return elapsed + 2 * self.step_seconds + self.end_seconds
