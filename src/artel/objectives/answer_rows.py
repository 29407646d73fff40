"""Rows of prompts with their answers, and the positions that predict each answer.

Answers to one prompt can share a row: first their common beginning (the prompt, and what the answers have in common),
which is computed once, then the rest of each answer. Several prompts share a row if they fit, so that a batch has
little padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    samples: Sequence[Sequence[Answer]], *, shared: bool, least_length: int = 1
) -> dict[str, torch.Tensor]:
    """Return the tensors of samples with equally many answers each, in rows of at least `least_length` tokens.

    input_ids int64 (rows, length): one answer per row, or with `shared` as many samples as fit. `targets` int64
    (count,): the tokens of the answers. `places` int64 (count,): the positions in the flattened rows that predict them.
    `members` int64 (samples, answers, longest): the indices of each answer's targets, padded with `count`.

    With `shared` also int64 (rows, length): `documents`, 1, 2, … for the samples of a row and 0 for padding;
    `branches`, 0 for what the answers of a sample share and 1, 2, … for the rest of each; `positions` of tokens in
    their answer, from 0.
    """
    groups = list(samples) if shared else [[answer] for sample in samples for answer in sample]
    pieces = [_Row.from_answers(group) for group in groups]
    sizes = [len(piece.ids) for piece in pieces]
    length = round_up(max(least_length, *sizes))
    rows = _pack_answers(sizes, length) if shared else [[index] for index in range(len(pieces))]
    starts = _starts(rows, sizes, length)
    answers = [
        (starts[index] + places, targets) for index, piece in enumerate(pieces) for places, targets in piece.predicted
    ]
    arrays = {
        "input_ids": _join_rows(rows, [piece.ids for piece in pieces], length),
        "places": np.concatenate([places for places, _ in answers]),
        "targets": np.concatenate([targets for _, targets in answers]),
    }
    ends = np.cumsum([len(targets) for _, targets in answers])
    members = [np.arange(end - len(targets), end) for end, (_, targets) in zip(ends, answers, strict=True)]
    longest = max(1, *(len(each) for each in members))
    arrays["members"] = stack_rows(members, longest, int(ends[-1])).reshape(len(samples), -1, longest)
    if shared:
        numbers = {index: number for row in rows for number, index in enumerate(row, start=1)}
        documents = [np.full(size, numbers[index], dtype=np.int64) for index, size in enumerate(sizes)]
        arrays["documents"] = _join_rows(rows, documents, length)
        arrays["branches"] = _join_rows(rows, [piece.branches for piece in pieces], length)
        arrays["positions"] = _join_rows(rows, [piece.positions for piece in pieces], length)
    return as_tensors(arrays)


def _pack_answers(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return the indices of the pieces in each row of `length`: first fit, the longest first."""
    rows: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        row = next((row for row, left in enumerate(free) if left >= sizes[index]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(length)
        rows[row].append(index)
        free[row] -= sizes[index]
    return rows


def _starts(rows: Sequence[Sequence[int]], sizes: Sequence[int], length: int) -> dict[int, int]:
    """Return the offset of each piece in the flattened rows."""
    starts = {}
    for number, row in enumerate(rows):
        offset = number * length
        for index in row:
            starts[index] = offset
            offset += sizes[index]
    return starts


def _join_rows(rows: Sequence[Sequence[int]], arrays: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Return the concatenated arrays of each row, zero-padded, int64 (rows, length)."""
    return stack_rows([np.concatenate([arrays[index] for index in row]) for row in rows], length, 0)


class AnswerSums(NamedTuple):
    """Sums over the tokens of each answer, (samples, answers) each."""

    log_probs: torch.Tensor
    counts: torch.Tensor
    """Number of tokens."""
    entropies: torch.Tensor
    """0 if not computed."""

    @classmethod
    def from_log_probs(
        cls, log_probs: torch.Tensor, entropies: torch.Tensor | None, members: torch.Tensor
    ) -> AnswerSums:
        """Sum numbers per token, (count,), by the `members` of `answer_tensors`."""
        import torch.nn.functional as F

        padding = len(log_probs)
        sums = F.pad(log_probs, (0, 1))[members].sum(dim=-1)
        of_entropies = (
            sums.new_zeros(sums.shape) if entropies is None else F.pad(entropies, (0, 1))[members].sum(dim=-1)
        )
        return cls(sums, (members < padding).sum(dim=-1), of_entropies)


@dataclass(frozen=True, slots=True)
class _Row:
    ids: np.ndarray
    branches: np.ndarray
    positions: np.ndarray
    predicted: list[tuple[np.ndarray, np.ndarray]]
    """For each answer the positions in the row that predict its tokens, and the tokens."""

    @classmethod
    def from_answers(cls, answers: Sequence[Answer]) -> _Row:
        """Return the common beginning and the rest of each answer. The last token of an answer is only a target."""
        present = [answer for answer in answers if len(answer.ids)]
        common = _common([answer.ids[:-1] for answer in present])
        pieces = [present[0].ids[:common]] if present else [np.empty(0, dtype=np.int64)]
        branches, positions, predicted = [np.zeros(common, dtype=np.int64)], [np.arange(common)], []
        for branch, answer in enumerate(answers, start=1):
            inputs, start = answer.ids[:-1], sum(map(len, pieces))
            places = np.arange(len(inputs))
            places[common:] += start - common
            learned = answer.flags[1:] > 0
            predicted.append((places[learned], answer.ids[1:][learned].astype(np.int64)))
            pieces.append(inputs[common:])
            branches.append(np.full(len(inputs[common:]), branch))
            positions.append(np.arange(common, max(common, len(inputs))))
        return cls(np.concatenate(pieces), np.concatenate(branches), np.concatenate(positions), predicted)


def _common(sequences: Sequence[np.ndarray]) -> int:
    """Return the length of the common beginning of all sequences."""
    if not sequences:
        return 0
    shortest = min(map(len, sequences))
    differs = [np.flatnonzero(sequences[0][:shortest] != each[:shortest]) for each in sequences[1:]]
    return min([shortest, *(int(places[0]) for places in differs if len(places))])
