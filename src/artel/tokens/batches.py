"""The samples of a step and the micro-batches of each process, as pure functions of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from artel.integers import ceil_div
from artel.tokens.store import Sample

# Rows are padded to a multiple of this, for few different shapes and because kernels prefer multiples of 8.
_LENGTH_MULTIPLE = 16


class Samples(Protocol):
    """A dataset of samples for batches: blocks of a token store, or its samples."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample: ...

    def origins(self, index: int) -> list[str]:
        """Return the `file:line` of each document with tokens in the sample."""
        ...


@dataclass(frozen=True, slots=True)
class SampleList:
    """A dataset of samples in memory."""

    samples: Sequence[Sample]

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> Sample:
        return self.samples[index]

    def origins(self, index: int) -> list[str]:
        return []


@dataclass(frozen=True, slots=True)
class Rows:
    """One micro-batch, before the objective turns it into inputs and targets.

    All micro-batches of a step have equally many rows. Invalid rows are padding and have no loss. Positions after a
    row's length are padding too, with ids and flags of 0.
    """

    ids: np.ndarray
    """int64 (rows, longest)."""
    lengths: np.ndarray
    """int64 (rows,): the number of tokens in each row."""
    valid: np.ndarray
    """bool (rows,)."""
    indices: np.ndarray
    """int64 (rows,): the index of each row's sample in its split."""
    epochs: np.ndarray
    """int64 (rows,): the epoch of each row; -1 in validation."""
    flags: np.ndarray | None
    """(rows, longest), if the store has flags."""
    numbers: np.ndarray
    """int64 (rows, columns)."""


def step_positions(step: int, batch_size: int, total_samples: int | None) -> np.ndarray:
    """Return the positions of a step's samples in the order of the run, from 0.

    If the run has `total_samples` samples, its last step may have fewer samples.
    """
    end = (step + 1) * batch_size
    return np.arange(step * batch_size, end if total_samples is None else min(end, total_samples), dtype=np.int64)


def micro_batches(
    samples: Samples,
    indices: np.ndarray,
    epochs: np.ndarray,
    *,
    rank: int,
    world_size: int,
    batch_size: int,
    max_rows: int,
) -> list[Rows]:
    """Return this rank's shard of a global batch, as equal micro-batches of at most `max_rows` rows.

    Every rank gets ceil(batch_size / world_size) rows of the *full* batch, also in a last step with fewer samples. So
    all ranks run equally many micro-batches with equally many rows in every step.
    """
    local_batch = ceil_div(batch_size, world_size)
    # Equal micro-batches: 10 rows with at most 4 are 4 + 4 + 2 and two invalid rows.
    num_rows = ceil_div(local_batch, ceil_div(local_batch, max_rows))
    shard_start, shard_end = rank * local_batch, (rank + 1) * local_batch
    result = []
    for start in range(shard_start, shard_end, num_rows):
        end = min(start + num_rows, shard_end)
        result.append(_build_rows(samples, indices[start:end], epochs[start:end], num_rows))
    return result


def evaluation_rows(samples: Samples, indices: np.ndarray, num_rows: int) -> Rows:
    """Return the samples as a validation micro-batch, padded to `num_rows` rows: another shape would compile again."""
    return _build_rows(samples, indices, np.full(num_rows, -1), num_rows)


def training_rows(samples: Samples, indices: np.ndarray, num_rows: int) -> Rows:
    """Return the samples as a training micro-batch of the first epoch, padded to `num_rows` rows."""
    return _build_rows(samples, indices, np.zeros(num_rows), num_rows)


def single_row(sample: Sample) -> Rows:
    """Return a micro-batch of one sample."""
    ones = np.ones(1, dtype=np.int64)
    return Rows(
        ids=sample.ids[None].astype(np.int64),
        lengths=len(sample.ids) * ones,
        valid=ones > 0,
        indices=0 * ones,
        epochs=-ones,
        flags=None if sample.flags is None else sample.flags[None],
        numbers=np.array([sample.numbers], dtype=np.int64),
    )


def _build_rows(samples: Samples, indices: np.ndarray, epochs: np.ndarray, num_rows: int) -> Rows:
    num_padding = num_rows - len(indices)
    padded_indices = np.concatenate([indices, np.full(num_padding, indices[0] if len(indices) else 0)]).astype(np.int64)
    batch = [samples.read(int(index)) for index in padded_indices[: max(1, len(indices))]]
    batch += [batch[0]] * (num_rows - len(batch))
    lengths = [len(sample.ids) for sample in batch]
    longest = max(lengths)
    if min(lengths) != longest:
        longest = ceil_div(longest, _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    flags = None
    if batch[0].flags is not None:
        flags = _stack([sample.flags for sample in batch if sample.flags is not None], longest, batch[0].flags.dtype)
    return Rows(
        ids=_stack([sample.ids for sample in batch], longest, np.dtype(np.int64)),
        lengths=np.array(lengths, dtype=np.int64),
        valid=np.arange(num_rows) < len(indices),
        indices=padded_indices,
        epochs=np.pad(epochs, (0, num_rows - len(epochs))).astype(np.int64),
        flags=flags,
        numbers=np.array([sample.numbers for sample in batch], dtype=np.int64),
    )


def _stack(arrays: list[np.ndarray], longest: int, dtype: np.dtype) -> np.ndarray:
    stacked = np.empty((len(arrays), longest), dtype)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
        row[len(array) :] = 0
    return stacked
