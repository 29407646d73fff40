"""Record the operations of a training step while it runs, under FakeTensorMode or for real.

    with OperationRecorder(model, compiled=True) as recorder:
        ...  # forward, backward, optimizer
    recorder.operations

Equal operations are kept once, with a count. Matmuls and attention count FLOPs. Other operations are memory-bound and
count the bytes they read and write. A chain fused by `torch.compile` counts only its inputs, each read once, and those
of its results that are read outside of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

from artel.models.compile import repeated_layers

MATMUL, ATTENTION, MEMORY, FUSED, COLLECTIVE = "matmul", "attention", "memory", "fused", "collective"
DISPATCH, VIEW = "dispatch", "view"
"""`dispatch`: the Python overhead of an operator on DTensors. `view`: an operator without data access, which costs only
host time."""
TRANSFER, HOST, DISK = "transfer", "host", "disk"
"""Work on offloaded weights and optimizer state: copies between host and device, operators on the host, local disks."""
TO_DEVICE, TO_HOST, READ_AHEAD, WAITED = "to_device", "to_host", "read_ahead", "waited"
"""Names of copies beside the computation in each direction, of a disk that is read beside it, and of a copy or access
to a disk that the step waits for."""
PINNED, PAGEABLE = "pinned", "pageable"
"""Host memory of a copy, as its dtype."""

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}
_WITHOUT_WORK = {"prim", "profiler", "streams"}
# Operators that allocate memory without writing to it.
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "_local_scalar_dense"}
# Operators that read only the returned part of their first tensor.
_LOOKUPS = {"embedding", "gather", "index_select", "index"}
# Operators that write only a part of their first tensor, as large as the last one.
_SCATTERS = {"scatter_add_", "scatter_", "index_put_", "index_add_"}
_OVERWRITES = {"copy_", "fill_", "zero_"}
# Operators with an exponential or similar function per element.
_EXPONENTIALS = {"exp", "tanh", "sigmoid", "gelu", "gelu_backward", "silu", "silu_backward", "erf", "log", "cos", "sin",
                 "_softmax", "_log_softmax"}  # fmt: skip
_QUANTIZED_MATMUL = "gemm_4bit"
_RECORDED_TYPES = (torch.Tensor, nn.Parameter, FakeTensor)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation on tensors of given sizes."""

    kind: str
    """`matmul`, `attention`, `memory`, `fused` (a compiled chain of those), `collective`, `dispatch`, `view`; with
    offload also `transfer`, `host`, `disk`."""
    name: str
    """PyTorch's name of the operator, `aten.mm`."""
    dtype: str = "fp32"
    """The dtype it computes in."""
    layout: str = ""
    """Layout of a matmul: `nn`, `nt`, `tn` or `tt`, with `t` for a matrix that is transposed in memory."""
    flops: int = 0
    bytes: int = 0
    """Bytes read and written; of a collective, the full size of the reduced or gathered tensor."""
    exponentials: int = 0
    """Number of exponentials in a fused chain."""
    num_matmuls: int = 1
    """Number of matmuls computed one after another on a CPU: one per expert in a grouped matmul."""
    ranks: tuple[int, ...] = ()
    """Participants of a collective."""
    is_backward: bool = False


