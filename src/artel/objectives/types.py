"""Types that objectives exchange with other packages: batches, samples, token views, prompts, replies."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.generation import GenerationPrompt
from artel.objectives.length_groups import LengthGroup
from artel.tokens import Sample

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Presentation:
    """Facts for `artel new`, model cards and the hub."""

    does: str
    """A clause that describes the models: continues a text."""
    verb: str = ""
    """The verb that `artel new` offers: write. Defaults to the objective's name."""
    pipeline_tag: str = ""
    """The hub's task for the models: text-generation. Empty if the hub has none."""
    finetuning_rate: float = 5e-5
    """Peak learning rate for finetuning all weights; adapters use four times as much."""
    is_offered: bool = True
    """False if `artel new` does not offer the objective, because it needs more than texts."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: named tensors, and the number of targets and of input tokens, without padding."""

    tensors: dict[str, torch.Tensor]
    targets: int
    tokens: int
    groups: tuple[LengthGroup, ...] = ()
    """Groups of rows of similar length that are computed separately; empty if all rows are computed at once."""

    @property
    def computed_positions(self) -> int:
        """Number of token positions that are computed, padding included."""
        inputs = (tensor.numel() for name, tensor in self.tensors.items() if name.endswith("input_ids"))
        return sum(group.positions for group in self.groups) or sum(inputs)

    def to(self, device: torch.device) -> Batch:
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return a copy with each tensor changed."""
        return replace(self, tensors={name: change(tensor) for name, tensor in self.tensors.items()})


@dataclass(frozen=True, slots=True)
class DocumentSamples:
    """The samples of a document, and the reference that its answers are evaluated against, stored with them."""

    samples: list[Sample]
    reference: dict[str, Any] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    """Counts for the ledger: {"truncated": 1}."""
    observed: dict[str, Any] = field(default_factory=dict)
    """Facts about the document for `Objective.review`, as plain values."""


@dataclass(frozen=True, slots=True)
class TokenView:
    """Tokens that a model reads in training, and the target of each."""

    ids: np.ndarray
    """int64 (tokens,)."""
    targets: np.ndarray
    """int64 (tokens,): the id to predict at each position, or IGNORED."""
    name: str = ""
    """Name of the view if a sample has several: chosen, rejected."""
    labels: list[str] | None = None
    """The label to learn at each position ("" for none), if labels are learned instead of tokens."""
    goal: str = ""
    """The target of the full text if no token is predicted, such as `the label good`."""


@dataclass(frozen=True, slots=True)
class GenerationEval:
    """Prompts that a model answers greedily in an evaluation, and the scoring of its answers."""

    description: str
    """A short description: calls in 37 turns."""
    prompts: list[GenerationPrompt]
    new_tokens: int
    """Maximum length of each answer."""
    score: Callable[[list[str]], tuple[dict[str, float], dict[str, Any]]]
    """Return metrics and details (see `Objective.details`) of the answers, one per prompt."""


@dataclass(frozen=True, slots=True)
class AnswerPrompt:
    """A prompt of a validation split whose answer is scored (`validate.rewards`)."""

    prompt: str | list[dict[str, str]]
    """The prompt as rewards get it: a text, or the messages of a conversation."""
    columns: dict[str, Any]
    """Columns for rewards: `answer`, the answer of the record."""
    ids: list[int] = field(default_factory=list)
    """The tokens that the model continues; empty if the objective's evaluation generates the answers."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply to a prompt."""

    pieces: Iterable[str]
    """The text, as it is generated."""
    notes: tuple[str, ...] = ()
    """Lines for people, after the text."""
    to_json: dict[str, Any] | None = None
    """Output of --json; None for the prompt and the text."""
