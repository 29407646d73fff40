"""The length of a run and the learning rate at each step: pure functions of the run file and the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field

from artel.config import Count, RunConfig, Section, TrainConfig
from artel.config.schema.quantities import Interval, format_duration
from artel.integers import ceil_div
from artel.registry import SCHEDULES
from artel.tokens import Samples, StoreSplit, TokenBlocks

_FIRST_RATE = 0.01  # of the peak: if warmup is a fraction of a time, the pace is unknown at the first step
_MIN_FRACTION = 1e-9  # avoids a division by zero


@dataclass(frozen=True, slots=True)
class Length:
    """The length of a run. Its last step may be shorter than a batch, so that no sample of an epoch is skipped."""

    samples: int
    """Samples in an epoch."""
    batch: int
    total_samples: int | None
    """Samples in the whole run; None if `train.budget` ends it."""

    @classmethod
    def from_config(cls, train: TrainConfig, samples: int, tokens: float) -> Length:
        """`samples`: samples in an epoch. `tokens`: mean tokens per sample."""
        total_samples: int | None
        if train.budget is not None:
            total_samples = None
        elif train.steps is not None:
            total_samples = train.steps * train.batch
        elif train.tokens is not None:
            total_samples = math.ceil(train.tokens / tokens)
        else:
            total_samples = max(1, round((train.epochs or 1.0) * samples))
        return cls(samples, train.batch, total_samples)

    @property
    def steps(self) -> int | None:
        return None if self.total_samples is None else ceil_div(self.total_samples, self.batch)

    def epoch(self, step: int) -> float:
        """Return the epochs completed after `step` steps."""
        samples = step * self.batch
        return (samples if self.total_samples is None else min(samples, self.total_samples)) / self.samples

    def is_due(self, interval: Interval, step: int) -> bool:
        """True if an interval of steps or epochs ends with step number `step` (counted from 1)."""
        if interval.steps is not None:
            return step % interval.steps == 0
        if interval.epochs is not None:
            # Rounded to 9 decimals, so that 3 steps of a third of an epoch are one epoch in floating point, too.
            intervals, intervals_before = (round(self.epoch(end) / interval.epochs, 9) for end in (step, step - 1))
            return math.floor(intervals) > math.floor(intervals_before)
        return False


def describe_position(train: TrainConfig, length: Length, step: int, seconds: float) -> str:
    """Describe the position of a run: `step 5 of 100`, or with a budget `step 5, after 42% of 30min`.

    `seconds` is the time that the run has taken.
    """
    if train.budget is None:
        return f"step {step:,} of {length.steps:,}"
    return f"step {step:,}, after {seconds / train.budget:.0%} of {format_duration(train.budget)}"


def run_length(config: RunConfig, samples: Samples, split: StoreSplit) -> Length:
    """Return the length of a run on `samples`, the objective's view of the store's training `split`."""
    tokens = config.data.block if isinstance(samples, TokenBlocks) else split.tokens / max(1, len(samples))
    return Length.from_config(config.train, len(samples), tokens)


def warmup_steps(train: TrainConfig, steps: int | None) -> int | None:
    """Return the warmup steps of a run of `steps`; None if warmup is a fraction and `steps` is unknown."""
    if steps is None:
        return train.warmup.steps
    return train.warmup.of(steps)


def rate(train: TrainConfig, step: int, steps: int, warmup: int | None = None) -> float:
    """Return the learning rate of step `step` (from 0) of `steps`, as a fraction of the peak.

    `warmup`: steps of warmup, if changing the length of the run has fixed them. Otherwise they follow from `steps`.
    Warmup is linear from 1/warmup to 1. Then the schedule applies, between the minimum (0) and the peak (1).
    """
    warmup = train.warmup.of(steps) if warmup is None else warmup
    if step < warmup:
        return (step + 1) / warmup
    floor = train.minimum_learning_rate
    return floor + (1 - floor) * SCHEDULES[train.schedule](train, step, steps, warmup)


def rate_by_time(train: TrainConfig, step: int, used_fraction: float, warmup: int | None) -> float:
    """Return the learning rate of a step of a run on a budget, as a fraction of the peak.

    `used_fraction`: of the time for steps, 0 to 1. The schedule gets the number of steps that the run would have at its
    pace so far, so it follows the time. `warmup`: in steps, or None during a warmup that is a fraction of the time. The
    first step of such a warmup has 1 % of the peak, since the pace is still unknown.
    """
    if warmup is None:
        return min(1.0, max(_FIRST_RATE, used_fraction / (train.warmup.fraction or 1.0)))
    if step < warmup:
        return (step + 1) / warmup
    floor = train.minimum_learning_rate
    steps = max(step, 1) / max(used_fraction, _MIN_FRACTION)
    return floor + (1 - floor) * SCHEDULES[train.schedule](train, step, steps, warmup)


def linear(train: TrainConfig, step: int, steps: float, warmup: int) -> float:
    """Fall from 1 just after warmup to 0 at the end of the run."""
    return (steps - step) / max(1, steps - warmup)


def cosine(train: TrainConfig, step: int, steps: float, warmup: int) -> float:
    """Follow half a cosine wave from 1 to 0 (Loshchilov and Hutter 2017)."""
    return 0.5 * (1 + math.cos(math.pi * (1 - linear(train, step, steps, warmup))))


def constant(train: TrainConfig, step: int, steps: float, warmup: int) -> float:
    return 1.0


def warmup_stable_decay(train: TrainConfig, step: int, steps: float, warmup: int) -> float:
    """Stay at 1 until the decay begins (`train.decay`), then fall to 0 (wsd; Hu et al. 2024, MiniCPM)."""
    return min(1.0, (steps - step) / max(1.0, train.decay * steps))


class InverseSqrtConfig(Section):
    """Speed of the decay."""

    timescale: Count | None = Field(
        default=None,
        ge=1,
        description="Steps until the rate is 0.71 of the peak; after three times as many it is half. null: those of "
        "the warmup, or 10,000 without one.",
    )


def inverse_sqrt(train: TrainConfig, step: int, steps: float, warmup: int) -> float:
    """Return 1 / sqrt(1 + steps after warmup / timescale) (Vaswani et al. 2017), whatever the length of the run."""
    timescale = train.settings(InverseSqrtConfig).timescale or warmup or 10_000
    return float((timescale / (timescale + step - warmup)) ** 0.5)


class RestartsConfig(Section):
    """Number of cycles."""

    num_cycles: Count = Field(
        default=1, ge=1, description="Waves of equal length, each from the peak to the minimum; 1 is `cosine`."
    )


def cosine_with_restarts(train: TrainConfig, step: int, steps: float, warmup: int) -> float:
    """Follow half a cosine wave per cycle, from 1 to 0 (SGDR; Loshchilov and Hutter 2017)."""
    cycles = train.settings(RestartsConfig).num_cycles
    return 0.5 * (1 + math.cos(math.pi * (cycles * (1 - linear(train, step, steps, warmup)) % 1)))
