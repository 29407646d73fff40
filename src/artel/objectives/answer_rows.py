"""Rows of prompts with their answers, and the positions that predict each answer.

Answers to one prompt can share a row. The row begins with their common prefix, which is computed once: the prompt and
the first tokens that all answers have in common. The remaining tokens of each answer follow. Several prompts share a
row if they fit, which keeps padding low.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from artel.objectives.length_groups import as_tensors, round_up, stack_rows

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and its answer: ids (tokens,), and flags that are nonzero in the answer. Empty if there is no answer."""

    ids: np.ndarray
    flags: np.ndarray


def answer_tensors(
    samples: Sequence[Sequence[Answer]],
    *,
    share_prompts: bool,
    min_length: int = 1,
    entries: Sequence[int] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the tensors of samples with equally many answers each, in rows of at least `min_length` tokens.

    `entries`: for each answer of all samples, the number of consecutive entries in `samples` that belong to it; default
    1. An answer with several entries is one that the model wrote after several prompts.

    input_ids int64 (rows, length): one answer per row, or with `share_prompts` as many samples as fit. `targets` int64
    (count,): the tokens of the answers. `target_positions` int64 (count,): the positions in the flattened rows that
    predict them. `answer_targets` int64 (samples, answers, longest): the indices of each answer's targets, padded with
    `count`.

    With `share_prompts` also int64 (rows, length): `documents`, 1, 2, … for the samples of a row and 0 for padding;
    `branches`, 0 for the common prefix of a sample's answers and 1, 2, … for the remaining tokens of each answer;
    `positions` of tokens in their answer, from 0.
    """
    groups = list(samples) if share_prompts else [[answer] for sample in samples for answer in sample]
    segments = [_Segment.from_answers(group) for group in groups]
    lengths = [len(segment.ids) for segment in segments]
    row_length = round_up(max(min_length, *lengths))
    rows = _pack_segments(lengths, row_length) if share_prompts else [[index] for index in range(len(segments))]
    starts = _segment_starts(rows, lengths, row_length)
    answers = [
        (starts[index] + positions, targets)
        for index, segment in enumerate(segments)
        for positions, targets in segment.predictions
    ]
    arrays = {
        "input_ids": _join_rows(rows, [segment.ids for segment in segments], row_length),
        "target_positions": np.concatenate([positions for positions, _ in answers]),
        "targets": np.concatenate([targets for _, targets in answers]),
    }
    entry_ends = np.cumsum([len(targets) for _, targets in answers])
    ends = entry_ends if entries is None else entry_ends[np.cumsum(entries) - 1]
    answer_targets = [np.arange(start, end) for start, end in pairwise([0, *ends])]
    longest = max(1, *map(len, answer_targets))
    padded_targets = stack_rows(answer_targets, longest, int(ends[-1]))
    arrays["answer_targets"] = padded_targets.reshape(len(samples), -1, longest)
    if share_prompts:
        numbers_in_row = {index: number_in_row for row in rows for number_in_row, index in enumerate(row, start=1)}
        documents = [np.full(length, numbers_in_row[index], dtype=np.int64) for index, length in enumerate(lengths)]
        arrays["documents"] = _join_rows(rows, documents, row_length)
        arrays["branches"] = _join_rows(rows, [segment.branches for segment in segments], row_length)
        arrays["positions"] = _join_rows(rows, [segment.positions for segment in segments], row_length)
    return as_tensors(arrays)


def _pack_segments(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Return the indices of the segments in each row of `row_length` tokens: first fit, the longest first."""
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        row = next((row for row, space in enumerate(free) if space >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(row_length)
        rows[row].append(index)
        free[row] -= lengths[index]
    return rows


def _segment_starts(rows: Sequence[Sequence[int]], lengths: Sequence[int], row_length: int) -> dict[int, int]:
    """Return the offset of each segment in the flattened rows."""
    starts = {}
    for row_index, row in enumerate(rows):
        offset = row_index * row_length
        for index in row:
            starts[index] = offset
            offset += lengths[index]
    return starts


def _join_rows(rows: Sequence[Sequence[int]], arrays: Sequence[np.ndarray], row_length: int) -> np.ndarray:
    """Return the concatenated arrays of each row, zero-padded, int64 (rows, row_length)."""
    return stack_rows([np.concatenate([arrays[index] for index in row]) for row in rows], row_length, 0)


class AnswerSums(NamedTuple):
    """Sums over the tokens of each answer, (samples, answers) each."""

    log_probs: torch.Tensor
    counts: torch.Tensor
    """Number of tokens."""
    entropies: torch.Tensor

    @classmethod
    def from_log_probs(
        cls, log_probs: torch.Tensor, entropies: torch.Tensor, answer_targets: torch.Tensor
    ) -> AnswerSums:
        """Sum numbers per token, (count,), by the `answer_targets` of `answer_tensors`."""
        import torch.nn.functional as F

        sums = [F.pad(values, (0, 1))[answer_targets].sum(dim=-1) for values in (log_probs, entropies)]
        return cls(sums[0], (answer_targets < len(log_probs)).sum(dim=-1), sums[1])


@dataclass(frozen=True, slots=True)
class _Segment:
    """A prompt with one or several answers, laid out as part of a row."""

    ids: np.ndarray
    branches: np.ndarray
    positions: np.ndarray
    predictions: list[tuple[np.ndarray, np.ndarray]]
    """(positions in the segment that predict an answer's tokens, the tokens) of each answer."""

    @classmethod
    def from_answers(cls, answers: Sequence[Answer]) -> _Segment:
        """Lay out the common prefix, then the rest of each answer. The last token of an answer is only a target."""
        present = [answer for answer in answers if len(answer.ids)]
        common = _common_length([answer.ids[:-1] for answer in present])
        ids = [present[0].ids[:common]] if present else [np.empty(0, dtype=np.int64)]
        branches, positions, predictions = [np.zeros(common, dtype=np.int64)], [np.arange(common)], []
        for branch, answer in enumerate(answers, start=1):
            inputs, start = answer.ids[:-1], sum(map(len, ids))
            in_segment = np.arange(len(inputs))
            in_segment[common:] += start - common
            is_target = answer.flags[1:] > 0
            predictions.append((in_segment[is_target], answer.ids[1:][is_target].astype(np.int64)))
            ids.append(inputs[common:])
            branches.append(np.full(len(inputs[common:]), branch))
            positions.append(np.arange(common, max(common, len(inputs))))
        return cls(np.concatenate(ids), np.concatenate(branches), np.concatenate(positions), predictions)


def _common_length(sequences: Sequence[np.ndarray]) -> int:
    """Return the length of the common prefix of all sequences."""
    if not sequences:
        return 0
    shortest = min(map(len, sequences))
    differences = [np.flatnonzero(sequences[0][:shortest] != sequence[:shortest]) for sequence in sequences[1:]]
    return min([shortest, *(int(indices[0]) for indices in differences if len(indices))])
