"""Cross-entropy over a vocabulary, as sums, so that micro-batches and ranks add up to one mean."""

from __future__ import annotations

import torch
import torch.nn.functional as F

IGNORED = -100  # the target of a position that no loss is taken on; transformers' and PyTorch's own value


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(summed loss in nats, number of right guesses) over the targets that are not `IGNORED`.

    logits (rows, length, vocabulary) in any float type, targets int64 (rows, length). Computed in float32.
    """
    flat = logits.flatten(0, 1)
    wanted = targets.flatten()
    loss = F.cross_entropy(flat.float(), wanted, ignore_index=IGNORED, reduction="sum")
    right = (flat.detach().argmax(dim=-1) == wanted).sum()
    return loss, right
