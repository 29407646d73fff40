"""From rows of token ids to batches on the CPU, for objectives that predict single tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.models.targets import IGNORED
from artel.objectives.base import Objective
from artel.objectives.types import Batch, DocumentSamples, Reading
from artel.text import Document
from artel.tokens import Rows, Sample, StoreSplit, TokenBlocks, Tokenizer
from artel.tokens.sampling.blocks import document_numbers, may_be_predicted
from artel.tokens.sampling.packing import PackedBlocks, own_flags, sample_numbers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# Where fewer positions than this share have a target, the others are left out before the head.
_FEW = 0.9


class Texts(Objective):
    """Blocks of texts, an end token after each; documents see one another or not."""

    packs_text = True
    is_per_token = True
    causal: ClassVar[bool]
    """True if a token sees only the tokens before it."""

    def __init__(self, run: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(run, tokenizer)
        self.apart = self.keeps_apart(run)

    @classmethod
    def problems(cls, run: RunConfig) -> list[Problem]:
        problems = super().problems(run)
        if cls.keeps_apart(run):
            from artel.models.document_mask import document_problems

            problems += document_problems(run.model, cls.auto_class)
        return problems

    @classmethod
    def keeps_apart(cls, run: RunConfig) -> bool:
        mask = run.data.document_mask
        return run.data.packing == "best_fit" if mask is None else mask

    @classmethod
    def store_settings(cls, run: RunConfig) -> None:
        """Nothing: the store holds the tokens of the texts."""

    def check(self, model: PreTrainedModel) -> None:
        if self.apart:
            from artel.models.document_mask import check_documents

            check_documents(model, causal=self.causal)

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples]:
        """The text's tokens and the end token; for a causal model also the begin token, if the tokenizer adds one."""
        texts = [document.record.text for document in documents]
        if self.causal:
            yield from (DocumentSamples([Sample(ids)]) for ids in self.tokenizer.documents(texts))
        else:  # its begin token stands before each block
            for ids in self.tokenizer.encode(texts):
                yield DocumentSamples([Sample(np.append(ids, self.tokenizer.end_id))])

    def blocks(self, part: StoreSplit, length: int, lookahead: int) -> TokenBlocks:
        if self.run.data.packing == "best_fit":
            return PackedBlocks(part, length, lookahead)
        return TokenBlocks(part, length, lookahead, documents=self.apart)


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
