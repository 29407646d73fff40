"""Imitate a GPU's memory in a trace with a CPU's operators: CUDA's autocast and compiled layers.

Compiled layers (`save_as_compiled`) save less for the backward pass. Of the tensors that autograd saves in a layer,
torch.compile saves only those that matmuls and attention read and return. The backward pass recomputes elementwise
results from them, in the kernels that need them. This is AOTAutograd's min-cut, which bans matmuls from recomputation.

CUDA's autocast (`cuda_autocast`) computes more operators in float32 than a CPU's: "CUDA Ops that can autocast to
float32" of PyTorch's documentation (docs.pytorch.org/docs/stable/amp.html). GPT-2's GELU has one of them, the power:
in bf16 it keeps 20 % more for the backward pass on a GPU. Measured: benchmarks/plan_gpu.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from artel.models.activation_checkpointing import is_matmul_or_attention
from artel.models.compile import repeated_layers


def save_as_compiled(model: nn.Module, on_drop: Callable[[torch.Tensor], None] = lambda _: None) -> None:
    """Make the repeated layers save what compiled ones would. For FakeTensors only: dropped tensors lose their values.

    `on_drop` is called with each dropped tensor: a compiled layer frees it right after the kernel that computes it.
    """
    for layer in repeated_layers(model):
        layer.forward = _wrap_forward(layer.forward, on_drop)


def _wrap_forward(original: Callable[..., Any], on_drop: Callable[[torch.Tensor], None]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        with CompiledSaving((args, kwargs), on_drop) as saved:
            output = original(*args, **kwargs)
            saved.keep_output(output)
            return output

    return forward


@dataclass(eq=False, slots=True, weakref_slot=True)
class _SavedTensor:
    """A tensor that autograd saves. If it is dropped, the backward pass recomputes it from `sources`."""

    tensor: torch.Tensor | None
    metadata: tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
    sources: list[torch.Tensor] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Node:
    """A storage in the layer's graph, and the nodes it was computed from."""

    parents: list[_Node]
    banned: torch.Tensor | None = None
    """The output of a matmul, or an input of the layer: it is not recomputed (AOTAutograd's banned nodes)."""
    is_saved: bool = False
    is_repeated_cast: bool = False
    """True if the same conversion was done before: the compiler does it once (common subexpressions)."""

    def sources(self) -> set[_Node]:
        """Return the nearest saved or banned ancestors: the node can be recomputed from these."""
        sources, seen = set(), {self}
        queue = list(self.parents)
        while queue:
            node = queue.pop()
            if node.is_saved or node.banned is not None:
                sources.add(node)
            elif node not in seen:
                seen.add(node)
                queue += node.parents
        return sources


