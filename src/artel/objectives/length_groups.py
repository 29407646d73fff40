"""Groups of rows with similar length, computed separately to save padding.

The rows of a micro-batch differ in length. Padded to the longest row, more than half of a micro-batch may be padding.
Groups do not change the loss. Their number depends only on the number of rows and the run: all ranks call the model
equally often.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.integers import ceil_div
from artel.models import evaluation_mode

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from artel.config import RunConfig

# Tokens in a group of the longest rows: enough to keep the device busy.
_GROUP_TOKENS = {"cpu": 1024, "cuda": 16384}
_MIN_ROWS = 4
_PASS_TOKENS = 8192
"""Tokens of a forward pass in inference, padding included."""


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Rows [start, end) of a micro-batch, each padded to `length` tokens."""

    start: int
    end: int
    length: int
    is_padded: bool
    """True if a row has padding."""
    target: int = 0
    """Padded length of the rows' outputs in an encoder-decoder; otherwise 0."""

    @property
    def positions(self) -> int:
        return (self.end - self.start) * (self.length + self.target)

    def slice(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows of this group in a tensor (rows, length), without the padding of longer groups."""
        return tensor[self.start : self.end, : self.length]


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """The rows of a micro-batch, ordered by length."""

    tensors: dict[str, torch.Tensor]
    """`input_ids`, `attention_mask`, `token_type_ids` if there are any, int64 (rows, longest), ordered by length;
    `unsorted_indices`, int64 (rows,): the new index of each original row."""
    groups: tuple[LengthGroup, ...]
    starts: np.ndarray
    """int64 (rows,): the offset of each original row in the flattened, concatenated groups."""


def group_count(rows: int, config: RunConfig, device: str | None = None) -> int:
    """Return the number of groups for `rows` rows. A pipeline needs a single shape, so it has one group.

    `device`: type of the planned device; by default the one of this machine.
    """
    import torch

    if config.parallel.pipeline > 1:
        return 1
    tokens = _GROUP_TOKENS[device or ("cuda" if torch.cuda.is_available() else "cpu")]
    return ceil_div(rows, max(_MIN_ROWS, tokens // config.data.block))


def group_rows(
    rows: Sequence[np.ndarray], num_groups: int, pad_id: int, types: Sequence[np.ndarray] | None = None
) -> GroupedRows:
    """Arrange rows of ids, int64 (tokens,), in `num_groups` groups. `types`: their token_type_ids, of the same shapes.

    If there are fewer rows than groups, unused rows of one token are added.
    """
    missing = max(0, num_groups - len(rows))
    rows = [*rows, *[rows[0][:1]] * missing]
    lengths = np.array([len(row) for row in rows])
    order = np.argsort(lengths, kind="stable")
    longest = int(lengths.max())
    bounds = [len(rows) * index // num_groups for index in range(num_groups + 1)]
    groups = tuple(_build_group(start, end, lengths[order[start:end]], longest) for start, end in pairwise(bounds))
    mask = np.arange(longest) < lengths[order, None]
    arrays = {"input_ids": _pad(mask, [rows[row] for row in order], pad_id), "attention_mask": mask.astype(np.int64)}
    if types is not None:
        types = [*types, *[types[0][:1]] * missing]
        arrays["token_type_ids"] = _pad(mask, [types[row] for row in order], 0)
    unsorted_indices, starts = np.empty((2, len(rows)), dtype=np.int64)
    unsorted_indices[order] = np.arange(len(rows))
    row_lengths = np.repeat([group.length for group in groups], [group.end - group.start for group in groups])
    starts[order] = np.cumsum(row_lengths) - row_lengths
    num_rows = len(rows) - missing
    arrays["unsorted_indices"] = unsorted_indices[:num_rows]
    return GroupedRows(as_tensors(arrays), groups, starts[:num_rows])


def _build_group(start: int, end: int, lengths: np.ndarray, longest: int) -> LengthGroup:
    """Return the group of rows with these ascending lengths. `longest`: length of the micro-batch's longest row."""
    length = int(lengths[-1])
    if lengths[0] < length:
        length = min(round_up(length), longest)
    return LengthGroup(start, end, length, bool(lengths[0] < length))


def as_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Return tensors on the CPU, which share the arrays' memory if they are contiguous."""
    import torch

    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def round_up(length: int) -> int:
    """Return the next multiple of 16: few different shapes, and kernels prefer multiples of 8."""
    return ceil_div(length, 16) * 16


def stack_rows(rows: Sequence[np.ndarray], length: int, padding: int) -> np.ndarray:
    """Return rows of unequal length as int64 (rows, length), padded on the right."""
    matrix = np.full((len(rows), length), padding, dtype=np.int64)
    for row, ids in zip(matrix, rows, strict=True):
        row[: len(ids)] = ids
    return matrix


def _pad(mask: np.ndarray, rows: Sequence[np.ndarray], padding: int) -> np.ndarray:
    """Return the rows in the shape of `mask`, (rows, longest)."""
    padded = np.full(mask.shape, padding, dtype=np.int64)
    padded[mask] = np.concatenate(rows)
    return padded


def group_inputs(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], groups: Sequence[LengthGroup]
) -> Iterator[dict[str, Any]]:
    """Yield the model's inputs for each group. A group without padding has no mask, which makes attention faster.

    Nothing is generated, so decoders need no cache.
    """
    settings = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    for group in groups:
        names = ("input_ids", "token_type_ids", *(("attention_mask",) if group.is_padded else ()))
        yield {name: group.slice(tensors[name]) for name in names if name in tensors} | settings


def row_logits(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], groups: Sequence[LengthGroup]
) -> torch.Tensor:
    """Return the logits of a sequence classifier for `group_rows`, float32 (rows, outputs), in original order."""
    import torch

    logits = [model(**inputs).logits.float() for inputs in group_inputs(model, tensors, groups)]
    return torch.cat(logits)[tensors["unsorted_indices"]]


def predict_logits(
    model: PreTrainedModel, rows: Sequence[np.ndarray], pad_id: int, types: Sequence[np.ndarray] | None = None
) -> np.ndarray:
    """Return `row_logits` of any number of rows, without gradient, float64 (rows, outputs)."""
    if not rows:
        return np.zeros((0, model.config.num_labels))
    logits: dict[int, np.ndarray] = {}
    with evaluation_mode(model):
        for indices in batches_by_length([len(row) for row in rows]):
            batch_types = None if types is None else [types[row] for row in indices]
            grouped = group_rows([rows[row] for row in indices], 1, pad_id, batch_types)
            tensors = {name: tensor.to(model.device) for name, tensor in grouped.tensors.items()}
            logits |= zip(indices, row_logits(model, tensors, grouped.groups).double().cpu().numpy(), strict=True)
    return np.array([logits[row] for row in range(len(rows))])


def batches_by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indices of rows for each forward pass: rows of similar length, the longest first."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    start = 0
    while start < len(order):
        end = start + max(1, _PASS_TOKENS // lengths[order[start]])
        yield order[start:end]
        start = end
