"""What compiled layers save for the backward pass, in a trace of layers that are not compiled.

Of what autograd saves in a layer, torch.compile saves what matrix products and attention read and return. The backward
pass recomputes the elementwise rest from that, in the kernels that need it. PyTorch's AOTAutograd decides so with a
min-cut that bans products from recomputation. Measured: benchmarks/plan_gpu.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from artel.models.activation_checkpointing import is_product
from artel.models.compile import repeated_layers


def save_as_compiled(model: nn.Module, on_drop: Callable[[torch.Tensor], None] = lambda _: None) -> None:
    """Make the repeated layers save what compiled ones would. Dropped tensors lose their values: for FakeTensors.

    `on_drop` is called with each: a compiled layer has none of them in memory after the kernel that computes it.
    """
    for layer in repeated_layers(model):
        layer.forward = _as_compiled(layer.forward, on_drop)


def _as_compiled(plain: Callable[..., Any], on_drop: Callable[[torch.Tensor], None]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        with SavedAsCompiled((args, kwargs), on_drop) as saved:
            output = plain(*args, **kwargs)
            saved.hands_on(output)
            return output

    return forward


@dataclass(eq=False, slots=True, weakref_slot=True)
class _SavedTensor:
    """A tensor that autograd saves. Where it is dropped, the backward pass computes it again from `sources`."""

    tensor: torch.Tensor | None
    metadata: tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
    sources: list[torch.Tensor] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Node:
    """A storage of the layer's graph, and the nodes that it was computed from."""

    parents: list[_Node]
    banned: torch.Tensor | None = None
    """The output of a product, or an input of the layer: it is not recomputed (AOTAutograd's banned nodes)."""
    is_saved: bool = False
    is_repeated_cast: bool = False
    """The same conversion was done before: the compiler does it once (common subexpressions)."""

    def sources(self) -> set[_Node]:
        """The nearest nodes before it that are saved or banned: it can be recomputed from these."""
        found, seen, waiting = set(), {self}, list(self.parents)
        while waiting:
            node = waiting.pop()
            if node.is_saved or node.banned is not None:
                found.add(node)
            elif node not in seen:
                seen.add(node)
                waiting += node.parents
        return found


class SavedAsCompiled(TorchDispatchMode):
    """Around one call of a layer: at its end, drops saved tensors that a compiled layer would recompute.

    A tensor is dropped if no product reads or returns it, and its sources that are not saved yet are no larger.
    """

    def __init__(self, inputs: Any, on_drop: Callable[[torch.Tensor], None] = lambda _: None) -> None:
        """`inputs`: the layer's arguments, in any nesting. `on_drop` is called with each tensor that is dropped."""
        super().__init__()
        self._on_drop = on_drop
        self._handed_on: set[int] = set()
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._nodes: dict[int, _Node] = {}
        self._saved: list[weakref.ref[_SavedTensor]] = []  # autograd holds this object for as long as it holds them
        self._casts: dict[tuple[Any, ...], weakref.ref[torch.Tensor]] = {}
        for tensor in _tensors(inputs):
            if tensor.requires_grad:
                self._add_node(tensor, _Node([], banned=tensor))

    def __enter__(self) -> SavedAsCompiled:
        super().__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        super().__exit__(*error)
        self._drop_recomputable()

    def hands_on(self, output: Any) -> None:
        """Say what the layer returns, in any nesting: it is in memory, whether the layer saves it or not."""
        self._handed_on = {_storage_id(tensor) for tensor in _tensors(output)}

    def saved_tensors(self) -> list[torch.Tensor]:
        """After the call: what is held for the backward pass."""
        alive = [saved for reference in self._saved if (saved := reference()) is not None]
        return [tensor for saved in alive for tensor in (saved.tensor, *saved.sources) if tensor is not None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs, outputs = _tensors((args, kwargs)), _tensors(output)
        read = {_storage_id(tensor) for tensor in inputs}
        parents = [self._nodes[number] for number in read & self._nodes.keys()]
        new = [tensor for tensor in outputs if _storage_id(tensor) not in read]
        if is_product(func):
            for node in parents:
                node.is_saved = not node.is_repeated_cast
            for tensor in new:
                self._add_node(tensor, _Node(parents, banned=tensor))
        else:
            is_repeated = func is torch.ops.aten._to_copy.default and self._is_repeated_cast(inputs[0], output)
            for tensor in new:
                self._add_node(tensor, _Node(parents, is_repeated_cast=is_repeated))
        return output

    def _is_repeated_cast(self, source: torch.Tensor, output: torch.Tensor) -> bool:
        """True if `source` was converted to this dtype before: under autocast each product converts its input."""
        key = _storage_id(source), source.storage_offset(), output.shape, output.dtype
        first = self._casts.get(key)
        if first is None or first() is None:
            self._casts[key] = weakref.ref(output)
            return False
        return True

    def _add_node(self, tensor: torch.Tensor, node: _Node) -> None:
        number = _storage_id(tensor)
        self._nodes[number] = node
        weakref.finalize(tensor.untyped_storage(), self._nodes.pop, number, None)

    def _pack(self, tensor: torch.Tensor) -> _SavedTensor:
        saved = _SavedTensor(tensor, (tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
        self._saved.append(weakref.ref(saved))
        return saved

    def _drop_recomputable(self) -> None:
        dropped = [(saved, tensor, self._choose_sources(tensor, node)) for saved, tensor, node in self._elementwise()]
        chosen = [(saved, tensor, sources) for saved, tensor, sources in dropped if sources is not None]
        added = _bytes(source for _, _, sources in chosen for source in sources)
        if added < _bytes(tensor for _, tensor, _ in chosen):  # the compiler never saves more than eager layers do
            for saved, tensor, sources in chosen:
                if _storage_id(tensor) not in self._handed_on:
                    self._on_drop(tensor)
                saved.tensor, saved.sources = None, sources
        self._nodes.clear()

    def _elementwise(self) -> list[tuple[_SavedTensor, torch.Tensor, _Node]]:
        """Saved tensors that no product reads or returns. Marks the nodes of the others as saved."""
        found = []
        for reference in self._saved:
            saved = reference()
            node = None if saved is None or saved.tensor is None else self._nodes.get(_storage_id(saved.tensor))
            if saved is None or saved.tensor is None or node is None:
                continue
            if node.banned is not None:
                node.is_saved = True
            else:
                found.append((saved, saved.tensor, node))
        return found

    def _choose_sources(self, tensor: torch.Tensor, node: _Node) -> list[torch.Tensor] | None:
        """What to save in place of a tensor; None if that is larger, or a product reads the tensor."""
        if node.is_saved:
            return None
        unsaved = [source for source in node.sources() if not source.is_saved]
        tensors = [source.banned for source in unsaved if source.banned is not None]
        if sum(source.nbytes for source in tensors) > tensor.nbytes and not node.is_repeated_cast:
            node.is_saved = True
            return None
        for source in unsaved:
            source.is_saved = True
        return tensors


def _unpack(saved: _SavedTensor) -> torch.Tensor:
    if saved.tensor is not None:
        return saved.tensor
    shape, stride, dtype, device = saved.metadata
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _storage_id(tensor: torch.Tensor) -> int:
    return id(tensor.untyped_storage())


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves: Iterable[Any] = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
