"""Layers with a state, of which each document of a block must begin with an empty one: Mamba, Gated DeltaNet, short
convolutions and their kin.

Such a layer reads a row from left to right, and no mask stops what it carries along. On a CPU the code of transformers
ignores `seq_idx` and `cu_seq_lens_q`, which say to kernels for GPUs where documents begin. So the one module of a
layer that has the state is run on documents in place of rows: documents of about the same length side by side, each a
row of its own, and its outputs are put back where they belong. Everything else of the model runs on whole rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

STATE_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Types of layers in which a module has a state."""
NO_MIXER_LAYERS = {"moe", "mlp"}
"""Types of layers in which no token sees another."""
SPLIT = "document_split"
"""The argument of a model's forward, and the name under which its modules with a state keep it."""
_SIMILAR = 0.75
"""Documents that are run side by side are at least so long as this share of the longest: the others are padded."""


@dataclass(frozen=True, slots=True)
class DocumentSplit:
    """Where the documents of a batch lie: a view of (rows, length) as several batches of documents."""

    rows: int
    length: int
    groups: list[torch.Tensor]
    """int64 (documents, longest) each: the places of a document's tokens in the flattened batch; what is shorter than
    the longest repeats its last token, which nothing before it sees."""
    inverse: torch.Tensor
    """int64 (rows x length,): the place of each token of the batch among the tokens of all groups."""

    @property
    def tokens(self) -> int:
        """What a module with a state computes, with the padding of documents."""
        return sum(group.numel() for group in self.groups)

    def split(self, value: Any, group: torch.Tensor) -> Any:
        """A tensor (rows, length, ...) as (documents, longest, ...), also in a tuple; any other value as it is."""
        if isinstance(value, tuple):
            return tuple(self.split(item, group) for item in value)
        if not isinstance(value, torch.Tensor) or value.shape[:2] != (self.rows, self.length):
            return value
        return value.flatten(0, 1)[group]

    def joined(self, parts: list[Any]) -> Any:
        """What `split` took apart, or a tuple of such tensors; of other values that of the first group."""
        if isinstance(parts[0], tuple):
            return tuple(self.joined(list(values)) for values in zip(*parts, strict=True))
        if not all(
            isinstance(part, torch.Tensor) and part.shape[:2] == group.shape
            for part, group in zip(parts, self.groups, strict=True)
        ):
            return parts[0]
        flat = torch.cat([part.flatten(0, 1) for part in parts])
        return flat[self.inverse].unflatten(0, (self.rows, self.length))


def document_split(documents: torch.Tensor) -> DocumentSplit | None:
    """How to run documents by themselves; None where each row is one, and where a step is only planned.

    documents int64 (rows, length): the number of each token's document in its row.
    """
    if documents.is_meta or isinstance(documents, FakeTensor):
        return None
    numbers = documents.cpu().numpy()
    rows, length = numbers.shape
    is_first = np.ones((rows, length), dtype=bool)
    is_first[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = np.flatnonzero(is_first)
    if len(starts) == rows:
        return None
    sizes = np.diff(starts, append=rows * length)
    order = np.argsort(-sizes, kind="stable")
    groups, inverse, done, begin = [], np.empty(rows * length, dtype=np.int64), 0, 0
    while begin < len(order):
        longest = sizes[order[begin]]
        end = begin + int(np.searchsorted(-sizes[order[begin:]], -_SIMILAR * longest, side="right"))
        chosen = order[begin:end]
        places = np.minimum(np.arange(longest), sizes[chosen, None] - 1)
        group = starts[chosen, None] + places
        own = np.arange(longest) < sizes[chosen, None]
        inverse[group[own]] = done + np.flatnonzero(own)
        groups.append(torch.from_numpy(group).to(documents.device))
        done, begin = done + group.size, end
    return DocumentSplit(rows, length, groups, torch.from_numpy(inverse).to(documents.device))


def state_modules(model: nn.Module) -> list[nn.Module]:
    """The outermost modules with a state: those that have a convolution over tokens, or name a layer type of theirs."""
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        if _has_state(module):
            found.append(module)
            return
        for child in module.children():
            look(child)

    look(model)
    return found


def _has_state(module: nn.Module) -> bool:
    if getattr(module, "layer_type", None) == "linear_attention":
        return True
    return any(isinstance(child, nn.Conv1d) and child.kernel_size[0] > 1 for child in module.children())


def runs_by_documents(model: PreTrainedModel) -> bool:
    """Have the model take a `DocumentSplit` for its modules with a state, if it has any. Each model is changed once.

    The modules keep it until the next forward pass of the model: activation checkpointing runs them once more.
    """
    if model not in _CHANGED:
        modules = state_modules(model)
        for module in modules:
            kind: Any = type(module)
            module.__class__ = _by_documents(kind)
        if modules:
            model.register_forward_pre_hook(functools.partial(_hand_over, modules), with_kwargs=True)
        _CHANGED[model] = bool(modules)
    return _CHANGED[model]


_CHANGED: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def _hand_over(modules: list[nn.Module], _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The hook of a model's forward: its modules get the split, or None where documents are not kept apart."""
    split = kwargs.get(SPLIT)
    for module in modules:
        module.__dict__[SPLIT] = split
    return args, {name: value for name, value in kwargs.items() if name != SPLIT}


@functools.cache
def _by_documents(base: Any) -> type[Any]:
    """A subclass of the same name whose forward runs each document of its inputs by itself, where it has a split."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__.get(SPLIT) is None:
            return base.forward(self, *args, **kwargs)
        return _each(base.forward, self, args, kwargs)

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _each(forward: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outputs of a module's `forward` for each document, put together.

    A mask of whole rows means nothing to a document. The split is read here and is no argument: compiled layers would
    compile anew for each number of groups.
    """
    split: DocumentSplit = module.__dict__[SPLIT]
    args = tuple(None if _is_mask(value) else value for value in args)
    kwargs = {name: None if name == "attention_mask" else value for name, value in kwargs.items()}
    parts = []
    for group in split.groups:
        own = {name: split.split(value, group) for name, value in kwargs.items()}
        parts.append(forward(module, *split.split(args, group), **own))
    return split.joined(parts)


def _is_mask(value: Any) -> bool:
    return isinstance(value, BlockMask) or (isinstance(value, torch.Tensor) and value.ndim == 4 and value.shape[1] == 1)
