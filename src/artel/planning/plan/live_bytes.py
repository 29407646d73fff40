"""Live bytes at each moment of a traced step, by kind. Unlike PyTorch's MemTracker, it keeps the order of events.

A storage counts from the operator that allocates it until it is freed. Its kind comes from the code that allocates it,
unless it turns out to be a parameter, a gradient or the optimizer's state.

Compiled layers have no storage for a tensor that lives only between two matmuls: TorchInductor's kernels fuse
the elementwise operators there. The whole model is assumed to be fused, except for lookups and sorts: outside of the
layers few tensors are large.

A trace has shapes but no values. Attention for answers that share a row reads where each answer begins, which
FakeTensors do not know. So operators on integers with known values (the batch's) are also run for real, and the
FakeTensors remember the results.
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
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves, tree_map_only

from artel.models.activation_checkpointing import is_matmul_or_attention

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer_state"
ACTIVATIONS, LOSS, COMMUNICATION = "activations", "logits_and_loss", "buffers_and_communication"
KINDS = (WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS, COMMUNICATION)

# The innermost frame whose path contains one of these decides the kind.
_KIND_OF_FILE = {
    "/artel/models/loss": LOSS,
    "/artel/models/cross_entropy": LOSS,
    "/artel/models/cpu/cross_entropy": LOSS,
    "/artel/models/triton_cross_entropy": LOSS,
    "/artel/objectives/": LOSS,
    "/artel/training/optim/": OPTIMIZER,
    "/torch/distributed/fsdp/": COMMUNICATION,
    "/torch/distributed/pipelining/": COMMUNICATION,
    "/torch/distributed/_functional_collectives": COMMUNICATION,
    "/torch/distributed/distributed_c10d": COMMUNICATION,
    "/transformers/models/": ACTIVATIONS,
}

_VALUES = "artel_values"
_MATERIALIZED = re.compile("embedding|index|scatter|gather|sort|topk")
"""Operators whose results are always written to memory, also in a fused kernel."""


@dataclass(slots=True)
class Storage:
    """Memory of one or several tensors."""

    num_bytes: int
    kind: str


class LiveBytes(TorchDispatchMode):
    """Records allocations and frees while it is active. Enter it inside of FakeTensorMode, or alone."""

    def __init__(self, *, compiled: bool = False) -> None:
        """`compiled`: the layers are compiled, so that their elementwise kernels are fused."""
        super().__init__()
        self._compiled = compiled
        self._num_matmuls = 0
        self.events: list[tuple[Storage, bool]] = []
        """Allocations (True) and frees (False), in order."""
        self._live: dict[int, tuple[Storage, weakref.ref[Any]]] = {}
        self._matmuls_before: dict[int, int] = {}
        """Live storages of elementwise operators, with the number of matmuls before them."""
        self._resize: Callable[..., Any] = torch.UntypedStorage.resize_

    def __enter__(self) -> LiveBytes:
        def patched_resize(storage: torch.UntypedStorage, num_bytes: int) -> Any:
            result = self._resize(storage, num_bytes)
            self._on_resize(storage)
            return result

        torch.UntypedStorage.resize_ = patched_resize  # type: ignore[assignment,method-assign]  # fully_shard frees memory with it
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls operators on this rank's shard, which are recorded
        result = _run_with_static_shapes(func, args, kwargs or {})
        writes_result = self._compiled and is_matmul_or_attention(func)
        self._num_matmuls += writes_result
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                key = tensor.untyped_storage()._cdata
                if (
                    self._compiled
                    and not writes_result
                    and key not in self._live
                    and not _MATERIALIZED.search(func.name())
                ):
                    self._matmuls_before[key] = self._num_matmuls
                self._record_allocation(tensor.untyped_storage(), _kind_of_caller())
        return result

    def set_kind(self, tensors: Iterable[torch.Tensor | None], kind: str) -> None:
        """Set the kind of these tensors' memory for its whole lifetime."""
        for tensor in tensors:
            if tensor is None:
                continue
            local = getattr(tensor, "_local_tensor", tensor)
            self._record_allocation(local.untyped_storage(), kind)
            self._live[local.untyped_storage()._cdata][0].kind = kind

    def ignore_bytes(self, tensor: torch.Tensor) -> None:
        """Count a tensor as 0 bytes: compiled layers keep it inside of a kernel."""
        record, _ = self._live.get(tensor.untyped_storage()._cdata, (None, None))
        if record is not None:
            record.num_bytes = 0

    def keep_only(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Free all memory of this kind except these tensors. PyTorch keeps tensors that the `fake` group gathered."""
        kept_keys = {getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata for tensor in tensors}
        for key in [key for key, (record, _) in self._live.items() if record.kind == kind and key not in kept_keys]:
            self._record_free(key)

    def _record_allocation(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = storage._cdata
        if key in self._live:
            return
        num_bytes = storage.nbytes()  # symbolic if it depends on values
        record = Storage(num_bytes if isinstance(num_bytes, int) else 0, kind)
        self._live[key] = record, weakref.ref(storage, partial(self._record_free, key))
        self.events.append((record, True))

    def _record_free(self, key: int, _: Any = None) -> None:
        if key in self._live:
            record, _ = self._live.pop(key)
            if self._matmuls_before.pop(key, -1) == self._num_matmuls and record.kind == ACTIVATIONS:
                record.num_bytes = 0  # a fused kernel never wrote it to memory
            self.events.append((record, False))

    def _on_resize(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._live:
            record, _ = self._live[storage._cdata]
            self._record_free(storage._cdata)
            self._record_allocation(storage, record.kind)


def bytes_by_kind(
    events: list[tuple[Storage, bool]], start: int = 0, end: int | None = None, peak_kind: str = ""
) -> dict[str, int]:
    """Return live bytes by kind at the peak within [start, end): the peak of the total or of `peak_kind`."""
    live_bytes = dict.fromkeys(KINDS, 0)
    total_bytes = 0
    highest = (-1, -1)
    at_peak: dict[str, int] = {}
    for index, (storage, is_allocation) in enumerate(events[:end]):
        change = storage.num_bytes if is_allocation else -storage.num_bytes
        live_bytes[storage.kind] += change
        total_bytes += change
        height = (live_bytes[peak_kind] if peak_kind else total_bytes, total_bytes)
        if index >= start and height > highest:
            highest, at_peak = height, dict(live_bytes)
    return at_peak or live_bytes


def remember_values(fake: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Attach the values of `tensor` to `fake`, if they are integers or bools. Return `fake`."""
    if not tensor.is_floating_point():
        setattr(fake, _VALUES, tensor)
    return fake


def _compute_known_result(func: Any, args: Any, kwargs: Any) -> Any:
    """Return an operator's result with values if the values of all its tensors are known, else None.

    An in-place operator that mixes in unknown values makes the changed tensor unknown.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not tensors or not all(hasattr(tensor, _VALUES) for tensor in tensors):
        for tensor in tensors if getattr(getattr(func, "_schema", None), "is_mutable", False) else ():
            vars(tensor).pop(_VALUES, None)
        return None
    real_args, real_kwargs = tree_map_only(torch.Tensor, lambda tensor: getattr(tensor, _VALUES), (args, kwargs))
    with no_dispatch():
        return func(*real_args, **real_kwargs)


def _attach_values(result: Any, known: Any) -> Any:
    """Attach the values of `known` to the FakeTensors in `result`."""
    for fake, tensor in zip(tree_leaves(result), tree_leaves(known), strict=True):
        if isinstance(fake, FakeTensor):
            remember_values(fake, tensor)
    return result


def _run_with_static_shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator. If the shape of its result depends on unknown values, return the largest possible one."""
    known = _compute_known_result(func, args, kwargs)
    if known is not None:
        return _wrap_known(func, args, kwargs, known)
    if func not in _VALUE_DEPENDENT or not isinstance(args[0], FakeTensor):
        return func(*args, **kwargs)
    if func is torch.ops.aten._grouped_mm.default:
        return _grouped_matmul(*args, **kwargs)
    if func is torch.ops.aten.index.Tensor:
        indices = [_mask_indices(index) for index in args[1]]
        return func(args[0], [index for group in indices for index in group], **kwargs)
    if func is torch.ops.aten.nonzero.default:
        return args[0].new_zeros((args[0].numel(), args[0].ndim), dtype=torch.int64)
    return True if args[0].dtype == torch.bool else 1


def _wrap_known(func: Any, args: Any, kwargs: Any, known: Any) -> Any:
    """Return an operator's result with its known values."""
    if not isinstance(known, torch.Tensor | tuple | list):
        return known  # a number
    if func in _VALUE_DEPENDENT or torch.Tag.dynamic_output_shape in func.tags:
        mode = next(leaf.fake_mode for leaf in tree_iter((args, kwargs)) if isinstance(leaf, FakeTensor))
        return _attach_values(tree_map_only(torch.Tensor, mode.from_tensor, known), known)
    return _attach_values(func(*args, **kwargs), known)


_VALUE_DEPENDENT = {
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten.index.Tensor,
    torch.ops.aten.nonzero.default,
    torch.ops.aten._local_scalar_dense.default,
}
"""Operators whose results depend on values, or whose shapes FakeTensorMode does not infer."""


def _grouped_matmul(
    left: torch.Tensor, right: torch.Tensor, groups: torch.Tensor, bias: Any = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the result of torch's grouped matmul. FakeTensorMode accepts only bf16, a CPU also float32."""
    shape: tuple[int, ...] = (left.shape[-2], right.shape[-1])
    if left.ndim == right.ndim:
        shape = (groups.shape[0] if left.ndim == 2 else left.shape[0], *shape)
    return left.new_empty(shape, dtype=dtype)


def _mask_indices(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return a mask as the indices of all its positions; other indices unchanged."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return [torch.zeros(index.numel(), dtype=torch.int64, device=index.device) for _ in range(index.ndim)]


def _kind_of_caller() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        for path_fragment, kind in _KIND_OF_FILE.items():
            if path_fragment in file:
                return kind
        frame = frame.f_back
    return ACTIVATIONS
