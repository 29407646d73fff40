"""Causal language modelling: each token predicted from those before it (Radford et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from transformers import PreTrainedModel

from artel.models import IGNORED, Sampling, position_limit, write
from artel.objectives.base import Batch, Better, Made, Objective
from artel.objectives.per_token import SUMS, token_figures, token_sums
from artel.text import Document
from artel.tokens import Blocks, Rows, Sample, StorePart


class Causal(Objective):
    auto_class = "AutoModelForCausalLM"
    sums = SUMS
    better: ClassVar[dict[str, Better]] = {
        "loss": "lower", "perplexity": "lower", "accuracy": "higher", "bits_per_byte": "lower"
    }  # fmt: skip

    def samples(self, documents: list[Document]) -> Iterator[Made]:
        """The text's tokens and the end token."""
        for ids in self.tokenizer.encode([document.record.text for document in documents]):
            yield Made([Sample(np.append(ids, self.tokenizer.end_id))])

    def view(self, part: StorePart) -> Blocks:
        return Blocks(part, self.run.data.block, lookahead=1)

    def batch(self, rows: Rows) -> Batch:
        targets = rows.ids[:, 1:].copy()
        targets[~rows.valid] = IGNORED
        tensors = {
            "input_ids": torch.from_numpy(np.ascontiguousarray(rows.ids[:, :-1])),
            "targets": torch.from_numpy(targets),
        }
        count = int(rows.valid.sum()) * targets.shape[1]
        return Batch(tensors, targets=count, tokens=count)

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        return token_sums(model(input_ids=batch.tensors["input_ids"], use_cache=False).logits, batch)

    def figures(self, totals: dict[str, float], outputs: np.ndarray, part: StorePart) -> dict[str, float]:
        """Perplexity is per token; bits per byte divide by the bytes of the text and compare across tokenizers.

        Bits per byte = mean loss in nats x tokens per byte of the part / ln 2 (Gao et al. 2020, "The Pile", section
        3.1): end tokens count as tokens to be paid for and as no bytes.
        """
        figures = token_figures(totals)
        return figures | {"bits_per_byte": figures["loss"] * part.tokens / part.bytes / math.log(2)}

    def show(self, model: PreTrainedModel, prompt: str, sampling: Sampling) -> Iterator[str]:
        return write(model, self.tokenizer, prompt, sampling, position_limit(model))
