"""A step's samples, and one process's share of them cut into micro-batches: both pure functions of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Samples(Protocol):
    """What batches are made of: joined blocks of a store, or samples that stand alone."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> np.ndarray:
        """Token ids, int64 (length,)."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """One micro-batch before an objective has seen it: ids int64 (rows, length), valid bool (rows,).

    Invalid rows are filler that makes all micro-batches of a step alike in shape; no loss is taken on them.
    """

    ids: np.ndarray
    valid: np.ndarray


def step_numbers(step: int, batch: int, total: int) -> np.ndarray:
    """Running sample numbers of a step, counted from 0; the last step of a run of `total` samples may be shorter."""
    return np.arange(step * batch, min((step + 1) * batch, total), dtype=np.int64)


def micro_batches(samples: Samples, indices: np.ndarray, *, rank: int, world: int, batch: int, size: int) -> list[Rows]:
    """This rank's share of a global batch, as equal micro-batches of at most `size` rows.

    Every rank gets ceil(batch / world) places of the *full* batch, also where the last step of a run is shorter, so
    that all ranks run equally many micro-batches of equal shape in every step of the run.
    """
    share = -(-batch // world)
    count = -(-share // size)
    size = -(-share // count)  # 10 rows by at most 4 are 4 + 4 + 2: three of 4 with two fillers, not four
    mine = indices[rank * share : (rank + 1) * share]
    result = []
    for number in range(count):
        part = mine[number * size : (number + 1) * size]
        result.append(_rows(samples, part, size))
    return result


def _rows(samples: Samples, indices: np.ndarray, size: int) -> Rows:
    read = [samples.read(int(index)) for index in indices]
    filler = read[0] if read else samples.read(0)
    ids = np.stack(read + [filler] * (size - len(read)))
    return Rows(ids, np.arange(size) < len(read))