class OperationRecorder(TorchDispatchMode):
    """Records the operations that run inside its block. Enter it inside of FakeTensorMode.

    With `compiled`, the operations between two matmuls in the layers of `model` count as one fused operation. With
    `on_gpu`, work that only CPU kernels do is not counted, even though the tensors are on the CPU.
    """

    def __init__(self, model: nn.Module, *, compiled: bool = False, on_gpu: bool = False) -> None:
        super().__init__()
        self._on_gpu = on_gpu
        layers = {id(layer) for layer in repeated_layers(model)} if compiled else set()
        self._layers = tuple(f".{name}" for name, module in model.named_modules() if id(module) in layers)
        self._tracker = ModuleTracker()
        self._counts: Counter[Operation] = Counter()
        self._chains = _Chains()

    @property
    def operations(self) -> dict[Operation, int]:
        """Operations with their counts."""
        return dict(self._counts + Counter(self._chains.operations()))

    def add(self, operation: Operation) -> None:
        """Record an operation that is not dispatched, such as the communication of DistributedDataParallel."""
        self._counts[operation] += 1

    def __enter__(self) -> OperationRecorder:
        self._tracker.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._tracker.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not all(kind in _RECORDED_TYPES for kind in types):
            if any(issubclass(kind, DTensor) for kind in types):
                self.add(Operation(DISPATCH, "dtensor", is_backward=self._tracker.is_bw))
            return NotImplemented  # DTensor then calls operators on this rank's shard, which are recorded
        out = func(*args, **kwargs)
        if func.namespace not in _WITHOUT_WORK and func not in sync_ops:
            self._record_operation(func, args, kwargs, out)
        return out

    def _record_operation(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else func.name()
        label = f"{func.namespace}.{name}"
        if func in collective_ops:
            self.add(_collective_operation(func, name, args, kwargs, out))
            return
        traffic = _Traffic.measure(func, name, args, kwargs, out)
        is_compiled = bool(self._layers) and any(parent.endswith(self._layers) for parent in self._tracker.parents)
        if traffic is None:
            if not is_compiled:
                self.add(Operation(VIEW, VIEW))
            return
        if name == _QUANTIZED_MATMUL:
            self._record_quantized_matmul(traffic, args, out)
            return
        is_backward, dtype = self._tracker.is_bw, traffic.dtype
        packet = getattr(func, "overloadpacket", func)
        if "attention" in name:
            flops = _attention_flops(func, args, kwargs, "backward" in name)
            self.add(Operation(ATTENTION, label, dtype, "", flops, traffic.bytes, is_backward="backward" in name))
        elif packet in flop_registry or name == "_grouped_mm":
            matrices = [tensor for tensor in traffic.inputs if tensor.ndim > 1][-2:]
            layout = "".join(map(_matrix_layout, matrices))
            groups = 1
            if name == "_grouped_mm":
                flops, groups = _grouped_flops(matrices[0], matrices[1], out)
            else:
                sizes = [value for value in args if not isinstance(value, torch.dtype)]  # addmm_flop refuses out_dtype
                flops = int(flop_registry[packet](*sizes, **kwargs, out_val=out))
            num_bytes = traffic.bytes
            self.add(
                Operation(MATMUL, label, dtype, layout, flops, num_bytes, num_matmuls=groups, is_backward=is_backward)
            )
            if name == "addmm" and not self._on_gpu:  # the bias is copied to the output first
                copied_bytes = _tensor_bytes(args[0]) + _tensor_bytes(out)
                self.add(Operation(MEMORY, "aten.copy_", dtype, "", 0, copied_bytes, is_backward=is_backward))
        elif is_compiled:
            self._chains.fuse(name, traffic, is_backward)
            return
        else:
            self.add(Operation(MEMORY, label, dtype, "", 0, traffic.bytes, is_backward=is_backward))
        self._chains.break_chain(traffic)

    def _record_quantized_matmul(self, traffic: _Traffic, args: Any, out: torch.Tensor) -> None:
        """Record a matmul with 4-bit weights. On a CPU, bitsandbytes dequantizes them first."""
        inputs, packed, (rows, columns) = args[:3]
        dtype, is_backward = traffic.dtype, self._tracker.is_bw
        num_bytes = traffic.bytes
        if not self._on_gpu:
            dequantized_bytes = rows * columns * out.element_size()
            traffic_bytes = _tensor_bytes(packed) + dequantized_bytes
            self.add(
                Operation(MEMORY, "bitsandbytes.dequantize_4bit", dtype, bytes=traffic_bytes, is_backward=is_backward)
            )
            num_bytes += dequantized_bytes - _tensor_bytes(packed)
        flops = 2 * inputs.numel() * rows
        self.add(Operation(MATMUL, "bitsandbytes.gemm_4bit", dtype, "nt", flops, num_bytes, is_backward=is_backward))
        self._chains.break_chain(traffic)


@dataclass(slots=True)
class _Traffic:
    """The tensors of an operation, and the bytes it reads and writes."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    """Tensors that it creates or changes."""
    bytes: int
    dtype: str

    @classmethod
    def measure(cls, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> _Traffic | None:
        """Measure an operation. None if it accesses no data: views, and allocations."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        storages = {_storage_id(tensor) for tensor in inputs}
        created = [tensor for tensor in results if _storage_id(tensor) not in storages]
        mutated = list(_mutated_tensors(func, args, kwargs))
        if name in _EMPTY or not (created or mutated):
            return None
        inputs_read = inputs
        if name in _OVERWRITES:
            inputs_read = [tensor for tensor in inputs if all(tensor is not other for other in mutated)]
        elif "out" in kwargs:
            read = args, {key: value for key, value in kwargs.items() if key != "out"}
            inputs_read = [leaf for leaf in tree_leaves(read) if isinstance(leaf, torch.Tensor)]
        traffic_bytes = sum(map(_tensor_bytes, (*inputs_read, *created, *mutated)))
        if name in _LOOKUPS:
            traffic_bytes += sum(map(_tensor_bytes, created)) - _tensor_bytes(inputs[0])
        elif name in _SCATTERS:
            traffic_bytes += 2 * min(_tensor_bytes(inputs[0]), _tensor_bytes(inputs[-1])) - 2 * _tensor_bytes(inputs[0])
        dtypes = [tensor.dtype for tensor in (*inputs, *created) if tensor.is_floating_point() and tensor.ndim > 1]
        lowest = min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
        return cls(inputs_read, [*created, *mutated], traffic_bytes, _DTYPES.get(lowest, "fp32"))


@dataclass(slots=True)
class _Chain:
    """Operations fused into one, with the tensors that they read and create."""

    is_backward: bool
    reads: dict[tuple[int, int], int] = field(default_factory=dict)
    created: dict[tuple[int, int], int] = field(default_factory=dict)
    read_later: set[tuple[int, int]] = field(default_factory=set)
    from_exponentials: dict[tuple[int, int], int] = field(default_factory=dict)
    exponentials: int = 0

    def operation(self) -> Operation:
        num_bytes = sum(self.reads.values()) + sum(self.created[tensor] for tensor in self.read_later)
        return Operation(FUSED, "fused", "", "", 0, num_bytes, self.exponentials, is_backward=self.is_backward)


class _Chains:
    """Splits the operations of compiled layers into chains, and tracks which tensors are read outside of their chain.

    A tensor is identified by its storage and the number of writes to it. Weak references keep the addresses of storages
    from being reused, because reuse would differ from trace to trace.
    """

    def __init__(self) -> None:
        self._finished: list[_Chain] = []
        self._open: _Chain | None = None
        self._write_counts: Counter[int] = Counter()
        self._storage_refs: dict[int, StorageWeakRef] = {}
        self._producers: dict[tuple[int, int], _Chain] = {}

    def operations(self) -> Iterator[Operation]:
        for chain in self._finished if self._open is None else [*self._finished, self._open]:
            yield chain.operation()

    def fuse(self, name: str, traffic: _Traffic, is_backward: bool) -> None:
        """Add an operation of a compiled layer to the open chain, or start a new one."""
        if self._open is None or self._open.is_backward != is_backward:
            self._finish_open()
            self._open = _Chain(is_backward)
        chain = self._open
        self._record_reads(traffic.inputs, chain)
        for tensor in traffic.outputs:
            self._write_counts[self._storage_address(tensor)] += 1
            key = self._versioned_key(tensor)
            chain.created[key] = _tensor_bytes(tensor)
            self._producers[key] = chain
            if name in _EXPONENTIALS:
                chain.from_exponentials[key] = tensor.numel()
                chain.exponentials += tensor.numel()
        if name == "amax" and all(not tensor.ndim for tensor in traffic.outputs):
            self._finish_open()  # a kernel that needs the maximum of all numbers is another one

    def break_chain(self, traffic: _Traffic) -> None:
        """End the chain before an operation that is not fused."""
        self._finish_open()
        self._record_reads(traffic.inputs, None)
        for tensor in traffic.outputs:
            self._write_counts[self._storage_address(tensor)] += 1

    def _record_reads(self, tensors: Iterable[torch.Tensor], chain: _Chain | None) -> None:
        for tensor in tensors:
            key = self._versioned_key(tensor)
            producer = self._producers.get(key)
            if producer is not None and producer is not chain:
                producer.read_later.add(key)
            if chain is not None and producer is not chain:
                if producer is not None and chain.is_backward and key not in chain.reads:
                    # The compiler recomputes the tensor rather than save it for the backward pass.
                    chain.exponentials += producer.from_exponentials.get(key, 0)
                chain.reads[key] = max(chain.reads.get(key, 0), _tensor_bytes(tensor))

    def _finish_open(self) -> None:
        if self._open is not None:
            self._finished.append(self._open)
            self._open = None

    def _versioned_key(self, tensor: torch.Tensor) -> tuple[int, int]:
        address = self._storage_address(tensor)
        return address, self._write_counts[address]

    def _storage_address(self, tensor: torch.Tensor) -> int:
        address = _storage_id(tensor)
        if address not in self._storage_refs:
            self._storage_refs[address] = StorageWeakRef(tensor.untyped_storage())
        return address


def _storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements; elements repeated by a stride of 0 count once."""
    num_elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        num_elements *= size if stride else 1
    return num_elements * tensor.element_size()


def _matrix_layout(matrix: torch.Tensor) -> str:
    return "t" if matrix.stride(-1) != 1 and matrix.stride(-2) == 1 else "n"


def _schema_arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each argument of the operator's schema with its value."""
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _mutated_tensors(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the arguments that the operator writes to, by its schema."""
    if not hasattr(func, "_schema"):
        return
    for argument, value in _schema_arguments(func, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _grouped_flops(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> tuple[int, int]:
    """Return the FLOPs of a grouped matmul, and its number of groups (from the three-dimensional tensor)."""
    groups = next(tensor.shape[0] for tensor in (left, right, out) if tensor.ndim == 3)
    divisor = groups if left.ndim == 3 and right.ndim == 2 else 1  # every row of `right` meets one group's matrix
    return 2 * left.numel() * right.shape[-1] // divisor, groups


def _attention_flops(func: Any, args: Any, kwargs: Any, backward: bool) -> int:
    """Return the FLOPs: two matmuls forward, five backward (scores and four gradients), half of them if causal."""
    values = {argument.name: value for argument, value in _schema_arguments(func, args, kwargs)}
    query, key = values["query"], values["key"]
    causal = bool(values.get("is_causal", values.get("causal", False)))
    pairs = query.shape[-2] * key.shape[-2] * (0.5 if causal else 1)
    return int((5 if backward else 2) * 2 * query.shape[0] * query.shape[1] * pairs * query.shape[-1])


def _collective_operation(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> Operation:
    group = CollectiveOp.get_process_group(func, args)
    ranks = tuple(dist.get_process_group_ranks(group))
    num_bytes = 0 if name == "barrier" else CollectiveOp.get_comm_tensor_size(func, out, args, kwargs)
    return Operation(COLLECTIVE, f"{func.namespace}.{name}", bytes=num_bytes, ranks=ranks)
