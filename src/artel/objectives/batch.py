"""What documents become: samples, and micro-batches of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from artel.objectives.length_groups import LengthGroup
from artel.tokens import Sample

if TYPE_CHECKING:  # objectives prepare text too, and this takes seconds to import
    import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: named tensors, the number of targets that the loss is summed over, and of input tokens.

    Padding is in neither count.
    """

    tensors: dict[str, torch.Tensor]
    targets: int
    tokens: int
    groups: tuple[LengthGroup, ...] = ()
    """Rows that are computed by themselves, without the padding of longer ones; empty where all are together."""

    def to(self, device: torch.device) -> Batch:
        return self.mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The same with each tensor changed."""
        return replace(self, tensors={name: change(tensor) for name, tensor in self.tensors.items()})


@dataclass(frozen=True, slots=True)
class DocumentSamples:
    """What a document becomes: samples, and what its answers are evaluated against, stored beside them."""

    samples: list[Sample]
    source: dict[str, Any] | None = None
    counted: dict[str, int] = field(default_factory=dict)
    """Counts for the ledger: {"truncated": 1}."""
    observed: dict[str, Any] = field(default_factory=dict)
    """What `Objective.review` is to know of the document, as plain values."""