class CompiledSaving(TorchDispatchMode):
    """Wraps one call of a layer. On exit it drops the saved tensors that a compiled layer would recompute.

    A tensor is dropped if no matmul reads or returns it, and its unsaved sources are not larger than it.
    """

    def __init__(self, inputs: Any, on_drop: Callable[[torch.Tensor], None] = lambda _: None) -> None:
        """`inputs`: the layer's arguments, in any nesting. `on_drop` is called with each dropped tensor."""
        super().__init__()
        self._on_drop = on_drop
        self._output_storages: set[int] = set()
        self._hooks = saved_tensors_hooks(self._pack, _unpack)
        self._nodes: dict[int, _Node] = {}
        self._saved: list[weakref.ref[_SavedTensor]] = []  # autograd holds this object for as long as it holds them
        self._casts: dict[tuple[Any, ...], weakref.ref[torch.Tensor]] = {}
        for tensor in _find_tensors(inputs):
            if tensor.requires_grad:
                self._add_node(tensor, _Node([], banned=tensor))

    def __enter__(self) -> CompiledSaving:
        super().__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        super().__exit__(*error)
        self._drop_recomputable()

    def keep_output(self, output: Any) -> None:
        """Record the layer's output, in any nesting. It stays in memory even if it is not saved."""
        self._output_storages = {_storage_id(tensor) for tensor in _find_tensors(output)}

    def saved_tensors(self) -> list[torch.Tensor]:
        """Return the tensors held for the backward pass, after the call."""
        alive = [saved for reference in self._saved if (saved := reference()) is not None]
        return [tensor for saved in alive for tensor in (saved.tensor, *saved.sources) if tensor is not None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        inputs = _find_tensors((args, kwargs))
        input_storages = {_storage_id(tensor) for tensor in inputs}
        parents = [self._nodes[storage_id] for storage_id in input_storages & self._nodes.keys()]
        created = [tensor for tensor in _find_tensors(output) if _storage_id(tensor) not in input_storages]
        if is_matmul_or_attention(func):
            for node in parents:
                node.is_saved = not node.is_repeated_cast
            for tensor in created:
                self._add_node(tensor, _Node(parents, banned=tensor))
        else:
            is_repeated = func is torch.ops.aten._to_copy.default and self._is_repeated_cast(inputs[0], output)
            for tensor in created:
                self._add_node(tensor, _Node(parents, is_repeated_cast=is_repeated))
        return output

    def _is_repeated_cast(self, source: torch.Tensor, output: torch.Tensor) -> bool:
        """True if `source` was converted to this dtype before: under autocast each matmul converts its input."""
        key = _storage_id(source), source.storage_offset(), output.shape, output.dtype
        earlier_cast = self._casts.get(key)
        if earlier_cast is None or earlier_cast() is None:
            self._casts[key] = weakref.ref(output)
            return False
        return True

    def _add_node(self, tensor: torch.Tensor, node: _Node) -> None:
        storage_id = _storage_id(tensor)
        self._nodes[storage_id] = node
        weakref.finalize(tensor.untyped_storage(), self._nodes.pop, storage_id, None)

    def _pack(self, tensor: torch.Tensor) -> _SavedTensor:
        saved = _SavedTensor(tensor, (tensor.shape, tensor.stride(), tensor.dtype, tensor.device))
        self._saved.append(weakref.ref(saved))
        return saved

    def _drop_recomputable(self) -> None:
        candidates = [
            (saved, tensor, self._choose_sources(tensor, node)) for saved, tensor, node in self._find_elementwise()
        ]
        replaced = [(saved, tensor, sources) for saved, tensor, sources in candidates if sources is not None]
        added_bytes = _storage_bytes(source for _, _, sources in replaced for source in sources)
        # The compiler never saves more than eager layers do.
        if added_bytes < _storage_bytes(tensor for _, tensor, _ in replaced):
            for saved, tensor, sources in replaced:
                if _storage_id(tensor) not in self._output_storages:
                    self._on_drop(tensor)
                saved.tensor, saved.sources = None, sources
        self._nodes.clear()

    def _find_elementwise(self) -> list[tuple[_SavedTensor, torch.Tensor, _Node]]:
        """Return the saved tensors that no matmul reads or returns. Mark the nodes of all other tensors as saved."""
        elementwise = []
        for reference in self._saved:
            saved = reference()
            node = None if saved is None or saved.tensor is None else self._nodes.get(_storage_id(saved.tensor))
            if saved is None or saved.tensor is None or node is None:
                continue
            if node.banned is not None:
                node.is_saved = True
            else:
                elementwise.append((saved, saved.tensor, node))
        return elementwise

    def _choose_sources(self, tensor: torch.Tensor, node: _Node) -> list[torch.Tensor] | None:
        """Return the tensors to save in place of this one. None if they are larger, or if a matmul reads this one."""
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


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())


def _find_tensors(tree: Any) -> list[torch.Tensor]:
    leaves: Iterable[Any] = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


_aten = torch.ops.aten
_FLOAT32_OPERATORS = (
    _aten.pow.Tensor_Scalar,
    _aten.pow.Tensor_Tensor,
    _aten.pow.Scalar,
    _aten.exp.default,
    _aten.log.default,
    _aten.rsqrt.default,
    _aten.reciprocal.default,
    _aten.softplus.default,
    _aten.cumsum.default,
    _aten.layer_norm.default,
    _aten.group_norm.default,
)
"""The operators that transformers models use."""
_FLOAT32_SUMS = (_aten.softmax.int, _aten.log_softmax.int, _aten.sum.default, _aten.sum.dim_IntList)
"""These return float32, unless a dtype is passed."""
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_KEY = "AutocastCPU"
_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Make the CPU's autocast convert the inputs of these operators to float32 too, while the block runs."""
    library = torch.library.Library("aten", "IMPL")
    for operator in _FLOAT32_OPERATORS:
        library.impl(operator.name(), _run_in_float32(operator), _KEY)
    for operator in _FLOAT32_SUMS:
        library.impl(operator.name(), _return_float32(operator), _KEY)
    try:
        yield
    finally:
        library._destroy()


def _run_in_float32(operator: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            wide_args, wide_kwargs = tree_map_only(torch.Tensor, _to_float32, (args, kwargs))
            return operator(*wide_args, **wide_kwargs)

    return kernel


def _return_float32(operator: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(tensor: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if args and isinstance(args[-1], torch.dtype):
            args, dtype = args[:-1], args[-1]
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            if dtype is None and tensor.dtype in _HALF_DTYPES:
                dtype = torch.float32
            return operator(tensor, *args, dtype=dtype, **kwargs)

    return kernel


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF_DTYPES else tensor
