"""The first steps of a run whose rows are as long as their samples: which micro-batch is a usual one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from artel.config import RunConfig
from artel.objectives import Batch
from artel.planning.plan.batches import PlannedData
from artel.tokens import Rows, micro_batches, step_numbers

_SAMPLES = 256
"""That are looked at: of the first steps as many as have so many, at least one."""


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
    steps = max(1, _SAMPLES // run.train.batch)
    batches: list[Batch] = []
    slowest, tokens = [], []
    for ranks in rows_of_steps(run, data, rows, steps, range(dp_degree), dp_degree):
        step = [[data.objective.batch(each) for each in micro] for micro in ranks]
        slowest.append(max(sum(map(_positions, rank)) / len(rank) for rank in step))
        batches += [batch for rank in step for batch in rank]
        tokens.append(sum(batch.tokens for rank in step for batch in rank))
    mean = float(np.mean(slowest))
    return UsualStep(min(batches, key=lambda batch: abs(_positions(batch) - mean)), float(np.mean(tokens)))


def rows_of_steps(
    run: RunConfig, data: PlannedData, rows: int, steps: int, ranks: Sequence[int], dp_degree: int
) -> Iterator[list[list[Rows]]]:
    """Of each of the first steps, the micro-batches of these data-parallel ranks, in the order of training (law 1).

    Without a token store they are of the samples that were read of the sources, in an order of their own.
    """
    samples, batch = data.samples, run.train.batch
    for step in range(steps):
        numbers = step_numbers(step, batch, None)
        if data.store is not None:
            indices = data.objective.order(data.store.train, len(samples)).at(numbers)
        else:
            indices = np.random.default_rng(step).integers(len(samples), size=batch)
        epochs = numbers // len(samples)
        yield [
            micro_batches(samples, indices, epochs, rank=rank, world=dp_degree, batch=batch, size=rows)
            for rank in ranks
        ]


def _positions(batch: Batch) -> int:
    """Tokens and padding that are computed."""
    return sum(group.positions for group in batch.groups) or batch.tensors["input_ids"].numel()
