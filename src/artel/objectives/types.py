"""What an objective hands to the other packages: batches, samples, token views, prompts, replies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.objectives.length_groups import LengthGroup
from artel.tokens import Sample

if TYPE_CHECKING:
    import torch

    from artel.tokens.tokenizer.chat_template import TurnEnd


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


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model reads in training, token for token, and what it learns from it."""

    ids: np.ndarray
    """int64 (tokens,)."""
    targets: np.ndarray
    """int64 (tokens,): the id to predict at each position; IGNORED if nothing is learned there."""
    name: str = ""
    """Which reading of the sample it is, if there are several: chosen, rejected."""
    labels: list[str] | None = None
    """What is learned at each position, where that is no token: the label of the name that a word belongs to, or ""."""
    goal: str = ""
    """What is learned of all of it, where no token is predicted: the label good."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a model continues at a prompt, token by token."""

    ids: list[int]
    end: TurnEnd
    """What ends the text."""
    special_tokens: bool = False
    """Whether they are written out."""


@dataclass(frozen=True, slots=True)
class Writing:
    """What a model is to write for a split, taking the likeliest tokens, and how that is judged."""

    what: str
    """For people: calls in 37 turns."""
    beginnings: list[Beginning]
    new_tokens: int
    """Written for each at most."""
    judge: Callable[[list[str]], tuple[dict[str, float], dict[str, Any]]]
    """Figures, and details as `Objective.details` has them, of the texts that were written, one a beginning."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model makes of a prompt."""

    pieces: Iterable[str]
    """The text, as it is written."""
    notes: tuple[str, ...] = ()
    """Lines for people, after the text."""
    to_json: dict[str, Any] | None = None
    """What --json prints; the prompt and the text where this is None."""
