"""Optional hooks of an objective: losses over the whole global batch, and teacher or reference models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from artel.objectives.types import Batch
    from artel.tokens import Tokenizer


class GlobalBatchHooks:
    """Hooks for losses that are not sums over samples. Most objectives need none of them."""

    needs_global_statistics: bool = False
    """True if the loss depends on sums over the whole global batch."""

    def batch_statistics(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return sums over a micro-batch, float32 (any,), without gradient. Only if `needs_global_statistics`."""
        raise NotImplementedError

    def set_global_statistics(self, totals: list[float]) -> None:  # if `needs_global_statistics`
        """Take the sums of `batch_statistics` over the global batch. Called before its first `loss`."""

    needs_global_outputs: bool = False
    """True if the loss depends on the model's outputs for all samples of the global batch, such as text vectors.

    A strategy then computes `batch_outputs` of every micro-batch on all ranks, their `global_loss`, and from the
    gradients of the outputs those of the weights. `loss` is then the loss of a single micro-batch.
    """

    def batch_outputs(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """Return the inputs of `global_loss`, float32 (rows, size), with gradient."""
        raise NotImplementedError

    def output_keys(self, batch: Batch) -> torch.Tensor:
        """Return facts about the samples that `global_loss` needs beside the outputs, int64 (any, columns)."""
        raise NotImplementedError

    def global_loss(self, outputs: torch.Tensor, keys: torch.Tensor, part: slice) -> torch.Tensor:
        """Return the sums of `loss` over the targets among the rows `part`, which belong to one micro-batch.

        `outputs` and `keys` are those of all micro-batches of the global batch, concatenated.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model that the loss learns from beside the data."""

    model: str
    """Its folder, or a hub id."""
    settings: dict[str, Any] | None
    """Settings that its outputs depend on, beside store and weights. Outputs are computed before training and cached.
    None: the teacher stays in memory during training."""
    bytes_per_target: int = 0
    """Size of the cached outputs."""
    reads_text: bool = False
    """True if it reads the text of the samples with its own tokenizer, on which its outputs then depend."""


class CachedOutputs(Protocol):
    """A teacher's cached outputs for the samples of a split, as `outputs_to_cache` returned them."""

    @property
    def folder(self) -> Path: ...

    def read(self, sample: int) -> dict[str, np.ndarray]:
        """Return the arrays of a sample of the objective's dataset, (targets of the sample, …) each."""
        ...


TeacherCall = Callable[[Callable[["PreTrainedModel"], "torch.Tensor"]], "torch.Tensor"]
"""Call a function with the teacher, whose weights are present while it runs. Collective: all ranks must call it."""


class TeacherHooks:
    """Hooks for losses that use a teacher or a reference model. Most objectives need none of them."""

    needs_reference: bool = False
    """True if the loss compares with the model before training. `evaluate_batch` then runs once over both splits
    before the first step, and `set_reference` gets its outputs."""

    def set_reference(self, outputs: np.ndarray, *, validation: bool) -> None:  # if `needs_reference`
        """Take the outputs (samples, len(outputs)) of the model before training for one split."""

    @property
    def teacher(self) -> Teacher | None:
        """The model that the loss learns from; None if there is none."""
        return None

    def check_teacher(self, tokenizer: Tokenizer) -> None:  # if there is a `teacher`
        """Raise InputError if a teacher with this tokenizer cannot teach."""

    def alignment_note(self, aligned: float) -> str:
        """Return a sentence for the user about a teacher with its own tokenizer; empty for other teachers.

        `aligned`: fraction of targets that the teacher answered. Raises InputError if it is too small.
        """
        return ""

    def set_teacher(self, call: TeacherCall, model_config: PreTrainedConfig) -> None:  # if it stays in memory
        """Take the function that calls the teacher, and the teacher's configuration."""

    def outputs_to_cache(
        self, model: PreTrainedModel, batch: Batch
    ) -> tuple[torch.Tensor, np.ndarray, dict[str, np.ndarray]]:
        """Return a teacher's outputs for a batch, to be cached.

        (Its cross-entropy, the targets it answered and its right guesses, float64 (3,); targets per row, int64 (rows,);
        arrays (targets, …) of all rows, concatenated.)
        """
        raise NotImplementedError

    def set_cached_outputs(self, outputs: CachedOutputs, *, validation: bool) -> None:  # if the `teacher` has settings
        """Take the cached outputs of the training or validation split."""
