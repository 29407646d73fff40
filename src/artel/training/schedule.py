"""How long a run is, and the learning rate at each of its steps: pure functions of the run file and the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from artel.config import RunConfig, TrainConfig
from artel.config.schema.quantities import Interval
from artel.registry import SCHEDULES
from artel.tokens import Samples, StoreSplit, TokenBlocks


@dataclass(frozen=True, slots=True)
class Length:
    """The length of a run. Its last step may be shorter than a batch, so that no sample of an epoch is skipped."""

    samples: int
    """Samples in an epoch."""
    batch: int
    total: int
    """Samples in the whole run."""

    @classmethod
    def of(cls, train: TrainConfig, samples: int, tokens: float) -> Length:
        """`samples` are there, of `tokens` each on average."""
        if train.steps is not None:
            total = train.steps * train.batch
        elif train.tokens is not None:
            total = math.ceil(train.tokens / tokens)
        else:
            total = max(1, round((train.epochs or 1.0) * samples))
        return cls(samples, train.batch, total)

    @property
    def steps(self) -> int:
        return -(-self.total // self.batch)

    def epoch(self, step: int) -> float:
        """Epochs gone through after `step` steps."""
        return min(step * self.batch, self.total) / self.samples

    def is_due(self, interval: Interval, step: int) -> bool:
        """Whether an interval of steps or epochs ends with step number `step` (counted from 1)."""
        if interval.steps is not None:
            return step % interval.steps == 0
        if interval.epochs is not None:
            # Rounded to 9 places: 3 steps of a third of an epoch are one epoch, whatever a float says.
            passed, before = (round(self.epoch(at) / interval.epochs, 9) for at in (step, step - 1))
            return math.floor(passed) > math.floor(before)
        return False


def run_length(config: RunConfig, samples: Samples, part: StoreSplit) -> Length:
    """The length of a run on `samples`, which are its objective's view of the training `part` of its store."""
    tokens = config.data.block if isinstance(samples, TokenBlocks) else part.tokens / part.samples
    return Length.of(config.train, len(samples), tokens)


def rate(train: TrainConfig, step: int, steps: int, warmup: int | None = None) -> float:
    """The learning rate of step `step` (counted from 0) of `steps`, as a fraction of the peak.

    `warmup` is in steps, where it is not what the run file makes of `steps`: that of a run whose length was changed.
    Warmup is linear from 1/warmup to 1; then the schedule leads, between the minimum (0) and the peak (1).
    """
    warmup = train.warmup.of(steps) if warmup is None else warmup
    if step < warmup:
        return (step + 1) / warmup
    floor = train.minimum_learning_rate
    return floor + (1 - floor) * SCHEDULES[train.schedule](train, step, steps, warmup)


def linear(train: TrainConfig, step: int, steps: int, warmup: int) -> float:
    """1 just after warmup, falling to 0 at the end of the run."""
    return (steps - step) / max(1, steps - warmup)


def cosine(train: TrainConfig, step: int, steps: int, warmup: int) -> float:
    """Half a wave from 1 to 0 (Loshchilov and Hutter 2017)."""
    return 0.5 * (1 + math.cos(math.pi * (1 - linear(train, step, steps, warmup))))


def constant(train: TrainConfig, step: int, steps: int, warmup: int) -> float:
    return 1.0


def warmup_stable_decay(train: TrainConfig, step: int, steps: int, warmup: int) -> float:
    """1 until the last part of the run (`train.decay`), where it falls to 0 (wsd; Hu et al. 2024, MiniCPM)."""
    return min(1.0, (steps - step) / max(1.0, train.decay * steps))
