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
    """For losses that are no sums over samples. Most objectives need none of this."""

    needs_global_statistics: bool = False
    """True if the loss depends on sums over the whole global batch."""

    def batch_statistics(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """float32 (any,): sums over a micro-batch, without gradient; only if `needs_global_statistics`."""
        raise NotImplementedError

    def set_global_statistics(self, totals: list[float]) -> None:  # if `needs_global_statistics`
        """The sums of `batch_statistics` over the global batch; called before its first `loss`."""

    needs_global_outputs: bool = False
    """True if the loss depends on what the model makes of all samples of the global batch: on vectors of texts, say.

    A strategy then computes `batch_outputs` of each micro-batch of all ranks, `global_loss` of them together, and the
    gradients of the weights from those of the outputs; `loss` is that of a micro-batch alone.
    """

    def batch_outputs(self, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
        """float32 (rows, size), with gradient: what `global_loss` is computed from."""
        raise NotImplementedError

    def output_keys(self, batch: Batch) -> torch.Tensor:
        """int64 (any, columns): what `global_loss` must know of the samples beside their outputs."""
        raise NotImplementedError

    def global_loss(self, outputs: torch.Tensor, keys: torch.Tensor, part: slice) -> torch.Tensor:
        """What `loss` returns, over the targets among the rows `part`, which are those of one micro-batch.

        `outputs` and `keys` are those of all micro-batches of the global batch, one after another.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Teacher:
    """A model that a loss learns from beside the data. It is not trained."""

    model: str
    """Its folder, or a hub id."""
    settings: dict[str, Any] | None
    """What its outputs depend on beside the store and its weights: they are computed before training and kept. None: it
    stays in memory beside the model that is trained."""
    bytes_per_target: int = 0
    """Of the outputs that are kept."""
    reads_text: bool = False
    """True if it reads the text of the samples by its own tokenizer, on which its outputs then depend, too."""


class KeptOutputs(Protocol):
    """A teacher's outputs for the samples of a split, as `outputs_to_keep` gave them."""

    @property
    def folder(self) -> Path: ...

    def read(self, sample: int) -> dict[str, np.ndarray]:
        """The arrays of a sample of the objective's dataset, (targets of the sample, …) each."""
        ...


TeacherCall = Callable[[Callable[["PreTrainedModel"], "torch.Tensor"]], "torch.Tensor"]
"""Calls a function with the teacher, whose weights are there as long as it runs; all ranks call it together."""


class TeacherHooks:
    """What an objective says of the models that its loss learns from, and is given of them. Most have none."""

    needs_reference: bool = False
    """True if the loss compares with the model before training. `evaluate_batch` then runs once over both splits,
    before the first step, and `set_reference` is given its outputs."""

    def set_reference(self, outputs: np.ndarray, *, validation: bool) -> None:  # if `needs_reference`
        """The outputs (samples, len(outputs)) of the model before training, on the training or validation split."""

    @property
    def teacher(self) -> Teacher | None:
        """The model that the loss learns from, if there is one."""
        return None

    def check_teacher(self, tokenizer: Tokenizer) -> None:  # if there is a `teacher`
        """Raise InputError if a teacher with this tokenizer cannot teach."""

    def alignment_note(self, aligned: float) -> str:
        """A sentence for the user on a teacher that reads the samples' text by its own tokenizer; empty for others.

        `aligned`, 0 to 1: the share of targets that the teacher answered. Raises InputError if it is too small.
        """
        return ""

    def set_teacher(self, call: TeacherCall, config: PreTrainedConfig) -> None:  # if it stays in memory
        """How to call the teacher from now on, and what model it is."""

    def outputs_to_keep(
        self, model: PreTrainedModel, batch: Batch
    ) -> tuple[torch.Tensor, np.ndarray, dict[str, np.ndarray]]:
        """What a teacher says of a batch, and is kept of that.

        (Its cross-entropy, targets that it answered and right guesses, float64 (3,); targets of each row, int64
        (rows,); arrays (targets, …), the rows' one after another.)
        """
        raise NotImplementedError

    def set_kept(self, kept: KeptOutputs, *, validation: bool) -> None:  # if the `teacher` has settings
        """The outputs that were kept for the training or validation split."""
