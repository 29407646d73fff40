"""What a model's heads say of a batch of windows, and the best span of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from artel.objectives.batch import Batch

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel


def run_heads(model: PreTrainedModel, batch: Batch, *, five: bool) -> dict[str, torch.Tensor]:
    """Logits of start and end (rows, length), minus infinity at padding; with `five` heads also those of the classes
    (rows, 5), and the positions of start and end from 0 to 1 (rows, 2)."""
    import torch

    inputs = {
        name: batch.tensors[name] for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch.tensors
    }
    output = model(**inputs, output_hidden_states=five)
    padding = batch.tensors["attention_mask"] == 0
    outputs = {
        "start": output.start_logits.float().masked_fill(padding, -torch.inf),
        "end": output.end_logits.float().masked_fill(padding, -torch.inf),
    }
    if five:
        first = output.hidden_states[-1][:, 0]
        outputs["class"] = _head(model, "answer_class")(first).float()
        outputs["position"] = _head(model, "answer_position")(first).float().sigmoid()
    return outputs


def _head(model: PreTrainedModel, name: str) -> nn.Module:
    from torch import nn

    head = getattr(model, name)
    assert isinstance(head, nn.Module)
    return head


def best_spans(
    start: torch.Tensor, end: torch.Tensor, allowed: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(score, first, last) of each row's span with the largest start + end, of at most `longest` allowed tokens.

    start, end, allowed (rows, length).
    """

    import torch
    import torch.nn.functional as F

    start, end = (logits.masked_fill(~allowed, -torch.inf) for logits in (start, end))
    length = start.shape[1]
    # For each first token the best last one among the next `longest`: a window over the end logits.
    padded = F.pad(end, (0, longest - 1), value=-torch.inf)
    best, offset = padded.unfold(1, longest, 1).max(dim=2)
    score, first = (start + best).max(dim=1)
    last = first + offset.gather(1, first[:, None])[:, 0]
    return score, first, last.clamp(max=length - 1)
