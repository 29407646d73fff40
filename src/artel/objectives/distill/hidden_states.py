"""Matching a student's hidden states with its teacher's (Romero et al. 2015, "FitNets"; Sanh et al. 2019, DistilBERT).

A hidden state is what a layer returns, before the model's last norm. There is no projection between them: teacher and
student must be equally wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from artel.config.schema.distill import HiddenStatesConfig
from artel.models.compile import repeated_layers
from artel.models.output_head import output_head


@contextmanager
def recording(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Within the block: what the model's layers return, (rows, length, width) each, in their order."""
    states: list[torch.Tensor] = []

    def record(_: torch.nn.Module, __: Any, output: Any) -> None:
        if len(states) < len(layers):  # not again where activations are recomputed
            states.append(output[0] if isinstance(output, tuple) else output)

    output_head(model)  # to find it the model is run, once: those states are nobody's
    layers = repeated_layers(model)
    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def hidden_loss(
    teacher: list[torch.Tensor], student: list[torch.Tensor], places: torch.Tensor, config: HiddenStatesConfig
) -> torch.Tensor:
    """The sum over the positions, float32 (), of the mean over the matched layers."""
    pairs = [(len(teacher) - 1, len(student) - 1)]
    if config.layers == "even":
        along = [round((layer + 1) * len(teacher) / len(student)) - 1 for layer in range(len(student))]
        pairs = [(max(0, theirs), own) for own, theirs in enumerate(along)]  # -1: a student of twice the layers
    losses = []
    for theirs, own in pairs:
        expected = teacher[theirs].flatten(0, 1)[places].float()
        actual = student[own].flatten(0, 1)[places].float()
        if config.loss == "cosine":
            losses.append((1 - torch.cosine_similarity(actual, expected, dim=-1)).sum())
        else:
            losses.append((actual - expected).square().mean(dim=-1).sum())
    return torch.stack(losses).mean()
