"""The state of a running training: what the loop changes and callbacks read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from artel.config import RunConfig
from artel.config.schema.quantities import Interval, format_duration
from artel.errors import InputError
from artel.objectives import Objective
from artel.parallel import OptimizerProtocol, ParallelStrategy, World
from artel.tokens import BalancedOrder, Order, Samples, Tokenizer
from artel.training.budget import FEWEST_STEPS, Budget
from artel.training.checkpoint.async_saver import Saver
from artel.training.checkpoint.format import Progress
from artel.training.checkpoint.items import CheckpointItem
from artel.training.metrics.trackers import Trackers
from artel.training.micro_batch import MemoryLimit, MicroBatchPlan
from artel.training.run_folder import RunFolder
from artel.training.schedule import Length, describe_position, rate, rate_by_time


class Rounds(Protocol):
    """Rounds of a run that learns from its own answers (`training/rounds.py`)."""

    def prepare(self, step: int) -> None:
        """Write and score the answers that a step learns from, unless they are there. Collective."""
        ...

    def close(self) -> None:
        """End the processes of the rewards."""
        ...


@dataclass(slots=True)
class Run:
    """Everything a running training consists of.

    A callback may read all of it, write to `trackers`, and `saver.wait()` for a checkpoint.
    """

    config: RunConfig
    folder: RunFolder
    folder_identity: str
    """Identifies the run's folder, in case it is replaced during the run."""
    world: World
    tokenizer: Tokenizer
    objective: Objective
    samples: Samples
    order: Order | BalancedOrder
    length: Length
    batch_plan: MicroBatchPlan
    """Rows of a micro-batch, and which activations are recomputed."""
    memory_limit: MemoryLimit
    strategy: ParallelStrategy
    optimizer: OptimizerProtocol
    items: list[CheckpointItem]
    saver: Saver
    trackers: Trackers
    progress: Progress
    flops_per_token: float | None
    """Training FLOPs per token. None if the device's peak is unknown."""
    peak_flops: float | None
    """Peak FLOP/s of one device in the run's precision."""
    window: torch.Tensor
    """The objective's sums over the good steps since the last logged line, on the device."""
    norm: torch.Tensor
    """Gradient norm of the newest good step before clipping, on the device."""
    budget: Budget
    """The time that the run may take."""
    clock: Callable[[], float]
    """Monotonic clock, in seconds."""
    started: float
    """Time by `clock` when this start of the run began to load the model."""
    window_seconds: float = 0.0
    window_tokens: int = 0
    window_positions: int = 0
    targets: float = 0.0
    """Target tokens in the newest global batch."""
    tokens: int = 0
    """Input tokens in the newest global batch, without padding."""
    positions: int = 0
    """Positions in the newest global batch: tokens and padding."""
    stop_requested: bool = False
    """True on every rank when any rank was asked to stop."""
    newest_validation: int = -1
    """The step after which the newest validation ran."""
    first_rank_seconds: float = 0.0
    """Seconds since the start on the first rank's clock. All ranks use it, so their intervals end at the same step."""
    step_started: float = 0.0
    """Time by `clock` when the newest step began."""
    first_step_is_done: bool = False
    """True after the first step of this start."""
    rounds: Rounds | None = None
    """Makes the answers that the run learns from; None if it learns from stored samples."""
    budget_is_over: bool = False
    """True on every rank in the last step of a run on a budget."""

    @property
    def step(self) -> int:
        """Steps done."""
        return self.progress.step

    @property
    def finished(self) -> bool:
        """True after the last step, or once validations stop improving."""
        steps, spent_budget = self.length.steps, self.progress.spent_budget or 0.0
        is_over = spent_budget >= self.budget.seconds if steps is None else self.step >= steps
        return is_over or self.progress.stopped_early

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken over all its starts, on this rank's clock."""
        return self.progress.seconds + self.clock() - self.started

    @property
    def seconds_left_of_step(self) -> float:
        """Seconds until the end of the current step, at the current pace. 0 if unknown."""
        return max(0.0, self.budget.step_seconds - (self.clock() - self.step_started))

    @property
    def budget_used(self) -> float | None:
        """Fraction of `train.budget` used when the newest step began. None without a budget."""
        budget = self.config.train.budget
        return None if budget is None else (self.progress.seconds + self.first_rank_seconds) / budget

    @property
    def position(self) -> str:
        """Progress as text: `step 5 of 100`, or `step 5, after 42% of 30min`."""
        seconds = self.progress.seconds + self.first_rank_seconds
        return describe_position(self.config.train, self.length, self.step, seconds)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the newest step."""
        return self.config.train.learning_rate * self.lr_multiplier(self.step - 1)

    def lr_multiplier(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0, as a fraction of the peak.

        With `train.budget` the rate follows the time: it is the rate of the current step, or between steps of the
        newest.
        """
        train, progress = self.config.train, self.progress
        if self.length.steps is None:
            return rate_by_time(train, step, progress.share, progress.warmup)
        return rate(train, step, self.length.steps, progress.warmup)

    @contextmanager
    def timed_step(self) -> Iterator[None]:
        """Count the duration of the block as time spent in training steps."""
        started, step, tokens = self.clock(), self.progress.step, self.progress.tokens
        self.step_started, self.trackers.doing = started, ""
        yield
        seconds = self.clock() - started
        self.progress.train_seconds += seconds
        if not self.first_step_is_done:
            self.progress.first_steps_seconds += seconds
            self.progress.first_steps_tokens += self.progress.tokens - tokens
            self.first_step_is_done = self.progress.step > step
        self.window_seconds += seconds
        self.budget.note_step(seconds)

    @contextmanager
    def timed_end(self, phase: str) -> Iterator[None]:
        """Record the duration of the block as that of a phase of the run's end.

        Inside the block, the model has the weights that the run is evaluated with: with `train.ema` their averages.
        """
        started = self.clock()
        with self.optimizer.averaged():
            yield
        self.budget.note_end(phase, self.clock() - started)

    def times(self) -> tuple[float, float, float]:
        """Return the first rank's times, which all ranks pass to `follow` in each step."""
        elapsed = self.seconds
        used_fraction = self.budget.update_used_fraction(elapsed, self.progress.train_seconds)
        return self.clock() - self.started, used_fraction, self.budget.needed_seconds(elapsed)

    def follow(self, seconds: float, used_fraction: float, needed_seconds: float) -> None:
        """Follow the first rank's clock: decide whether the budget is over, and update the progress.

        `seconds`: time since the start. `used_fraction`: of the time for steps. `needed_seconds`: total duration if
        this step is not the last. Raise InputError if the budget is too short for the first steps and the end.
        """
        self.first_rank_seconds = seconds
        progress, is_measured = self.progress, self.budget.is_measured
        is_beginning = progress.share == 0.0
        self.budget_is_over = needed_seconds > self.budget.seconds and (is_measured or not is_beginning)
        if is_beginning and not is_measured and seconds > self.budget.seconds:
            raise self._budget_over_error(seconds)
        if is_beginning and self.budget_is_over:
            raise self._budget_too_short_error(needed_seconds)
        if is_beginning and not is_measured:
            return
        progress.share, progress.share_of = used_fraction, self.budget.seconds
        if progress.warmup is None and used_fraction >= (self.config.train.warmup.fraction or 0.0):
            progress.warmup = self.step

    def _budget_over_error(self, seconds: float) -> InputError:
        """Return the error for a budget that is over before the run's end was measured."""
        work = "loading the model" if self.step == 0 else "loading the model and the first step"
        message = f"{format_duration(self.budget.seconds)} is too short: {work} took {seconds:,.0f} s"
        shortest = math.ceil(1.2 * (seconds + FEWEST_STEPS * self.progress.train_seconds))
        fix = f"write train.budget: {format_duration(shortest)} or more, plus the time of a validation and a save"
        return InputError.at("train.budget", message, fix)

    def _budget_too_short_error(self, needed_seconds: float) -> InputError:
        work = "loading the model, the first steps, and the last validation and save"
        message = f"{format_duration(self.budget.seconds)} is too short: {work} take {needed_seconds:,.0f} s"
        shortest = format_duration(math.ceil(1.2 * needed_seconds))  # the machine may be slower the next time
        return InputError.at("train.budget", message, f"write train.budget: {shortest} or more")

    def count_step(self) -> None:
        """Add the step just taken to the progress."""
        if self.budget_is_over:
            self.progress.spent_budget = self.budget.seconds
        self.progress.step += 1
        self.progress.tokens += self.tokens
        self.window_tokens += self.tokens
        self.window_positions += self.positions

    def check_folder(self) -> None:
        """Raise WorkError if the run's folder is gone or replaced, before anything is written there."""
        if self.folder_identity:  # empty if a network disk did not show the folder yet; then other hosts check
            self.folder.check_not_moved(self.folder_identity)

    def progress_so_far(self) -> Progress:
        """Return the progress including the wall time of this start, and the budget's measurements of the end."""
        end = {} if self.config.train.budget is None else self.budget.end
        return replace(self.progress, run=self.folder_identity, seconds=self.seconds, end=end)


class IntervalClock:
    """Tells when an interval of steps, epochs or time ends. Each callback with an interval has its own.

    Time counts from the first step of a start: loading a model does not make a validation due.
    """

    def __init__(self) -> None:
        self._last_due: float | None = None

    def is_due(self, run: Run, interval: Interval) -> bool:
        """True if the interval ends with the newest step. The same on all ranks."""
        if interval.seconds is None:
            return run.length.is_due(interval, run.step)
        if self._last_due is None:
            self._last_due = run.first_rank_seconds
        is_due = run.first_rank_seconds - self._last_due >= interval.seconds
        if is_due:
            self._last_due = run.first_rank_seconds
        return is_due
