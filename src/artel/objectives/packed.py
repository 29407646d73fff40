"""Samples that share a block and see nothing of one another: what they need of a model, and the tensors of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.models.targets import IGNORED
from artel.objectives.batch import Batch
from artel.objectives.collate import document_tensors, predicted, target_tensors
from artel.objectives.replies import Reading
from artel.tokens import Rows
from artel.tokens.sampling.packing import own_flags, sample_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KEY, _FIX = "data.packing", "write data.packing: concatenate, which gives each sample a row of its own"


def packed_problems(run: RunConfig, auto_class: str) -> list[Problem]:
    """Why the samples of a block cannot be kept apart, as far as the model's configuration shows."""
    from artel.models.document_mask import document_problems

    return [Problem(_KEY, problem.what, _FIX) for problem in document_problems(run.model, auto_class)]


def check_packed(model: PreTrainedModel, *, causal: bool) -> None:
    """Raise InputError when a model does not keep the samples of a block apart: it is tried."""
    from artel.models.document_mask import check_documents

    try:
        check_documents(model, causal=causal)
    except InputError as error:
        raise InputError([Problem(_KEY, problem.what, _FIX) for problem in error.problems]) from None


def packed_batch(rows: Rows, length: int) -> Batch:
    """Blocks of `length` tokens as a causal model takes them: each flagged token is a target of the one before it.

    Of each sample the last token is a target alone, and the first is none: no target is another sample's.
    """
    import torch

    assert rows.flags is not None
    stored = sample_numbers(rows.flags)
    is_followed = (stored[:, :-1] > 0) & (stored[:, :-1] == stored[:, 1:])
    ids = np.zeros((len(rows.ids), length), dtype=np.int64)
    numbers, targets = np.zeros_like(ids), np.full_like(ids, IGNORED)
    learned = own_flags(rows.flags) > 0
    for row, followed in enumerate(is_followed):
        places = np.flatnonzero(followed)
        count = len(places)
        ids[row, :count] = rows.ids[row, places]
        numbers[row, :count] = stored[row, places]
        targets[row, :count] = np.where(learned[row, places + 1], rows.ids[row, places + 1], IGNORED)
    targets[~rows.valid] = IGNORED
    tensors = {
        "input_ids": torch.from_numpy(ids),
        "real": torch.from_numpy(numbers > 0),
        **document_tensors(numbers),
        **target_tensors(targets),
    }
    return Batch(tensors, int((targets != IGNORED).sum()), int(np.count_nonzero(numbers[rows.valid])))


def packed_readings(rows: Rows) -> list[Reading]:
    """What is read and learned of each sample in the first row."""
    assert rows.flags is not None
    numbers, learned = sample_numbers(rows.flags[0]), own_flags(rows.flags[0]) > 0
    readings = []
    for number in range(1, int(numbers.max()) + 1):
        ids = rows.ids[0, numbers == number]
        targets = np.where(learned[numbers == number], ids, IGNORED)
        readings.append(predicted(ids, targets[1:]))
    return readings
