"""Causal language modelling: each token predicted from those before it (Radford et al. 2019).

What is predicted does not depend on whether documents see one another: the first token of a document is predicted from
the end token before it in either case, so that a model knows how texts begin. Filler is not predicted, nor is the token
that a document goes on with behind another document: the piece before it has predicted it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from artel.models.targets import IGNORED
from artel.objectives.base import Batch, Better, Reading
from artel.objectives.per_token import BALANCED_SUMS, balanced_token_sums, predicted, target_tensors, token_metrics
from artel.objectives.texts import Texts, document_tensors, inputs_of
from artel.tokens import Rows, StoreSplit, TokenBlocks
from artel.tokens.sampling.blocks import document_numbers, may_be_predicted

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from artel.models.generate import Sampling


class Causal(Texts):
    auto_class = "AutoModelForCausalLM"
    learns_from = ("text",)
    generates = True
    causal = True
    sums = BALANCED_SUMS
    better: ClassVar[dict[str, Better]] = {
        "loss": "lower",
        "perplexity": "lower",
        "accuracy": "higher",
        "bits_per_byte": "lower",
    }

    def dataset(self, part: StoreSplit) -> TokenBlocks:
        return self.blocks(part, self.run.data.block, lookahead=1)

    def batch(self, rows: Rows) -> Batch:
        import torch

        targets = rows.ids[:, 1:].copy()
        targets[~rows.valid] = IGNORED
        tensors = {"input_ids": torch.from_numpy(np.ascontiguousarray(rows.ids[:, :-1]))}
        tokens = int(rows.valid.sum()) * targets.shape[1]
        if rows.flags is not None:
            targets[~may_be_predicted(rows.flags[:, 1:])] = IGNORED
            numbers = document_numbers(rows.flags[:, :-1])
            tokens = int(np.count_nonzero(numbers[rows.valid]))
            if not numbers.all():
                tensors["real"] = torch.from_numpy(numbers > 0)
            if self.apart:
                tensors |= document_tensors(numbers)
        tensors |= target_tensors(targets)
        return Batch(tensors, targets=int((targets != IGNORED).sum()), tokens=tokens)

    def readings(self, rows: Rows) -> list[Reading]:
        reading = predicted(rows.ids[0], self.batch(rows).tensors["targets"][0].numpy())
        kept = slice(None) if rows.flags is None else document_numbers(rows.flags[0]) > 0
        return [Reading(reading.ids[kept], reading.targets[kept])]

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        return balanced_token_sums(model, inputs_of(model, batch, causal=True) | {"use_cache": False}, batch)

    def metrics(self, totals: dict[str, float], outputs: np.ndarray, part: StoreSplit) -> dict[str, float]:
        """Perplexity is per token; bits per byte divide by the bytes of the text and compare across tokenizers.

        Bits per byte = mean loss in nats x tokens per byte of the part / ln 2 (Gao et al. 2020, "The Pile", section
        3.1): end tokens count as tokens to be paid for and as no bytes. The few tokens that no block predicts (the
        first of the part; of packed blocks the first of each) are taken to cost what the others cost.
        """
        metrics = token_metrics(totals)
        return metrics | {"bits_per_byte": metrics["loss"] * part.tokens / part.bytes / math.log(2)}

    def show(self, model: PreTrainedModel, prompt: str, sampling: Sampling) -> Iterator[str]:
        from artel.models.generate import write
        from artel.models.loading.structure import position_limit

        return write(model, self.tokenizer, prompt, sampling, position_limit(model))
