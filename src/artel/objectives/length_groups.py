"""Rows of token ids in groups of similar length, each computed by itself without the padding of the longest row.

Rows of one micro-batch differ in length: paragraphs do, answers and documents too. Padded to the longest, more than
half of a micro-batch may be padding. The loss is that of the micro-batch, whatever the groups (law 2). Their number
follows from the number of rows and the run alone, so that all ranks call the model equally often.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from artel.models.evaluating import evaluating

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from artel.config import RunConfig

# Tokens of a group of the longest rows: enough to keep the device busy.
_GROUP_TOKENS = {"cpu": 1024, "cuda": 16384}
_FEWEST_ROWS = 4
_MULTIPLE = 16  # few different shapes, and kernels prefer multiples of 8
_TOGETHER = 8192
"""Tokens of a forward pass, padding counted, over rows that a model is asked."""


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """Rows of a micro-batch, from `first` to before `last`, and the tokens of each with its padding."""

    first: int
    last: int
    length: int
    is_padded: bool
    """True if one of them has fewer tokens."""
    target: int = 0
    """The tokens, with padding, of the text that is written for each, where there is one."""

    @property
    def positions(self) -> int:
        return (self.last - self.first) * (self.length + self.target)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its part of a tensor (rows, length)."""
        return tensor[self.first : self.last, : self.length]


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """The rows of a micro-batch by length."""

    tensors: dict[str, torch.Tensor]
    """`input_ids`, `attention_mask` and, where there are types, `token_type_ids`, int64 (rows, longest), by length;
    `places`, int64 (rows,): where each row, in the order that it came in, is among them."""
    groups: tuple[LengthGroup, ...]
    starts: np.ndarray
    """int64 (rows,): where each row, in the order that it came in, begins in the groups, flattened and joined."""


def group_count(rows: int, run: RunConfig, device: str | None = None) -> int:
    """How many groups so many rows are computed in. The stages of a pipeline expect one shape: one group.

    `device` is the type of a device that is planned for; by default it is the one that is here.
    """
    import torch

    if run.parallel.pipeline > 1:
        return 1
    tokens = _GROUP_TOKENS[device or ("cuda" if torch.cuda.is_available() else "cpu")]
    return -(-rows // max(_FEWEST_ROWS, tokens // run.data.block))


def group_rows(
    rows: Sequence[np.ndarray], count: int, pad_id: int, types: Sequence[np.ndarray] | None = None
) -> GroupedRows:
    """Rows of ids, int64 (tokens,) each, in `count` groups; `types` are their token_type_ids, of the same shapes.

    Where there are fewer rows than groups, rows of one token that nobody asks for make up the number.
    """
    import torch

    missing = max(0, count - len(rows))
    rows = [*rows, *[rows[0][:1]] * missing]
    lengths = np.array([len(row) for row in rows])
    order = np.argsort(lengths, kind="stable")
    longest = int(lengths.max())
    bounds = [len(rows) * number // count for number in range(count + 1)]
    groups = tuple(_group(first, last, lengths[order[first:last]], longest) for first, last in pairwise(bounds))
    mask = np.arange(longest) < lengths[order, None]
    arrays = {"input_ids": _filled(mask, [rows[row] for row in order], pad_id), "attention_mask": mask.astype(np.int64)}
    if types is not None:
        types = [*types, *[types[0][:1]] * missing]
        arrays["token_type_ids"] = _filled(mask, [types[row] for row in order], 0)
    places, starts = np.empty((2, len(rows)), dtype=np.int64)
    places[order] = np.arange(len(rows))
    row_lengths = np.repeat([group.length for group in groups], [group.last - group.first for group in groups])
    starts[order] = np.cumsum(row_lengths) - row_lengths
    kept = len(rows) - missing
    arrays["places"] = places[:kept]
    return GroupedRows({name: torch.from_numpy(array) for name, array in arrays.items()}, groups, starts[:kept])


def _group(first: int, last: int, lengths: np.ndarray, longest: int) -> LengthGroup:
    """The group of rows with these lengths, ascending; no row of the micro-batch has over `longest` tokens."""
    length = int(lengths[-1])
    if lengths[0] < length:
        length = min(-(-length // _MULTIPLE) * _MULTIPLE, longest)
    return LengthGroup(first, last, length, bool(lengths[0] < length))


def _filled(mask: np.ndarray, rows: Sequence[np.ndarray], filler: int) -> np.ndarray:
    """The rows in the shape of `mask`, (rows, longest), padded with `filler`."""
    filled = np.full(mask.shape, filler, dtype=np.int64)
    filled[mask] = np.concatenate(rows)
    return filled


def group_inputs(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], groups: Sequence[LengthGroup]
) -> Iterator[dict[str, Any]]:
    """What `model` is called with for each group. A group without padding needs no mask: attention is quicker then.

    Nothing is written after the rows, so that decoders need not keep keys and values.
    """
    settings = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    for group in groups:
        names = ("input_ids", "token_type_ids", *(("attention_mask",) if group.is_padded else ()))
        yield {name: group.of(tensors[name]) for name in names if name in tensors} | settings


def row_logits(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], groups: Sequence[LengthGroup]
) -> torch.Tensor:
    """float32 (rows, outputs): what a model with a head for whole texts says of `group_rows`, in order."""
    import torch

    logits = [model(**inputs).logits.float() for inputs in group_inputs(model, tensors, groups)]
    return torch.cat(logits)[tensors["places"]]


def logits_of_rows(
    model: PreTrainedModel, rows: Sequence[np.ndarray], pad_id: int, types: Sequence[np.ndarray] | None = None
) -> np.ndarray:
    """`row_logits` of any number of rows, for people: without gradient, float64 (rows, outputs)."""

    if not rows:
        return np.zeros((0, model.config.num_labels))
    found: dict[int, np.ndarray] = {}
    with evaluating(model):
        for chosen in together([len(row) for row in rows]):
            some_types = None if types is None else [types[row] for row in chosen]
            grouped = group_rows([rows[row] for row in chosen], 1, pad_id, some_types)
            tensors = {name: tensor.to(model.device) for name, tensor in grouped.tensors.items()}
            found |= zip(chosen, row_logits(model, tensors, grouped.groups).double().cpu().numpy(), strict=True)
    return np.array([found[row] for row in range(len(rows))])


def together(lengths: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of rows of similar length that a model is asked together, the longest first."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    first = 0
    while first < len(order):
        last = first + max(1, _TOGETHER // lengths[order[first]])
        yield order[first:last]
        first = last
