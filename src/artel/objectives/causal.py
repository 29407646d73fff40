"""Causal language modelling: each token predicted from those before it (Radford et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from transformers import PreTrainedModel

from artel.models import token_losses
from artel.models.loss import IGNORED
from artel.objectives.base import Batch
from artel.text import Record
from artel.tokens import Rows, Tokenizer


class Causal:
    auto_class = "AutoModelForCausalLM"
    lookahead = 1
    sums: tuple[str, ...] = ("loss", "targets", "right")

    def samples(self, records: list[Record], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
        """The text's tokens and the end token."""
        for ids in tokenizer.encode([record.text for record in records]):
            yield np.append(ids, tokenizer.end_id)

    def batch(self, rows: Rows) -> Batch:
        targets = rows.ids[:, 1:].copy()
        targets[~rows.valid] = IGNORED
        tensors = {
            "input_ids": torch.from_numpy(np.ascontiguousarray(rows.ids[:, :-1])),
            "targets": torch.from_numpy(targets),
        }
        return Batch(tensors, int(rows.valid.sum()) * targets.shape[1])

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        logits = model(input_ids=batch.tensors["input_ids"], use_cache=False).logits
        loss, right = token_losses(logits, batch.tensors["targets"])
        targets = torch.tensor(float(batch.targets), device=loss.device)
        return torch.stack([loss, targets, right.float()])

    def figures(self, totals: dict[str, float], tokens_per_byte: float) -> dict[str, float]:
        """Perplexity is per token; bits per byte divide by the bytes of the text and compare across tokenizers.

        Bits per byte = mean loss in nats x tokens per byte of the part / ln 2 (Gao et al. 2020, "The Pile", section
        3.1): end tokens count as tokens to be paid for and as no bytes.
        """
        loss = totals["loss"] / totals["targets"]
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),  # exp(710) overflows a double
            "accuracy": totals["right"] / totals["targets"],
            "bits_per_byte": loss * tokens_per_byte / math.log(2),
        }
