"""How many sizes the micro-batches of a run have, where rows are as long as their samples: by the first of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from artel.config import RunConfig
from artel.objectives import Batch
from artel.planning.plan.batches import PlannedData
from artel.planning.plan.first_steps import rows_of_steps
from artel.tokens import Rows, evaluation_rows
from artel.training.schedule import run_length

_LOOKED_AT = 64  # micro-batches, of those that are trained and of those that are only read


@dataclass(frozen=True, slots=True)
class MicroBatchSizes:
    """Of one rank's micro-batches."""

    row: int = 0
    """Positions of the longest row."""
    trained: int = 1
    """Sizes of those that are trained."""
    only_read: int = 0
    """Sizes that are read in a forward pass alone: before the training, or in validations."""
    samples: int = 1
    """Lengths of the samples in them, each taken to have its own; 1 where all rows are blocks."""


def micro_batch_sizes(run: RunConfig, data: PlannedData, rows: int, dp_degree: int) -> MicroBatchSizes:
    """Of the first data-parallel rank's micro-batches of `rows` rows, in the order of training (law 1).

    Without a token store their order is not known: one size is counted.
    """
    row = data.batch(1).tensors["input_ids"].shape[-1]
    objective, store, samples = data.objective, data.store, data.samples
    if store is None or objective.packs_text or objective.fills_blocks(run):
        return MicroBatchSizes(row)
    length = run_length(run, samples, store.train)

    def trained() -> Iterator[Rows]:
        for ranks in rows_of_steps(run, data, rows, _LOOKED_AT, range(1), dp_degree):
            yield from ranks[0]

    def read() -> Iterator[Rows]:
        for part in [store.train] * objective.needs_reference + [store.validation]:
            dataset = objective.dataset(part)
            for start in range(0, len(dataset), rows * dp_degree):
                indices = np.arange(start, min(start + rows * dp_degree, len(dataset)), dp_degree)
                yield evaluation_rows(dataset, indices, rows)

    sizes, only_read = (
        {size for each in islice(batches, _LOOKED_AT) for size in _product_sizes(objective.batch(each))}
        for batches in (trained(), read())
    )
    total = _LOOKED_AT * length.batch if length.total is None else length.total
    return MicroBatchSizes(row, len(sizes), len(only_read - sizes), -(-total // dp_degree))


def _product_sizes(batch: Batch) -> set[int]:
    """What products are computed of at a time: all tokens and padding, or those of each group of rows."""
    return {group.positions for group in batch.groups} or {batch.tensors["input_ids"].numel()}
