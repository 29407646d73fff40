"""From rows of token ids to batches on the CPU, for objectives that predict single tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.models import IGNORED
from artel.objectives.base import Objective
from artel.objectives.length_groups import as_tensors
from artel.objectives.types import Batch, DocumentSamples, TokenView
from artel.text import Document
from artel.tokens import Rows, Sample, StoreSplit, TokenBlocks, Tokenizer
from artel.tokens.packing import PackedBlocks, document_numbers, is_predictable, sample_flags, sample_numbers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

# If a smaller fraction of the positions has a target, the head is computed for those positions only.
_SPARSE_FRACTION = 0.9


class Texts(Objective):
    """Base of causal and masked language models: blocks of texts, each followed by an end token."""

    packs_text = True
    is_per_token = True
    causal: ClassVar[bool]
    """True if a token attends only to the tokens before it."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self.isolated_documents = self.uses_document_mask(config)

    @classmethod
    def problems(cls, config: RunConfig) -> list[Problem]:
        problems = super().problems(config)
        if cls.uses_document_mask(config):
            from artel.models.document_mask import document_problems

            problems += document_problems(config.model, cls.auto_class)
        return problems

    @classmethod
    def uses_document_mask(cls, config: RunConfig) -> bool:
        mask = config.data.document_mask
        return config.data.packing == "best_fit" if mask is None else mask

    @classmethod
    def store_settings(cls, config: RunConfig) -> None:
        """Return None: the store holds the tokens of the texts."""

    def check(self, model: PreTrainedModel) -> None:
        if self.isolated_documents:
            from artel.models.document_mask import check_documents

            check_documents(model, causal=self.causal)

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples]:
        """Yield the tokens of each text with an end token; for a causal model with the begin token, if there is one."""
        texts = [document.record.text for document in documents]
        if self.causal:
            yield from (DocumentSamples([Sample(ids)]) for ids in self.tokenizer.documents(texts))
        else:  # the begin token frames each block
            for ids in self.tokenizer.encode(texts):
                yield DocumentSamples([Sample(np.append(ids, self.tokenizer.end_id))])

    def blocks(self, split: StoreSplit, length: int, lookahead: int) -> TokenBlocks:
        if self.config.data.packing == "best_fit":
            return PackedBlocks(split, length, lookahead)
        return TokenBlocks(split, length, lookahead, documents=self.isolated_documents)


class NextTokenTexts(Texts):
    """Blocks of texts in which each token's target is the token after it.

    Isolated documents have the same targets: the first token of a document is predicted from the end token before it,
    so a model learns how texts begin. Padding is not predicted. If a document continues from an earlier block, its
    first token here is not predicted again.
    """

    def batch(self, rows: Rows) -> Batch:
        targets = _next_tokens(rows)
        tensors = as_tensors({"input_ids": rows.ids[:, :-1]})
        tokens = int(rows.valid.sum()) * targets.shape[1]
        if rows.flags is not None:
            numbers = document_numbers(rows.flags[:, :-1])
            tokens = int(np.count_nonzero(numbers[rows.valid]))
            if not numbers.all():
                tensors |= as_tensors({"real": numbers > 0})
            if self.isolated_documents:
                tensors |= document_tensors(numbers)
        tensors |= target_tensors(targets)
        return Batch(tensors, targets=int((targets != IGNORED).sum()), tokens=tokens)

    def token_views(self, rows: Rows) -> list[TokenView]:
        view = next_token_view(rows.ids[0], _next_tokens(rows)[0])
        real = slice(None) if rows.flags is None else document_numbers(rows.flags[0]) > 0
        return [TokenView(view.ids[real], view.targets[real])]


def _next_tokens(rows: Rows) -> np.ndarray:
    """Return the targets, int64 (rows, length): the token after each one, or IGNORED."""
    targets = rows.ids[:, 1:].copy()
    targets[~rows.valid] = IGNORED
    if rows.flags is not None:
        targets[~is_predictable(rows.flags[:, 1:])] = IGNORED
    return targets


