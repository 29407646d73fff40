"""Loading weights into a model that was sharded on the meta device. Each process reads or draws only its shards.

Saved tensors are read a slice at a time. New tensors are initialized a module at a time (init_weights.py), and the
process keeps its shard. So a process holds at most its shards and the tensors of one module. An engine that shards
parameters with values (DeepSpeed) gets them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from artel.errors import InputError
from artel.integers import ceil_div
from artel.models.loading.conversion import Conversion, LoadingPlan
from artel.models.loading.init_weights import canonical_names, initial_values
from artel.models.loading.safetensors_files import TensorFiles
from artel.models.lora.adapters import name_in_base


@dataclass(slots=True)
class WeightSource:
    """The origin of a model's weights: saved files, the seed, or adapters."""

    reference: PreTrainedModel
    """The full model on the meta device, not sharded, without adapters."""
    seed: int
    files: TensorFiles | None = None
    plan: LoadingPlan | None = None
    grown: dict[str, int] = field(default_factory=dict)
    """Parameters that got more rows, with their old number of rows."""
    kept_rows: dict[str, Mapping[int, int]] = field(default_factory=dict)
    """Parameters that are new except for some rows: row here -> row in the file."""
    adapters: dict[str, torch.Tensor] = field(default_factory=dict)
    """The first weights of the model's adapters, by name."""


Read = Callable[[list["LocalIndices"]], torch.Tensor]
"""Returns this process's shard of one tensor."""


class WeightLoader(Protocol):
    """`materialize`, bound to the weights of a run's model."""

    def __call__(
        self,
        model: nn.Module,
        *,
        device: torch.device | str,
        on_parameter: Callable[[nn.Parameter], None] | None = None,
        read_values: bool = True,
    ) -> None: ...


def materialize(
    model: nn.Module,
    weights: WeightSource,
    *,
    device: torch.device | str,
    on_parameter: Callable[[nn.Parameter], None] | None = None,
    read_values: bool = True,
) -> None:
    """Allocate every parameter and buffer of `model` that is on the meta device on `device`, and fill it.

    Modules have the names of `weights.reference`, or those that adapters give them; some may be missing (pipeline
    stages). Parameters are full tensors, or DTensors with any mesh and placements. They keep their identity, ties and
    `requires_grad`. Processes do not communicate, so each may have different modules. Buffers with values move to
    `device`.

    `on_parameter` is called with each parameter as soon as it has values, in the same order on every process. It may
    free the parameter's memory; then only one module is in memory at a time. Without `read_values` parameters stay
    empty, for another process to fill; buffers are filled regardless.

    Raise InputError if an architecture cannot initialize a module.
    """
    sources = _Sources(weights)
    with torch.no_grad(), weights.files or nullcontext():
        slots = _meta_slots(model, sources.canonical, device)
        if on_parameter is None:
            # All shards at once: between temporary full modules they would fragment the heap (137 instead of 71 MB for
            # a quarter of 190 MB).
            for slot in (slot for tied in slots.values() for slot in tied):
                slot.allocate()
        for name in list(slots):
            if name in slots:  # otherwise it was filled together with another name
                _fill(name, slots, sources, on_parameter, read_values)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def _fill(
    name: str,
    slots: dict[str, list[_Slot]],
    sources: _Sources,
    on_parameter: Callable[[nn.Parameter], None] | None,
    read_values: bool,
) -> None:
    """Fill the slots of one name and of names read together with it. Full tensors are freed afterwards."""
    for slot_name, read in sources.find(name, slots.keys()).items():
        for slot in slots.pop(slot_name):
            parameter = slot.tensor if isinstance(slot.tensor, nn.Parameter) else None
            slot.fill(read if read_values or parameter is None else None)
            if on_parameter is not None and parameter is not None:
                on_parameter(parameter)


