"""The state of a running training: what the loop changes and callbacks read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from artel.config import RunConfig
from artel.config.schema.quantities import Interval
from artel.objectives import Objective
from artel.parallel import OptimizerProtocol, ParallelStrategy, World
from artel.tokens import BalancedOrder, Order, Samples, Tokenizer
from artel.training.checkpoint.async_saver import Saver
from artel.training.checkpoint.format import Progress
from artel.training.checkpoint.items import CheckpointItems
from artel.training.memory.micro_batch import MemoryLimit, MicroBatchPlan
from artel.training.metrics.trackers import Trackers
from artel.training.run_folder import RunFolder
from artel.training.schedule import Length, rate


@dataclass(slots=True)
class Run:
    """Everything a running training consists of.

    A callback may read all of it, write to `trackers`, and `saver.wait()` for a checkpoint.
    """

    config: RunConfig
    folder: RunFolder
    folder_identity: str
    """Tells the run's folder from another one that is made in its place while the run is at work."""
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
    items: CheckpointItems
    saver: Saver
    trackers: Trackers
    progress: Progress
    tell: Callable[[str], None]
    flops_per_token: float | None
    """FLOPs of training on one token; None where the device's peak is unknown."""
    peak_flops: float | None
    """FLOP/s that one device reaches at most in the run's precision."""
    window: torch.Tensor
    """The objective's sums over the good steps since the last logged line, on the device."""
    norm: torch.Tensor
    """Gradient norm of the newest good step before clipping, on the device."""
    window_seconds: float = 0.0
    window_tokens: int = 0
    targets: float = 0.0
    """Target tokens in the newest global batch."""
    tokens: int = 0
    """Input tokens in the newest global batch, without padding."""
    stop_requested: bool = False
    """True on every rank when any rank was asked to stop."""
    newest_validation: int = -1
    """The step after which the newest validation ran."""
    started: float = field(default_factory=time.monotonic)
    first_rank_seconds: float = 0.0
    """Seconds since the start on the first rank's clock, so that all ranks see the same intervals end."""

    @property
    def step(self) -> int:
        """Steps done."""
        return self.progress.step

    @property
    def finished(self) -> bool:
        """True after the last step, and when validations stopped improving."""
        return self.step >= self.length.steps or self.progress.stopped_early

    @property
    def learning_rate(self) -> float:
        """The learning rate of the newest step."""
        return self.config.train.learning_rate * self.lr_multiplier(self.step - 1)

    def lr_multiplier(self, step: int) -> float:
        """The learning rate of a step, counted from 0, as a fraction of the peak."""
        return rate(self.config.train, step, self.length.steps, self.progress.warmup)

    @contextmanager
    def timed_step(self) -> Iterator[None]:
        """Count the seconds within the block as time spent in training steps."""
        started = time.monotonic()
        yield
        seconds = time.monotonic() - started
        self.progress.train_seconds += seconds
        self.window_seconds += seconds

    def count_step(self) -> None:
        self.progress.step += 1
        self.progress.tokens += self.tokens
        self.window_tokens += self.tokens

    def check_folder(self) -> None:
        """Raise WorkError when the run's folder is gone, before anything is written into another one in its place."""
        if self.folder_identity:  # empty on a host whose network disk did not show the folder yet: the others check
            self.folder.check_there(self.folder_identity)

    def progress_so_far(self) -> Progress:
        """The progress with the wall time of this start added."""
        return replace(self.progress, seconds=self.progress.seconds + time.monotonic() - self.started)


class IntervalClock:
    """Says when an interval of steps, epochs or time ends; one for each callback that works by intervals."""

    def __init__(self) -> None:
        self._last = 0.0

    def is_due(self, run: Run, interval: Interval) -> bool:
        """True when the interval ends with the newest step, on all ranks alike."""
        if interval.seconds is None:
            return run.length.is_due(interval, run.step)
        due = run.first_rank_seconds - self._last >= interval.seconds
        if due:
            self._last = run.first_rank_seconds
        return due
