"""A step's samples, and one process's share of them cut into micro-batches: both pure functions of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from artel.tokens.store.store import Sample

# Rows that stand alone are filled up to a multiple of this: few different shapes, and kernels like multiples of 8.
_ROUND = 16


class Samples(Protocol):
    """What batches are made of: joined blocks of a store, or samples that stand alone."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample: ...

    def origins(self, index: int) -> list[str]:
        """The `file:line` of each document that has tokens in it."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """One micro-batch before an objective has seen it.

    Invalid rows are filler that gives all micro-batches of a step equally many rows; no loss is taken on them.
    Positions from a row's length on are filler too: their ids and flags are 0.
    """

    ids: np.ndarray
    """int64 (rows, longest)."""
    lengths: np.ndarray
    """int64 (rows,): tokens of each row."""
    valid: np.ndarray
    """bool (rows,)."""
    indices: np.ndarray
    """int64 (rows,): which sample of its part each row is."""
    epochs: np.ndarray
    """int64 (rows,): the epoch it is drawn in; -1 where it is judged, not learned."""
    flags: np.ndarray | None
    """(rows, longest), where the store has them."""
    numbers: np.ndarray
    """int64 (rows, columns)."""


def step_numbers(step: int, batch: int, total: int) -> np.ndarray:
    """Running sample numbers of a step, counted from 0; the last step of a run of `total` samples may be shorter."""
    return np.arange(step * batch, min((step + 1) * batch, total), dtype=np.int64)


def micro_batches(
    samples: Samples, indices: np.ndarray, epochs: np.ndarray, *, rank: int, world: int, batch: int, size: int
) -> list[Rows]:
    """This rank's share of a global batch, as equal micro-batches of at most `size` rows.

    Every rank gets ceil(batch / world) places of the *full* batch, also where the last step of a run is shorter, so
    that all ranks run equally many micro-batches of equally many rows in every step of the run.
    """
    share = -(-batch // world)
    count = -(-share // size)
    size = -(-share // count)  # 10 rows by at most 4 are 4 + 4 + 2: three of 4 with two fillers, not four
    first = rank * share
    result = []
    for number in range(count):
        start, stop = first + number * size, first + min((number + 1) * size, share)
        result.append(_rows(samples, indices[start:stop], epochs[start:stop], size))
    return result


def rows_to_judge(samples: Samples, indices: np.ndarray, size: int) -> Rows:
    """At most `size` samples as one micro-batch of `size` rows, filled up: another shape would be compiled anew."""
    return _rows(samples, indices, np.full(len(indices), -1), size)


def one_row(sample: Sample) -> Rows:
    """A sample by itself as a micro-batch."""
    one = np.ones(1, dtype=np.int64)
    return Rows(
        ids=sample.ids[None].astype(np.int64),
        lengths=len(sample.ids) * one,
        valid=one > 0,
        indices=0 * one,
        epochs=-one,
        flags=None if sample.flags is None else sample.flags[None],
        numbers=np.array([sample.numbers], dtype=np.int64),
    )


def _rows(samples: Samples, indices: np.ndarray, epochs: np.ndarray, size: int) -> Rows:
    missing = size - len(indices)
    where = np.concatenate([indices, np.full(missing, indices[0] if len(indices) else 0)]).astype(np.int64)
    read = [samples.read(int(index)) for index in where[: max(1, len(indices))]]
    read += [read[0]] * (size - len(read))
    sizes = [len(sample.ids) for sample in read]
    longest = max(sizes)
    if min(sizes) != longest:
        longest = -(-longest // _ROUND) * _ROUND
    flags = None
    if read[0].flags is not None:
        flags = _stack([sample.flags for sample in read if sample.flags is not None], longest, read[0].flags.dtype)
    return Rows(
        ids=_stack([sample.ids for sample in read], longest, np.dtype(np.int64)),
        lengths=np.array(sizes, dtype=np.int64),
        valid=np.arange(size) < len(indices),
        indices=where,
        epochs=np.concatenate([epochs, np.zeros(missing)]).astype(np.int64),
        flags=flags,
        numbers=np.array([sample.numbers for sample in read], dtype=np.int64),
    )


def _stack(pieces: list[np.ndarray], longest: int, dtype: np.dtype) -> np.ndarray:
    stacked = np.empty((len(pieces), longest), dtype)
    for row, piece in zip(stacked, pieces, strict=True):
        if len(piece) == longest:
            row[:] = piece
        else:
            row[: len(piece)] = piece
            row[len(piece) :] = 0
    return stacked
