"""Judging a model on a part of a store: while it is trained, and afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from artel.objectives import Batch, Objective
from artel.parallel import Layout, Processes
from artel.tokens import StorePart, rows_to_judge


class Validation:
    """A part of a store as an objective sees it, and its figures for a model."""

    def __init__(self, objective: Objective, part: StorePart) -> None:
        self.part = part
        self.samples = objective.view(part)
        self._objective = objective

    def judge(
        self, layout: Layout, processes: Processes, micro_batch: int, most: int | None = None
    ) -> tuple[dict[str, float], np.ndarray]:
        """(figures, outputs of each sample) over the first `most` samples; the ranks share them."""
        count = min(len(self.samples), most or len(self.samples))
        totals, outputs = layout.judge(self._batches(processes, micro_batch, count), count)
        return self._objective.figures(totals, outputs, self.part), outputs

    def _batches(self, processes: Processes, micro_batch: int, count: int) -> Iterator[tuple[Batch, np.ndarray]]:
        mine = np.arange(processes.rank, count, processes.world)
        for start in range(0, len(mine), micro_batch):
            indices = mine[start : start + micro_batch]
            yield self._objective.batch(rows_to_judge(self.samples, indices, micro_batch)), indices
