"""Rows of prompts and their answers, and where in them each answer is predicted.

Answers to one prompt can share a row: the tokens with which all of them begin, which are the prompt and what the
answers have in common, and then the rest of each. Those are read once for all. Several such prompts share a row too
where they fit, so that a batch has little padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

_ROUND = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and its answer as the model reads them: ids (tokens,), and flags that are not 0 in the answer.

    Without tokens it is an answer that is missing.
    """

    ids: np.ndarray
    flags: np.ndarray


def answer_tensors(
    samples: Sequence[Sequence[Answer]], *, shared: bool, least_length: int = 1
) -> dict[str, torch.Tensor]:
    """Tensors for the answers of each sample, of which each has equally many, in rows of `least_length` or more.

    input_ids int64 (rows, length): a row for each answer, or, `shared`, for as many samples as fit. `targets` int64
    (count,) are the answers' tokens and `places` int64 (count,) the positions in the flattened rows that predict them.
    `members` int64 (samples, answers, longest) says which of the targets are an answer's; `count` where it is shorter.

    With `shared` also int64 (rows, length): `documents`, 1, 2, … for the samples of a row and 0 for padding;
    `branches`, 0 for what a sample's answers share and 1, 2, … for the rest of each; `positions` of tokens in their
    answer, from 0.
    """
    import torch

    groups = list(samples) if shared else [[answer] for sample in samples for answer in sample]
    pieces = [_Row.of(group) for group in groups]
    sizes = [len(piece.ids) for piece in pieces]
    length = -(-max(least_length, *sizes) // _ROUND) * _ROUND
    rows = _packed(sizes, length) if shared else [[index] for index in range(len(pieces))]
    starts = _starts(rows, sizes, length)
    answers = [
        (starts[index] + places, targets) for index, piece in enumerate(pieces) for places, targets in piece.predicted
    ]
    tensors = {
        "input_ids": _joined(rows, [piece.ids for piece in pieces], length),
        "places": torch.from_numpy(np.concatenate([places for places, _ in answers])),
        "targets": torch.from_numpy(np.concatenate([targets for _, targets in answers])),
    }
    ends = np.cumsum([len(targets) for _, targets in answers])
    members = [np.arange(end - len(targets), end) for end, (_, targets) in zip(ends, answers, strict=True)]
    longest = max(1, *(len(each) for each in members))
    tensors["members"] = _stacked(members, longest, int(ends[-1])).view(len(samples), -1, longest)
    if shared:
        numbers = {index: number for row in rows for number, index in enumerate(row, start=1)}
        documents = [np.full(size, numbers[index], dtype=np.int64) for index, size in enumerate(sizes)]
        tensors["documents"] = _joined(rows, documents, length)
        tensors["branches"] = _joined(rows, [piece.branches for piece in pieces], length)
        tensors["positions"] = _joined(rows, [piece.positions for piece in pieces], length)
    return tensors


def _packed(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Which pieces share a row of `length`: the longest first, each into the first row where it fits."""
    rows: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        row = next((row for row, room in enumerate(rooms) if room >= sizes[index]), len(rows))
        if row == len(rows):
            rows.append([])
            rooms.append(length)
        rows[row].append(index)
        rooms[row] -= sizes[index]
    return rows


def _starts(rows: Sequence[Sequence[int]], sizes: Sequence[int], length: int) -> dict[int, int]:
    """Where each piece begins in the flattened rows."""
    starts = {}
    for number, row in enumerate(rows):
        at = number * length
        for index in row:
            starts[index] = at
            at += sizes[index]
    return starts


def _joined(rows: Sequence[Sequence[int]], arrays: Sequence[np.ndarray], length: int) -> torch.Tensor:
    """int64 (rows, length): the arrays of each row one behind another, then zeros."""
    return _stacked([np.concatenate([arrays[index] for index in row]) for row in rows], length, 0)


class AnswerSums(NamedTuple):
    """Sums over the tokens of each answer, (samples, answers) each."""

    log_probs: torch.Tensor
    counts: torch.Tensor
    """The number of its tokens."""
    entropies: torch.Tensor
    """0 where they were not asked for."""

    @classmethod
    def of(cls, log_probs: torch.Tensor, entropies: torch.Tensor | None, members: torch.Tensor) -> AnswerSums:
        """From the numbers of each token, (count,), and `members`, as `answer_tensors` gives them."""
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
    """Of each answer the positions in the row that predict its tokens, and these tokens."""

    @classmethod
    def of(cls, answers: Sequence[Answer]) -> _Row:
        """What the answers have in common, then the rest of each. The last token of an answer is only predicted."""
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
    """The number of tokens with which all sequences begin."""
    if not sequences:
        return 0
    shortest = min(map(len, sequences))
    differs = [np.flatnonzero(sequences[0][:shortest] != each[:shortest]) for each in sequences[1:]]
    return min([shortest, *(int(places[0]) for places in differs if len(places))])


def _stacked(arrays: Sequence[np.ndarray], length: int, filler: int) -> torch.Tensor:
    import torch

    stacked = np.full((len(arrays), length), filler, dtype=np.int64)
    for row, array in zip(stacked, arrays, strict=True):
        row[: len(array)] = array
    return torch.from_numpy(stacked)
