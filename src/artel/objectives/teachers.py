"""A model that a loss learns from beside the data, and what it said of the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


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
