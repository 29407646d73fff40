"""The first steps of a run whose rows are as long as their samples: which micro-batch is a usual one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from artel.config import RunConfig
from artel.objectives import Batch
from artel.planning.plan.batches import PlannedData
from artel.tokens import Rows, micro_batches, step_numbers
from artel.training.schedule import run_length

_SAMPLES = 256
"""About as many are looked at: of the first steps, of a large batch a part of the micro-batches."""


@dataclass(frozen=True, slots=True)
class UsualStep:
    """What a step computes on average."""

    batch: Batch
    """A micro-batch of nearly as many positions as those of a step's slowest rank have on average."""
    tokens: float
    """Of all ranks in a step, without padding."""


def usual_step(run: RunConfig, data: PlannedData, rows: int, dp_degree: int) -> UsualStep | None:
    """Of `rows` rows on each of `dp_degree` data-parallel ranks; None where all rows are blocks.

    Every step takes as long as the rank with most to compute.
    """
    if data.objective.packs_text or data.objective.fills_blocks(run):
        return None
    ranks = range(min(dp_degree, max(1, _SAMPLES // rows)))
    of_each = max(1, _SAMPLES // (rows * len(ranks)))
    steps = max(1, _SAMPLES // run.train.batch)
    batches: list[Batch] = []
    slowest: list[float] = []
    count = 1
    for step in rows_of_steps(run, data, rows, steps, ranks, dp_degree):
        count = len(step[0])
        of_ranks = [[data.objective.batch(each) for each in rank[:of_each]] for rank in step]
        slowest.append(max(float(np.mean([batch.computed_positions for batch in rank])) for rank in of_ranks))
        batches += [batch for rank in of_ranks for batch in rank]
    usual = float(np.mean(slowest))
    tokens = float(np.mean([batch.tokens for batch in batches])) * count * dp_degree
    return UsualStep(min(batches, key=lambda batch: abs(batch.computed_positions - usual)), tokens)


def rows_of_steps(
    run: RunConfig, data: PlannedData, rows: int, steps: int, ranks: Sequence[int], dp_degree: int
) -> Iterator[list[list[Rows]]]:
    """Of each of the first steps, the micro-batches of these data-parallel ranks, in the order of training (law 1).

    Without a token store they are of the samples that were read of the sources, drawn at random.
    """
    samples, batch = data.samples, run.train.batch
    length = None if data.store is None else run_length(run, samples, data.store.train)
    order = None if data.store is None else data.objective.order(data.store.train, len(samples))
    total = None if length is None else length.total
    if length is not None and length.steps is not None:
        steps = min(steps, length.steps)
    for step in range(steps):
        numbers = step_numbers(step, batch, total)
        if order is None:
            indices, epochs = np.random.default_rng(step).integers(len(samples), size=batch), np.full(batch, -1)
        else:
            indices, epochs = order.at(numbers), numbers // len(samples)
        yield [
            micro_batches(samples, indices, epochs, rank=rank, world=dp_degree, batch=batch, size=rows)
            for rank in ranks
        ]