class LocalIndices:
    """The indices of one dimension that a process holds: a range, or any ascending indices."""

    def __init__(self, indices: torch.Tensor) -> None:
        first = int(indices[0]) if len(indices) else 0
        last = int(indices[-1]) + 1 if len(indices) else 0
        self.span = slice(first, last)
        self._within_span = None if last - first == len(indices) else indices - first

    def select(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Select these indices from a tensor with the indices of `span`."""
        return tensor if self._within_span is None else tensor.index_select(dim, self._within_span)


@dataclass(slots=True)
class _Slot:
    """A parameter or buffer on the meta device, and the tensor that replaces it."""

    module: nn.Module
    local_name: str
    tensor: torch.Tensor
    device: torch.device | str
    allocated: torch.Tensor | None = None

    def allocate(self) -> torch.Tensor:
        if self.allocated is None:
            self.allocated = torch.empty_like(self.tensor, device=self.device)
        return self.allocated

    def fill(self, read: Read | None) -> None:
        """Replace the tensor on the meta device, and read the values of the local shard unless it is empty."""
        allocated = self.allocate()
        local = allocated.to_local() if isinstance(allocated, DTensor) else allocated
        if read is not None and local.numel():
            values = read(local_indices(self.tensor))
            if values.shape != local.shape:
                raise ValueError(f"{self.local_name}: {tuple(values.shape)} were read for {tuple(local.shape)}")
            local.copy_(values)
        if isinstance(self.tensor, nn.Parameter):
            parameter = nn.Parameter(allocated, requires_grad=self.tensor.requires_grad)
            parameter.__dict__.update(self.tensor.__dict__)  # attributes set by other code
            torch.utils.swap_tensors(self.tensor, parameter)
        else:
            self.module._buffers[self.local_name] = allocated


def local_indices(tensor: torch.Tensor) -> list[LocalIndices]:
    """Return the indices of each dimension that this process holds: all, or its shard of a DTensor."""
    indices = [torch.arange(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "this process is not in the mesh of its own parameter"
        for mesh_dim in _sharding_order(tensor):
            placement: Any = tensor.placements[mesh_dim]
            groups = 1 if _shards_last(tensor, mesh_dim) else getattr(placement, "split_factor", 1)
            size, rank = tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim]
            chunks = [_chunk(indices[placement.dim], groups, group) for group in range(groups)]
            indices[placement.dim] = torch.cat([_chunk(chunk, size, rank) for chunk in chunks])
    return [LocalIndices(dim_indices) for dim_indices in indices]


def _sharding_order(tensor: DTensor) -> list[int]:
    """Return the mesh dimensions that shard a tensor, in the order of sharding.

    From left to right, except for PyTorch's strided shards: fully_shard comes after tensor parallelism, though its mesh
    dimension comes first. (PyTorch's left-to-right interpretation of strided shards is equivalent only if sizes divide
    evenly, which they need not here.)
    """
    order: list[int] = []
    for mesh_dim in reversed(range(len(tensor.placements))):
        if not hasattr(tensor.placements[mesh_dim], "dim"):
            continue
        if _shards_last(tensor, mesh_dim):
            order.append(mesh_dim)
        else:
            order.insert(0, mesh_dim)
    return order


def _shards_last(tensor: DTensor, mesh_dim: int) -> bool:
    """True if a mesh dimension shards after those to its right: its split factor is their number of shards."""
    placement: Any = tensor.placements[mesh_dim]
    shards = 1
    for later in range(mesh_dim + 1, len(tensor.placements)):
        if getattr(tensor.placements[later], "dim", None) == placement.dim:
            shards *= tensor.device_mesh.size(later)
    return shards > 1 and getattr(placement, "split_factor", 1) == shards


def _chunk(indices: torch.Tensor, num_chunks: int, chunk_index: int) -> torch.Tensor:
    """Return one of `num_chunks` chunks like torch.chunk: the last ones are smaller or empty."""
    chunk_size = ceil_div(len(indices), num_chunks)
    return indices[chunk_index * chunk_size : (chunk_index + 1) * chunk_size]


def _meta_slots(
    model: nn.Module, canonical: Callable[[str], str], device: torch.device | str
) -> dict[str, list[_Slot]]:
    """Return slots for all tensors on the meta device, by canonical name."""
    slots: dict[str, list[_Slot]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for local_name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.is_meta or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            name = canonical(f"{prefix}.{local_name}" if prefix else local_name)
            slots.setdefault(name, []).append(_Slot(module, local_name, tensor, device))
    return slots


class _Sources:
    """Reads or initializes the tensors of a model, by canonical name."""

    def __init__(self, weights: WeightSource) -> None:
        self.names = canonical_names(weights.reference)
        self._reference, self._seed, self._files = weights.reference, weights.seed, weights.files
        self._adapters = weights.adapters
        saved: dict[str, str | Conversion] = {}
        if weights.plan is not None:
            saved = {**weights.plan.conversion_of_target, **weights.plan.key_of_target}
        self._saved = {self.names[name]: origin for name, origin in saved.items()}
        grown = {self.names[name]: rows for name, rows in weights.grown.items()}
        self._grown = {name: rows for name, rows in grown.items() if name in self._saved}
        self._kept_rows = {self.names[name]: (name, rows) for name, rows in weights.kept_rows.items()}

    def canonical(self, name: str) -> str:
        """Return the canonical name of a tensor in a model with adapters: the adapter's, or that of the reference."""
        return name if name in self._adapters else self.names.get(name) or self.names[name_in_base(name)]

    def find(self, name: str, missing: Set[str]) -> dict[str, Read]:
        """Return readers of a tensor and of those in `missing` that come with it, all computed at the first read.

        The order is the same on every process.
        """
        if name in self._adapters:
            return {name: partial(_select, self._adapters[name].__getitem__)}
        origin = self._saved.get(name)
        if origin is None or name in self._grown:
            prefix = name.rpartition(".")[0]
            new_names = self._new_tensors(prefix, missing)
            names_in_module = [f"{prefix}.{local_name}" if prefix else local_name for local_name in new_names]
            compute = cache(partial(self._initialize, prefix, new_names))
        elif isinstance(origin, str):
            return {name: partial(_select, partial(self._read, origin))}
        elif origin.is_stacked:
            return {name: partial(self._stack, origin)}
        else:
            names_in_module = [self.names[target] for target in origin.targets]
            compute = cache(partial(self._convert, origin))
        return {key: partial(_select, partial(_index, compute, key)) for key in names_in_module if key in missing}

    def _new_tensors(self, prefix: str, missing: Set[str]) -> list[str]:
        """Return the module's direct tensors in `missing` that are not saved, or not with all rows."""
        module = self._reference.get_submodule(prefix)
        parent = f"{prefix}." if prefix else ""
        complete = self._saved.keys() - self._grown.keys()
        names = [*module._parameters, *module._buffers]
        return [name for name in names if parent + name in missing and parent + name not in complete]

    def _initialize(self, prefix: str, new_names: list[str]) -> dict[str, torch.Tensor]:
        """Initialize new tensors of a module, and read their saved rows."""
        parent = f"{prefix}." if prefix else ""
        only_unsaved = set(new_names) <= self._reference.get_submodule(prefix)._non_persistent_buffers_set
        try:
            values = initial_values(self._reference, prefix, self._seed, only_unsaved=only_unsaved)
        except Exception as error:  # architectures have custom rules that do not check values
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            model_type = self._reference.config.model_type
            raise InputError.at(
                "model.config", f"{model_type} cannot be initialized: {reason}", "check its values"
            ) from None
        tensors = {parent + name: values[name] for name in new_names}
        for name in tensors.keys() & self._grown.keys():
            origin = self._saved[name]
            saved_rows = self._read(origin) if isinstance(origin, str) else self._convert(origin)[name]
            tensors[name][: self._grown[name]] = saved_rows
        for name in tensors.keys() & self._kept_rows.keys():
            origin, rows = self._kept_rows[name]
            fill_rows(tensors[name], self._read(origin), rows)
        return tensors

    def _read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        assert self._files is not None
        return self._files.read(name, index)

    def _convert(self, conversion: Conversion, rows: slice | None = None) -> dict[str, torch.Tensor]:
        assert self._files is not None
        tensors = conversion.convert(self._reference, self._files, rows)
        return {self.names[name]: value for name, value in tensors.items()}

    def _stack(self, conversion: Conversion, indices: list[LocalIndices]) -> torch.Tensor:
        """Return the shard of a tensor whose rows are saved one by one. Only local rows are read."""
        first, *others = indices
        (rows,) = self._convert(conversion, first.span).values()
        return first.select(_select(rows.__getitem__, [LocalIndices(torch.arange(len(rows))), *others]), 0)


def fill_rows(tensor: torch.Tensor, saved: torch.Tensor, old_rows: Mapping[int, int]) -> None:
    """Copy the rows `old_rows` (row in `tensor` -> row in `saved`)."""
    if old_rows:
        tensor[list(old_rows)] = saved[list(old_rows.values())].to(tensor)


def _index(compute: Callable[[], dict[str, torch.Tensor]], name: str, index: tuple[slice, ...]) -> torch.Tensor:
    return compute()[name][index]


def _select(source: Callable[[tuple[slice, ...]], torch.Tensor], indices: list[LocalIndices]) -> torch.Tensor:
    tensor = source(tuple(dim_indices.span for dim_indices in indices))
    for dim, dim_indices in enumerate(indices):
        tensor = dim_indices.select(tensor, dim)
    return tensor
