"""From rows of token ids to the tensors of a batch, on the CPU, for objectives that predict single tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from artel.models.targets import IGNORED
from artel.objectives.batch import Batch
from artel.objectives.replies import Reading
from artel.objectives.texts import Texts
from artel.tokens import Rows
from artel.tokens.sampling.blocks import document_numbers, may_be_predicted

if TYPE_CHECKING:
    import torch

# Where fewer positions than this share have a target, the others are left out before the head.
_FEW = 0.9


class NextTokenTexts(Texts):
    """Blocks of texts in which each token's target is the one after it.

    Documents that do not see one another change nothing in what is predicted: the first token of a document is
    predicted from the end token before it in either case, so that a model knows how texts begin. Padding is not
    predicted, nor is the token with which a document continues behind another document: the block before has it.
    """

    def batch(self, rows: Rows) -> Batch:
        import torch

        targets = _next_tokens(rows)
        tensors = {"input_ids": torch.from_numpy(np.ascontiguousarray(rows.ids[:, :-1]))}
        tokens = int(rows.valid.sum()) * targets.shape[1]
        if rows.flags is not None:
            numbers = document_numbers(rows.flags[:, :-1])
            tokens = int(np.count_nonzero(numbers[rows.valid]))
            if not numbers.all():
                tensors["real"] = torch.from_numpy(numbers > 0)
            if self.apart:
                tensors |= document_tensors(numbers)
        tensors |= target_tensors(targets)
        return Batch(tensors, targets=int((targets != IGNORED).sum()), tokens=tokens)

    def readings(self, rows: Rows) -> list[Reading]:
        reading = predicted(rows.ids[0], _next_tokens(rows)[0])
        kept = slice(None) if rows.flags is None else document_numbers(rows.flags[0]) > 0
        return [Reading(reading.ids[kept], reading.targets[kept])]


def _next_tokens(rows: Rows) -> np.ndarray:
    """The targets, int64 (rows, length): the token after each one, or IGNORED."""
    targets = rows.ids[:, 1:].copy()
    targets[~rows.valid] = IGNORED
    if rows.flags is not None:
        targets[~may_be_predicted(rows.flags[:, 1:])] = IGNORED
    return targets


def target_tensors(targets: np.ndarray) -> dict[str, torch.Tensor]:
    """`targets` int64 (rows, length), and where few positions have one, `places`: which, int64 (targets,).

    The places are counted here, on the host: to find them on a GPU the host would have to wait for it.
    """
    import torch

    places = np.flatnonzero(targets != IGNORED)
    tensors = {"targets": torch.from_numpy(targets)}
    if len(places) < _FEW * targets.size:
        tensors["places"] = torch.from_numpy(places)
    return tensors


def document_tensors(numbers: np.ndarray) -> dict[str, torch.Tensor]:
    """`documents` (the numbers, int64 (rows, length)) and `positions`: of each token in its document, from 0."""
    import torch

    columns = np.arange(numbers.shape[1])
    begins = np.zeros_like(numbers)
    begins[:, 1:] = np.where(numbers[:, 1:] != numbers[:, :-1], columns[1:], 0)
    positions = columns - np.maximum.accumulate(begins, axis=1)
    return {"documents": torch.from_numpy(numbers), "positions": torch.from_numpy(positions)}


def predicted(ids: np.ndarray, targets: np.ndarray, name: str = "") -> Reading:
    """Of a sequence each token of which is predicted from those before it: `targets` (tokens - 1,) or more."""
    return Reading(ids, np.append(IGNORED, targets)[: len(ids)], name)
