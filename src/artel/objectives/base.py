"""The three answers of an objective: record to samples, batch to loss, and which figures judge the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from artel.text import Record
from artel.tokens import Rows, Tokenizer


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch as a model takes it: named tensors, and how many targets a loss is taken on."""

    tensors: dict[str, torch.Tensor]
    targets: int

    def to(self, device: torch.device) -> Batch:
        return Batch(
            {name: tensor.to(device, non_blocking=True) for name, tensor in self.tensors.items()}, self.targets
        )


class Objective(Protocol):
    """One small file each; the loop, the store and the layouts know nothing of it."""

    auto_class: str
    """The transformers class whose head fits (`AutoModelForCausalLM`)."""
    lookahead: int
    """Tokens after a block that the objective needs to see (1: the next token of its last position)."""
    sums: tuple[str, ...]
    """Names of what `loss` returns, in order; the first two are always `loss` and `targets`."""

    def samples(self, records: list[Record], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
        """For each record its ids as the store keeps them, int64 (tokens,)."""
        ...

    def batch(self, rows: Rows) -> Batch:
        """Tensors of a micro-batch, on the CPU."""
        ...

    def loss(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """float32 (len(sums),): sums over the batch's targets. The first, the loss in nats, carries the gradient."""
        ...

    def figures(self, totals: dict[str, float], tokens_per_byte: float) -> dict[str, float]:
        """What the totals of a validation part say, by name; `loss` is the mean over targets."""
        ...
