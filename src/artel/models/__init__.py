"""Hugging Face models: building, loading, saving, attention, losses. Any architecture goes in and out unchanged.

Import everything else from its module: preparing text needs few of them, and importing PyTorch takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

IGNORED = -100
"""The target of positions without a loss, as in PyTorch and transformers."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice that artel makes for the user, with its reason. `artel doctor` and the log show it."""

    value: str
    why: str


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode inside the block, without gradients and without compiled layers.

    Inputs may have any length here, and compiled layers would be compiled again for each.
    """
    import torch

    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)
