"""What causal and masked language models share: several texts to a block, joined or packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from artel.config import RunConfig
from artel.errors import Problem
from artel.objectives.base import Batch, DocumentSamples, Objective
from artel.text import Document
from artel.tokens import Sample, StoreSplit, TokenBlocks, Tokenizer
from artel.tokens.sampling.packing import PackedBlocks

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Texts(Objective):
    """Blocks of texts, an end token after each; documents see one another or not."""

    packs_text = True
    is_per_token = True
    causal: ClassVar[bool]
    """True if a token sees only the tokens before it."""

    def __init__(self, run: RunConfig, tokenizer: Tokenizer) -> None:
        super().__init__(run, tokenizer)
        self.apart = keeps_apart(run)

    @classmethod
    def problems(cls, run: RunConfig) -> list[Problem]:
        problems = super().problems(run)
        if keeps_apart(run):
            from artel.models.document_mask import document_problems

            problems += document_problems(run.model, cls.auto_class)
        return problems

    @classmethod
    def store_settings(cls, run: RunConfig) -> None:
        """Nothing: the store holds the tokens of the texts."""

    def check(self, model: PreTrainedModel) -> None:
        if self.apart:
            from artel.models.document_mask import check_documents

            check_documents(model, causal=self.causal)

    def samples(self, documents: list[Document]) -> Iterator[DocumentSamples]:
        """The text's tokens and the end token."""
        for ids in self.tokenizer.encode([document.record.text for document in documents]):
            yield DocumentSamples([Sample(np.append(ids, self.tokenizer.end_id))])

    def blocks(self, part: StoreSplit, length: int, lookahead: int) -> TokenBlocks:
        if self.run.data.packing == "best_fit":
            return PackedBlocks(part, length, lookahead)
        return TokenBlocks(part, length, lookahead, documents=self.apart)


def keeps_apart(run: RunConfig) -> bool:
    """True if tokens see only their own document."""
    mask = run.data.document_mask
    return run.data.packing == "best_fit" if mask is None else mask


def document_tensors(numbers: np.ndarray) -> dict[str, torch.Tensor]:
    """`documents` (the numbers, int64 (rows, length)) and `positions`: of each token in its document, from 0."""
    import torch

    columns = np.arange(numbers.shape[1])
    begins = np.zeros_like(numbers)
    begins[:, 1:] = np.where(numbers[:, 1:] != numbers[:, :-1], columns[1:], 0)
    positions = columns - np.maximum.accumulate(begins, axis=1)
    return {"documents": torch.from_numpy(numbers), "positions": torch.from_numpy(positions)}


def inputs_of(model: PreTrainedModel, batch: Batch, *, causal: bool) -> dict[str, Any]:
    """The model's arguments: the ids and, if the batch has documents, the mask that keeps them apart."""
    tensors = batch.tensors
    inputs = {"input_ids": tensors["input_ids"]}
    if "documents" in tensors:
        from artel.models.document_mask import document_inputs

        inputs |= document_inputs(model, tensors["documents"], tensors["positions"], causal=causal)
    return inputs
