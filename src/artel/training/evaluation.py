"""Evaluates a model on a split of a store: while it is trained, and afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from artel.config import RunConfig
from artel.objectives import Batch, Objective
from artel.parallel import ParallelStrategy, World
from artel.tokens import PackedSamples, StoreSplit, evaluation_rows
from artel.training.heartbeat import heartbeat

# What a micro-batch holds when the run file says auto: 4,096 tokens keep two CPU cores busy and stay in their caches'
# reach; 32,768 fill a GPU's matrix units and need a few GiB for the logits of a 50k vocabulary.
_AUTO_TOKENS = {"cpu": 4096, "cuda": 32768}


_SECONDS_BETWEEN_NEWS = 10.0


class News:
    """How far a long piece of work is, in a line every ten seconds: `evaluating 40%`."""

    def __init__(self, tell: Callable[[str], None], what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._what, self._clock = tell, what, clock
        self._last = clock()

    def __call__(self, share: float) -> None:
        now = self._clock()
        if now - self._last >= _SECONDS_BETWEEN_NEWS:
            self._last = now
            self._tell(f"{self._what} {share:.0%}")


def micro_batch_size(config: RunConfig, world: World) -> int:
    """Rows of a micro-batch of this run on this device."""
    if config.train.micro_batch != "auto":
        return config.train.micro_batch
    return max(1, _AUTO_TOKENS.get(world.device.type, 4096) // config.data.block)


class Validation:
    """A split of a store as an objective sees it, and its metrics for a model."""

    def __init__(self, objective: Objective, part: StoreSplit) -> None:
        self.part = part
        self.samples = objective.dataset(part)
        self._objective = objective

    def stored_samples(self, read: int) -> int:
        """How many samples of the split are in the first `read` that the objective reads."""
        return self.samples.samples_in(read) if isinstance(self.samples, PackedSamples) else read

    def count(self, most: int | None) -> int:
        """How many samples are evaluated where at most so many shall be, and as many as figures need."""
        least = self._objective.min_evaluated(self.part)
        return min(len(self.samples), max(least, most or len(self.samples)))

    def evaluate(
        self,
        strategy: ParallelStrategy,
        micro_batch: int,
        most: int | None = None,
        progress: Callable[[float], None] = lambda _: None,
    ) -> tuple[dict[str, float], np.ndarray]:
        """(metrics, outputs of each sample that has any) over the first `most` samples; the ranks share them.

        `progress` is called with the fraction that is done, from 0 to 1, before each batch.
        """
        count = self.count(most)
        totals, outputs = strategy.evaluate(self._batches(strategy, micro_batch, count, progress), count)
        return self._objective.metrics(totals, outputs, self.part), outputs

    def _batches(
        self, strategy: ParallelStrategy, micro_batch: int, count: int, progress: Callable[[float], None]
    ) -> Iterator[tuple[Batch, np.ndarray]]:
        ranks = strategy.dp_degree
        mine = np.arange(strategy.dp_rank, count, ranks)
        for start in range(0, -(-count // ranks), micro_batch):  # all alike: some may have only padding in the last
            indices = mine[start : start + micro_batch]
            heartbeat("a validation batch")
            progress(start * ranks / count)
            yield self._objective.batch(evaluation_rows(self.samples, indices, micro_batch)), indices
