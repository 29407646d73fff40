"""A machine whose speed a test decides: its clock moves on when the model runs, and stands otherwise."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from artel.training.run import Run

Pace = Callable[[float], float]
"""Seconds since the start -> seconds that a forward pass then takes; backward pass and optimizer take none."""


class Machine:
    """`clock` for `train`, and a callback that lets the clock move with each forward pass after the first step.

    It notes at each step the share of the budget's time, and the learning rate.
    """

    def __init__(self, pace: Pace, starts_at: float = 0.0, stops_after: int | None = None) -> None:
        self._pace, self._start, self._now, self._stops_after = pace, starts_at, starts_at, stops_after
        self._runs = False
        self.shares: list[float] = []
        self.rates: list[float] = []

    def clock(self) -> float:
        return self._now

    @property
    def seconds(self) -> float:
        return self._now - self._start

    def __call__(self, run: Run) -> None:
        if not self._runs:
            run.strategy.model.get_input_embeddings().register_forward_hook(self._work)
            self._runs = True
        self.shares.append(run.progress.share)
        self.rates.append(run.learning_rate)
        if len(self.rates) == self._stops_after:
            signal.raise_signal(signal.SIGTERM)

    def _work(self, *_: Any) -> None:
        self._now += self._pace(self.seconds)