def target_tensors(targets: np.ndarray) -> dict[str, torch.Tensor]:
    """Return `targets` int64 (rows, length), and if few positions have one, their `target_positions`, int64 (targets,).

    The host finds the positions: finding them on a GPU would make the host wait.
    """
    positions = np.flatnonzero(targets != IGNORED)
    is_sparse = len(positions) < _SPARSE_FRACTION * targets.size
    return as_tensors({"targets": targets, "target_positions": positions} if is_sparse else {"targets": targets})


def document_tensors(numbers: np.ndarray) -> dict[str, torch.Tensor]:
    """Return `documents`, int64 (rows, length), and `positions`: of each token in its document, from 0."""
    columns = np.arange(numbers.shape[1])
    starts = np.zeros_like(numbers)
    starts[:, 1:] = np.where(numbers[:, 1:] != numbers[:, :-1], columns[1:], 0)
    positions = columns - np.maximum.accumulate(starts, axis=1)
    return as_tensors({"documents": numbers, "positions": positions})


def next_token_view(ids: np.ndarray, targets: np.ndarray, name: str = "") -> TokenView:
    """Return the view of a sequence whose tokens are predicted from those before. `targets`: (tokens - 1,) or more."""
    return TokenView(ids, np.append(IGNORED, targets)[: len(ids)], name)


_KEY, _FIX = "data.packing", "set data.packing: concatenate, which puts each sample in its own row"


def packed_problems(config: RunConfig, auto_class: str) -> list[Problem]:
    """Return the problems of a model that cannot isolate the samples of a block, judged by its configuration."""
    from artel.models.document_mask import document_problems

    return [Problem(_KEY, problem.what, _FIX) for problem in document_problems(config.model, auto_class)]


def check_packed(model: PreTrainedModel, *, causal: bool) -> None:
    """Raise InputError if a model does not isolate the samples of a block. Runs the model."""
    from artel.models.document_mask import check_documents

    try:
        check_documents(model, causal=causal)
    except InputError as error:
        raise InputError([Problem(_KEY, problem.what, _FIX) for problem in error.problems]) from None


def packed_batch(rows: Rows, length: int) -> Batch:
    """Return blocks of `length` tokens for a causal model: each flagged token is the target of the token before it.

    The last token of a sample is only a target. The first is never one: no token predicts a token of another sample.
    """
    assert rows.flags is not None
    stored_numbers = sample_numbers(rows.flags)
    is_followed = (stored_numbers[:, :-1] > 0) & (stored_numbers[:, :-1] == stored_numbers[:, 1:])
    ids = np.zeros((len(rows.ids), length), dtype=np.int64)
    numbers, targets = np.zeros_like(ids), np.full_like(ids, IGNORED)
    is_target = sample_flags(rows.flags) > 0
    for row, row_is_followed in enumerate(is_followed):
        positions = np.flatnonzero(row_is_followed)
        count = len(positions)
        ids[row, :count] = rows.ids[row, positions]
        numbers[row, :count] = stored_numbers[row, positions]
        targets[row, :count] = np.where(is_target[row, positions + 1], rows.ids[row, positions + 1], IGNORED)
    targets[~rows.valid] = IGNORED
    tensors = as_tensors({"input_ids": ids, "real": numbers > 0})
    tensors |= document_tensors(numbers) | target_tensors(targets)
    return Batch(tensors, int((targets != IGNORED).sum()), int(np.count_nonzero(numbers[rows.valid])))


def packed_views(rows: Rows) -> list[TokenView]:
    """Return the inputs and targets of each sample in the first row."""
    assert rows.flags is not None
    numbers, is_target = sample_numbers(rows.flags[0]), sample_flags(rows.flags[0]) > 0
    token_views = []
    for sample_number in range(1, int(numbers.max()) + 1):
        ids = rows.ids[0, numbers == sample_number]
        targets = np.where(is_target[numbers == sample_number], ids, IGNORED)
        token_views.append(next_token_view(ids, targets[1:]))
    return token_views
