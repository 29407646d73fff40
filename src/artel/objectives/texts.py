"""What causal and masked language models share: several texts to a block, joined or packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from artel.config import RunConfig
from artel.errors import Problem
from artel.objectives.base import Objective
from artel.objectives.batch import DocumentSamples
from artel.text import Document
from artel.tokens import Sample, StoreSplit, TokenBlocks, Tokenizer
from artel.tokens.sampling.packing import PackedBlocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
