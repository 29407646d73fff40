"""Rows of token ids to scores, by a model with one output.

Rows of one batch differ in length: answers do, and so do documents. Padded to the longest, more than half of a batch
may be padding. So rows are sorted by length and run in groups, each padded to its own longest row. Every micro-batch
of a step has equally many rows, and so equally many groups: processes that share a model call it equally often.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_ROUND = 16
_GROUP_ON_CPU = 4
"""Rows of a group on a CPU, which a few rows keep busy. A GPU gets all rows at once."""


def rows_in_group(model: PreTrainedModel) -> int | None:
    """How many rows `model` is given at a time; None for all."""
    return _GROUP_ON_CPU if model.device.type == "cpu" else None


def score_tensors(
    rows: Sequence[np.ndarray], pad_id: int, group: int | None, types: Sequence[np.ndarray] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of `row_scores` for rows of ids, int64 (tokens,) each; `types` are token_type_ids, the same shapes.

    `input_ids` (and `token_type_ids`), int64 (padded tokens of all groups,); `mask0`, `mask1`, … int64 (rows, length),
    the attention mask of each group, whose shape is that of its ids; `places`, int64 (rows,): where the score of each
    row stands among those of the groups.
    """
    import torch

    order = np.argsort([len(row) for row in rows], kind="stable")
    size = len(rows) if group is None else group
    tensors, ids, kinds = {}, [], []
    for number, first in enumerate(range(0, len(rows), size)):
        chosen = order[first : first + size]
        longest = max(len(rows[row]) for row in chosen)
        padded = -(-longest // _ROUND) * _ROUND if len(rows[chosen[0]]) < longest else longest
        mask = np.zeros((len(chosen), padded), dtype=np.int64)
        for row, index in zip(mask, chosen, strict=True):
            row[: len(rows[index])] = 1
        ids.append(_filled(mask, [rows[index] for index in chosen], pad_id))
        if types is not None:
            kinds.append(_filled(mask, [types[index] for index in chosen], 0))
        tensors[f"mask{number}"] = torch.from_numpy(mask)
    places = np.empty(len(rows), dtype=np.int64)
    places[order] = np.arange(len(rows))
    tensors |= {"input_ids": torch.from_numpy(np.concatenate(ids)), "places": torch.from_numpy(places)}
    return tensors | ({"token_type_ids": torch.from_numpy(np.concatenate(kinds))} if kinds else {})


def _filled(mask: np.ndarray, rows: Sequence[np.ndarray], filler: int) -> np.ndarray:
    """The rows in the shape of `mask`, flattened."""
    filled = np.full(mask.shape, filler, dtype=np.int64)
    filled[mask > 0] = np.concatenate(rows)
    return filled.reshape(-1)


def row_scores(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The score of each row of `score_tensors`, float32 (rows,)."""
    import torch

    scores, start = [], 0
    for number in count():
        mask = tensors.get(f"mask{number}")
        if mask is None:
            break
        part = slice(start, start + mask.numel())
        start += mask.numel()
        inputs: dict[str, Any] = {
            name: tensors[name][part].view_as(mask) for name in ("input_ids", "token_type_ids") if name in tensors
        }
        scores.append(model(**inputs, attention_mask=mask, **_no_cache(model)).logits[:, 0].float())
    return torch.cat(scores)[tensors["places"]]


def _no_cache(model: PreTrainedModel) -> dict[str, Any]:
    """Nothing is written after the rows: decoders need not keep keys and values."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def scores_of(
    model: PreTrainedModel, rows: Sequence[np.ndarray], pad_id: int, types: Sequence[np.ndarray] | None = None
) -> list[float]:
    """The scores of rows, for people: without gradient, a few rows at a time."""
    import torch

    was_training = model.training
    model.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        tensors = score_tensors(rows, pad_id, _GROUP_ON_CPU, types)
        on_device = {name: tensor.to(model.device) for name, tensor in tensors.items()}
        scores = row_scores(model, on_device)
    model.train(was_training)
    return [float(score) for score in scores.tolist()]
