"""What compiled layers keep for the backward pass, in a trace of layers that are not compiled.

Of what autograd saves in a layer, torch.compile keeps what matrix products and attention read and give, and computes
the elementwise rest again from it, in the kernels that need it (the partitioner of PyTorch's AOTAutograd, a min-cut
that bans products from the backward pass). Measured: benchmarks/plan_gpu.md.
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


def keep_as_compiled(model: nn.Module) -> None:
    """Let the repeated layers keep from now on what compiled ones would. For FakeTensors: what is dropped is lost."""
    for layer in repeated_layers(model):
        layer.forward = _as_compiled(layer.forward)


def _as_compiled(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        with SavedAsCompiled((args, kwargs)):
            return plain(*args, **kwargs)

    return forward


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Saved:
    """What autograd saves: a tensor, or what it looked like and what it can be computed from."""

    tensor: torch.Tensor | None
    looks: tuple[Any, ...]
    sources: list[torch.Tensor] = field(default_factory=list)
    """What a tensor that is let go is computed from."""


@dataclass(eq=False, slots=True)
class _Made:
    """A storage that the layer made, or was given."""

    parents: list[_Made]
    """What it was computed from, of what the layer made."""
    given: torch.Tensor | None = None
    """What a product gave, or the layer was given: it is not computed again."""
    is_kept: bool = False
    is_copy: bool = False
    """Of another one, which the compiler does not make."""

    def sources(self) -> set[_Made]:
        """What it can be computed from without a product."""
        found, seen, waiting = set(), {self}, list(self.parents)
        while waiting:
            each = waiting.pop()
            if each.is_kept or each.given is not None:
                found.add(each)
            elif each not in seen:
                seen.add(each)
                waiting += each.parents
        return found


class SavedAsCompiled(TorchDispatchMode):
    """Around one call of a layer: of what autograd saves, what no product reads or gives is let go at the end.

    It is so where what it is computed from, and would not be kept otherwise, is no larger.
    """

    def __init__(self, inputs: Any) -> None:
        """`inputs`: the layer's arguments, in any nesting."""
        super().__init__()
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._made: dict[int, _Made] = {}
        self._saved: list[weakref.ref[_Saved]] = []  # autograd holds this object for as long as it holds them
        self._conversions: dict[tuple[Any, ...], weakref.ref[torch.Tensor]] = {}
        for tensor in _tensors(inputs):
            if tensor.requires_grad:
                self._note(tensor, _Made([], given=tensor))

    def __enter__(self) -> SavedAsCompiled:
        super().__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        super().__exit__(*error)
        self._drop()

    def kept(self) -> list[torch.Tensor]:
        """After the call: what is held for the backward pass."""
        alive = [saved for each in self._saved if (saved := each()) is not None]
        return [tensor for saved in alive for tensor in (saved.tensor, *saved.sources) if tensor is not None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs, outputs = _tensors((args, kwargs)), _tensors(output)
        before = {id(tensor.untyped_storage()) for tensor in inputs}
        parents = [self._made[number] for number in before & self._made.keys()]
        fresh = [tensor for tensor in outputs if id(tensor.untyped_storage()) not in before]
        if is_product(func):
            for made in parents:
                made.is_kept = not made.is_copy  # should autograd save it
            for tensor in fresh:
                self._note(tensor, _Made(parents, given=tensor))
        else:
            is_copy = func is torch.ops.aten._to_copy.default and self._is_made_twice(inputs[0], output)
            for tensor in fresh:
                self._note(tensor, _Made(parents, is_copy=is_copy))
        return output

    def _is_made_twice(self, source: torch.Tensor, output: torch.Tensor) -> bool:
        """Whether the same conversion was done before: each product converts its input, the compiler does it once."""
        key = id(source.untyped_storage()), source.storage_offset(), output.shape, output.dtype
        first = self._conversions.get(key)
        if first is None or first() is None:
            self._conversions[key] = weakref.ref(output)
            return False
        return True

    def _note(self, tensor: torch.Tensor, made: _Made) -> None:
        storage = tensor.untyped_storage()
        self._made[id(storage)] = made
        weakref.finalize(storage, self._made.pop, id(storage), None)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor, (tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
        self._saved.append(weakref.ref(saved))
        return saved

    def _drop(self) -> None:
        elementwise = []
        for each in self._saved:
            saved = each()
            if saved is None or saved.tensor is None:
                continue
            made = self._made.get(id(saved.tensor.untyped_storage()))
            if made is not None and made.given is not None:
                made.is_kept = True
            elif made is not None:
                elementwise.append((saved, saved.tensor, made))
        dropped: list[tuple[_Saved, list[torch.Tensor]]] = []
        for saved, tensor, made in elementwise:
            if made.is_kept:
                continue
            sources = [each for each in made.sources() if not each.is_kept]
            held = [each.given for each in sources if each.given is not None]
            if sum(each.nbytes for each in held) > tensor.nbytes and not made.is_copy:
                made.is_kept = True
                continue
            for source in sources:
                source.is_kept = True
            dropped.append((saved, held))
        let_go = [saved.tensor for saved, _ in dropped if saved.tensor is not None]
        if _bytes(tensor for _, held in dropped for tensor in held) < _bytes(let_go):  # else nothing is gained by it
            for saved, held in dropped:
                saved.tensor, saved.sources = None, held
        self._made.clear()


def _unpack(saved: _Saved) -> torch.Tensor:
    if saved.tensor is not None:
        return saved.tensor
    shape, stride, dtype, device = saved.looks
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of their storages, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves: Iterable[Any] = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
