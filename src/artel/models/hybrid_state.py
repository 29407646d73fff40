"""Layers with a recurrent state, such as Mamba, Gated DeltaNet and short convolutions, on rows with several documents.

Such a layer reads a row from left to right, and no mask stops the state from crossing documents. On a CPU transformers'
code ignores `seq_idx` and `cu_seq_lens_q`, which tell GPU kernels where documents start. So the module with the state
runs on documents instead of rows: documents of similar length form a batch, one per row, and the outputs are scattered
back. The rest of the model runs on whole rows.
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
"""Layer types with a state."""
NO_MIXER_LAYERS = {"moe", "mlp"}
"""Layer types in which tokens do not see each other."""
SPLIT = "document_split"
"""Name of the argument of a model's forward, and of the attribute of its modules with a state."""
_MIN_LENGTH_RATIO = 0.75
"""Documents in a batch are at least this fraction of the longest; they are padded to its length."""


@dataclass(frozen=True, slots=True)
class DocumentSplit:
    """Splits a batch (rows, length) into batches of documents of similar length."""

    rows: int
    length: int
    groups: list[torch.Tensor]
    """int64 (documents, longest) each: positions of the documents' tokens in the flattened batch. Shorter documents are
    padded with their last token, which the tokens before it do not see."""
    inverse: torch.Tensor
    """int64 (rows x length,): the position of each token of the batch among the tokens of all groups."""

    @property
    def tokens(self) -> int:
        """The number of tokens that a module with a state processes, including padding."""
        return sum(group.numel() for group in self.groups)

    def split(self, value: Any, group: torch.Tensor) -> Any:
        """Return a tensor (rows, length, …), or a tuple of them, as (documents, longest, …). Keep other values."""
        if isinstance(value, tuple):
            return tuple(self.split(item, group) for item in value)
        if not isinstance(value, torch.Tensor) or value.shape[:2] != (self.rows, self.length):
            return value
        return value.flatten(0, 1)[group]

    def join(self, outputs: list[Any]) -> Any:
        """Undo `split` for tensors or tuples of them. For other values return the first."""
        if isinstance(outputs[0], tuple):
            return tuple(self.join(list(values)) for values in zip(*outputs, strict=True))
        if not all(
            isinstance(output, torch.Tensor) and output.shape[:2] == group.shape
            for output, group in zip(outputs, self.groups, strict=True)
        ):
            return outputs[0]
        flat = torch.cat([output.flatten(0, 1) for output in outputs])
        return flat[self.inverse].unflatten(0, (self.rows, self.length))


def document_split(documents: torch.Tensor) -> DocumentSplit | None:
    """Split a batch into documents. Return None if every row is one document, or if tensors have no values (planning).

    documents int64 (rows, length): each token's document number.
    """
    if documents.is_meta or isinstance(documents, FakeTensor):
        return None
    document_ids = documents.cpu().numpy()
    rows, length = document_ids.shape
    is_first = np.ones((rows, length), dtype=bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = np.flatnonzero(is_first)
    if len(starts) == rows:
        return None
    document_lengths = np.diff(starts, append=rows * length)
    order = np.argsort(-document_lengths, kind="stable")
    groups, inverse, num_grouped, start = [], np.empty(rows * length, dtype=np.int64), 0, 0
    while start < len(order):
        longest = document_lengths[order[start]]
        end = start + int(np.searchsorted(-document_lengths[order[start:]], -_MIN_LENGTH_RATIO * longest, side="right"))
        group_rows = order[start:end]
        offsets = np.minimum(np.arange(longest), document_lengths[group_rows, None] - 1)
        group = starts[group_rows, None] + offsets
        is_token = np.arange(longest) < document_lengths[group_rows, None]
        inverse[group[is_token]] = num_grouped + np.flatnonzero(is_token)
        groups.append(torch.from_numpy(group).to(documents.device))
        num_grouped, start = num_grouped + group.size, end
    return DocumentSplit(rows, length, groups, torch.from_numpy(inverse).to(documents.device))


def state_modules(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules with a state: linear attention, or a convolution over tokens."""
    state_layers: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        if _has_state(module):
            state_layers.append(module)
            return
        for child in module.children():
            visit(child)

    visit(model)
    return state_layers


def _has_state(module: nn.Module) -> bool:
    if getattr(module, "layer_type", None) == "linear_attention":
        return True
    return any(isinstance(child, nn.Conv1d) and child.kernel_size[0] > 1 for child in module.children())


def enable_document_split(model: PreTrainedModel) -> bool:
    """Make a model with state modules accept a `DocumentSplit`. Return False if it has no such modules.

    Each model is patched once. The modules keep the split until the model's next forward pass, since activation
    checkpointing runs them again.
    """
    if model not in _CHANGED_MODELS:
        modules = state_modules(model)
        for module in modules:
            layer_class: Any = type(module)
            module.__class__ = _make_document_class(layer_class)
        if modules:
            model.register_forward_pre_hook(functools.partial(_set_split, modules), with_kwargs=True)
        _CHANGED_MODELS[model] = bool(modules)
    return _CHANGED_MODELS[model]


_CHANGED_MODELS: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def _set_split(modules: list[nn.Module], _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of the model: pass the split, or None, to its modules."""
    split = kwargs.get(SPLIT)
    for module in modules:
        module.__dict__[SPLIT] = split
    return args, {name: value for name, value in kwargs.items() if name != SPLIT}


@functools.cache
def _make_document_class(base: Any) -> type[Any]:
    """Return a subclass of the same name whose forward runs one document per row if a split is set."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__dict__.get(SPLIT) is None:
            return base.forward(self, *args, **kwargs)
        return _run_by_documents(base.forward, self, args, kwargs)

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_by_documents(forward: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a module's `forward` on each group of documents and join the outputs.

    Masks of whole rows are dropped. The split is an attribute and not an argument: compiled layers would be
    compiled again for each number of groups.
    """
    split: DocumentSplit = module.__dict__[SPLIT]
    args = tuple(None if _is_mask(value) else value for value in args)
    kwargs = {name: None if name == "attention_mask" else value for name, value in kwargs.items()}
    outputs = []
    for group in split.groups:
        group_kwargs = {name: split.split(value, group) for name, value in kwargs.items()}
        outputs.append(forward(module, *split.split(args, group), **group_kwargs))
    return split.join(outputs)


def _is_mask(value: Any) -> bool:
    return isinstance(value, BlockMask) or (isinstance(value, torch.Tensor) and value.ndim == 4 and value.shape[1] == 1)
