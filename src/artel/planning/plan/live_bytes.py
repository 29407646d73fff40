"""Which bytes are live at each moment of a traced step, by kind: what PyTorch's MemTracker does, and when each came.

A storage is counted from the operator that made it until it dies. Its kind comes from the code that made it, unless
its owner is known afterwards: a parameter, its gradient, the optimizer's state.

Compiled layers have no storages for what lives between two matrix products alone: TorchInductor's kernels compute the
elementwise operators between them without writing down what lies between. That is taken to hold of the whole model,
but not of lookups and sorts; of what lies outside of its layers little is as large as theirs.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from artel.models.activation_checkpointing import is_product
from artel.planning.plan.compiled_kernels import KernelShapes
from artel.planning.plan.gloo_copies import copied_bytes
from artel.planning.plan.known_values import known_result, with_values

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer_state"
ACTIVATIONS, LOSS, COMMUNICATION = "activations", "logits_and_loss", "buffers_and_communication"
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS, COMMUNICATION)

# The first frame from within, whose file has one of these in its path, gives the kind.
_KIND_OF_FILE = {
    "/artel/models/loss": LOSS,
    "/artel/models/cross_entropy": LOSS,
    "/artel/models/cpu/cross_entropy": LOSS,
    "/artel/objectives/": LOSS,
    "/artel/training/optim/": OPTIMIZER,
    "/torch/distributed/fsdp/": COMMUNICATION,
    "/torch/distributed/pipelining/": COMMUNICATION,
    "/torch/distributed/_functional_collectives": COMMUNICATION,
    "/torch/distributed/distributed_c10d": COMMUNICATION,
    "/transformers/models/": ACTIVATIONS,
}

_WRITTEN = re.compile("embedding|index|scatter|gather|sort|topk")
"""Operators whose results no kernel keeps to itself."""


@dataclass(slots=True)
class Storage:
    """Memory of one or several tensors."""

    size: int
    kind: str


class LiveBytes(TorchDispatchMode):
    """Records the storages that come and go while it is active. It lies above FakeTensorMode, or stands alone."""

    def __init__(self, *, on_cpu: bool = False, compiled: bool = False) -> None:
        """`on_cpu`: what gloo would copy is recorded too, and what oneDNN would compile. `compiled`: the layers are,
        and their kernels are fused."""
        super().__init__()
        self._on_cpu, self._compiled = on_cpu, compiled
        self._products = 0
        self.events: list[tuple[Storage, bool]] = []
        """Each storage as it comes (True) and as it goes (False)."""
        self.kernels = KernelShapes()
        self._live: dict[int, tuple[Storage, weakref.ref[Any]]] = {}
        self._made_after: dict[int, int] = {}
        """How many products there had been when an elementwise operator made a storage that is live."""
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> LiveBytes:
        live, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            live._resized(storage)
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment,method-assign]  # fully_shard frees so
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it becomes operators on this rank's part, and these come here
        result = run_with_static_shapes(func, args, kwargs or {})
        is_a_product = self._compiled and is_product(func)
        self._products += is_a_product
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                key = tensor.untyped_storage()._cdata
                if self._compiled and not is_a_product and key not in self._live and not _WRITTEN.search(func.name()):
                    self._made_after[key] = self._products
                self._add(tensor.untyped_storage(), _kind_of_caller())
        if self._on_cpu:
            self.kernels.record(func, args)
            copy = Storage(copied_bytes(func, args, result), COMMUNICATION)
            self.events += [(copy, True), (copy, False)] if copy.size else []
        return result

    def name(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Say of what kind the memory of these tensors is, as long as it lives, before and after."""
        for tensor in tensors:
            if tensor is None:
                continue
            local = getattr(tensor, "_local_tensor", tensor)
            self._add(local.untyped_storage(), kind)
            self._live[local.untyped_storage()._cdata][0].kind = kind

    def never_written(self, tensor: torch.Tensor) -> None:
        """Say that the memory of a tensor takes no room, as compiled layers compute it in their kernels."""
        record, _ = self._live.get(tensor.untyped_storage()._cdata, (None, None))
        if record is not None:
            record.size = 0

    def keep_only(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Say that of this kind nothing but these tensors lives on. PyTorch holds what the `fake` group gathered."""
        kept = {getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata for tensor in tensors}
        for key in [key for key, (record, _) in self._live.items() if record.kind == kind and key not in kept]:
            self._drop(key)

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = storage._cdata
        if key in self._live:
            return
        record = Storage(_size(storage), kind)
        self._live[key] = record, weakref.ref(storage, partial(self._drop, key))
        self.events.append((record, True))

    def _drop(self, key: int, _: Any = None) -> None:
        if key in self._live:
            record, _ = self._live.pop(key)
            if self._made_after.pop(key, -1) == self._products and record.kind == ACTIVATIONS:
                record.size = 0  # a fused kernel never wrote it down
            self.events.append((record, False))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._live:
            record, _ = self._live[storage._cdata]
            self._drop(storage._cdata)
            self._add(storage, record.kind)


def bytes_by_kind(
    events: list[tuple[Storage, bool]], start: int = 0, end: int | None = None, most: str = ""
) -> dict[str, int]:
    """Live bytes by kind at the moment of [start, end) at which they are most in all, or most of the kind `most`."""
    now = dict.fromkeys(KINDS, 0)
    total = 0
    highest = (-1, -1)
    best: dict[str, int] = {}
    for number, (storage, comes) in enumerate(events[:end]):
        change = storage.size if comes else -storage.size
        now[storage.kind] += change
        total += change
        height = (now[most] if most else total, total)
        if number >= start and height > highest:
            highest, best = height, dict(now)
    return best or now


def run_with_static_shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator. Where the shape of its result depends on values that a trace does not have, the largest."""
    known = known_result(func, args, kwargs)
    if known is not None:
        return _of_known(func, args, kwargs, known)
    if func not in _BY_VALUES or not isinstance(args[0], FakeTensor):
        return func(*args, **kwargs)
    if func is torch.ops.aten._grouped_mm.default:
        return _grouped_product(*args, **kwargs)
    if func is torch.ops.aten.index.Tensor:
        indices = [_all_of(index) for index in args[1]]
        return func(args[0], [index for group in indices for index in group], **kwargs)
    if func is torch.ops.aten.nonzero.default:
        return args[0].new_zeros((args[0].numel(), args[0].ndim), dtype=torch.int64)
    return True if args[0].dtype == torch.bool else 1


def _of_known(func: Any, args: Any, kwargs: Any, known: Any) -> Any:
    """An operator's result, of which the values are known."""
    if not isinstance(known, torch.Tensor | tuple | list):
        return known  # a number
    if func in _BY_VALUES or torch.Tag.dynamic_output_shape in func.tags:
        mode = next(leaf.fake_mode for leaf in tree_iter((args, kwargs)) if isinstance(leaf, FakeTensor))
        return with_values(tree_map_only(torch.Tensor, mode.from_tensor, known), known)
    return with_values(func(*args, **kwargs), known)


_BY_VALUES = {
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.nonzero.default,
    torch.ops.aten._local_scalar_dense.default,
}
"""Operators whose results depend on values, or whose shapes FakeTensorMode refuses to tell."""


def _grouped_product(
    left: torch.Tensor, right: torch.Tensor, groups: torch.Tensor, bias: Any = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The result of torch's product of experts. FakeTensorMode takes bf16 alone, where a CPU multiplies float32 too."""
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.ndim == right.ndim:
        shape = (groups.shape[0] if left.ndim == 2 else left.shape[0], *shape)
    return left.new_empty(shape, dtype=dtype)


def _all_of(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """A mask as the indices of all its places; other indices as they are."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [torch.zeros(index.numel(), dtype=torch.int64, device=index.device) for _ in range(index.ndim)]


def _size(storage: torch.UntypedStorage) -> int:
    size = storage.nbytes()
    return size if isinstance(size, int) else 0


def _kind_of_caller() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        for part, kind in _KIND_OF_FILE.items():
            if part in file:
                return kind
        frame = frame.f_back
    return ACTIVATIONS
