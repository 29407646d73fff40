"""Cross-entropy over a vocabulary, as sums, so that micro-batches and ranks add up to one mean."""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORED = -100  # the target of a position that no loss is taken on; transformers' and PyTorch's own value


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(summed loss in nats over the targets that are not `IGNORED`, likeliest ids (rows, length)).

    logits (rows, length, vocabulary) in any float type, targets int64 (rows, length). Computed in float32.
    """
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, logits.detach().argmax(dim=-1)
