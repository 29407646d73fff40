"""Weights put into a model that was taken apart on the meta device: what this process holds of each, and no more.

What a saved model has is read a slice at a time; what is new is initialised a module at a time (`initial`), of which
the process keeps its part. Beside those parts a process holds one module's tensors at most. An engine that takes
parameters apart when they have their values (DeepSpeed) is given them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from artel.errors import InputError
from artel.models.loading.conversion import Conversion, Loading
from artel.models.loading.init_weights import first_values, initial_names
from artel.models.loading.safetensors_files import TensorFiles


@dataclass(slots=True)
class Weights:
    """Where the weights of a model come from."""

    reference: PreTrainedModel
    """The whole model on the meta device, not taken apart."""
    seed: int
    files: TensorFiles | None = None
    loading: Loading | None = None
    grown: dict[str, int] = field(default_factory=dict)
    """Parameters that were given more rows than they had before: how many these were."""


Read = Callable[[list["Part"]], torch.Tensor]
"""What gives a process its part of one tensor."""


class WeightLoader(Protocol):
    """`materialize` with the weights of a run's model."""

    def __call__(
        self,
        model: nn.Module,
        *,
        device: torch.device | str,
        each: Callable[[nn.Parameter], None] | None = None,
        reads: bool = True,
    ) -> None: ...


def materialize(
    model: nn.Module,
    weights: Weights,
    *,
    device: torch.device | str,
    each: Callable[[nn.Parameter], None] | None = None,
    reads: bool = True,
) -> None:
    """Make every parameter and buffer of `model` that is on the meta device real, on `device`, with its values.

    The model is that of `weights.reference` by the names of its modules; some may be missing (stages of a pipeline).
    Its parameters are plain tensors of full size, or DTensors with any mesh and placements. They stay the same
    objects, tied ones tied, and need a gradient as before. No process waits for another, so that each may hold
    different modules. Buffers that are real already move to `device`.

    `each` is given every parameter as soon as it has its values, in the same order on every process, and may take its
    memory away: no more is held at once than one module's. A process that does not `read` gives it memory without
    values, into which another's come; buffers it reads all the same.
    """
    sources = _Sources(weights)
    with torch.no_grad(), weights.files or nullcontext():
        places = _places(model, sources.names, device)
        if each is None:
            _take_memory(places)
        for name in list(places):
            if name in places:  # else it came with another
                _fill(name, places, sources, each, reads)
    for module in model.modules():
        for own, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[own] = buffer.to(device)


def _take_memory(places: dict[str, list[_Place]]) -> None:
    """All at once: among whole modules that come and go, the heap would be left with holes between the parts (137
    instead of 71 MB were seen for a quarter of 190 MB)."""
    for place in (place for same in places.values() for place in same):
        place.take_memory()


def _fill(
    name: str,
    places: dict[str, list[_Place]],
    sources: _Sources,
    each: Callable[[nn.Parameter], None] | None,
    reads: bool,
) -> None:
    """Fill one of `places` and those that come with it; what was read in full for it is let go at the end."""
    for other, read in sources.find(name, places.keys()).items():
        for place in places.pop(other):
            parameter = place.tensor if isinstance(place.tensor, nn.Parameter) else None
            place.fill(read if reads or parameter is None else None)
            if each is not None and parameter is not None:
                each(parameter)


class Part:
    """The places of one dimension that a process holds: a span, or any."""

    def __init__(self, places: torch.Tensor) -> None:
        first = int(places[0]) if len(places) else 0
        last = int(places[-1]) + 1 if len(places) else 0
        self.span = slice(first, last)
        self._chosen = None if last - first == len(places) else places - first

    def choose(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """These places of a tensor that has those of `span`."""
        return tensor if self._chosen is None else tensor.index_select(dim, self._chosen)


@dataclass(slots=True)
class _Place:
    """A parameter or buffer of the model on the meta device, and what takes its place."""

    module: nn.Module
    own: str
    tensor: torch.Tensor
    device: torch.device | str
    real: torch.Tensor | None = None

    def take_memory(self) -> torch.Tensor:
        if self.real is None:
            self.real = torch.empty_like(self.tensor, device=self.device)
        return self.real

    def fill(self, read: Read | None) -> None:
        """Make it real, with what is read for the part that is here, if anything is."""
        real = self.take_memory()
        here = real.to_local() if isinstance(real, DTensor) else real
        if read is not None and here.numel():
            found = read(local_parts(self.tensor))
            if found.shape != here.shape:
                raise ValueError(f"{self.own}: {tuple(found.shape)} were read for {tuple(here.shape)}")
            here.copy_(found)
        if isinstance(self.tensor, nn.Parameter):
            parameter = nn.Parameter(real, requires_grad=self.tensor.requires_grad)
            parameter.__dict__.update(self.tensor.__dict__)  # what others have noted on it
            torch.utils.swap_tensors(self.tensor, parameter)
        else:
            self.module._buffers[self.own] = real


def local_parts(tensor: torch.Tensor) -> list[Part]:
    """Which places of each dimension this process holds of a tensor: all of a plain one, its shard of a DTensor."""
    places = [torch.arange(size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None, "this process is not in the mesh of its own parameter"
        for dimension in _order(tensor):
            placement: Any = tensor.placements[dimension]
            groups = 1 if _is_outer(tensor, dimension) else getattr(placement, "split_factor", 1)
            size, here = tensor.device_mesh.size(dimension), coordinate[dimension]
            pieces = [_chunk(group, size, here) for group in _chunks(places[placement.dim], groups)]
            places[placement.dim] = torch.cat(pieces)
    return [Part(found) for found in places]


def _order(tensor: DTensor) -> list[int]:
    """The dimensions of the mesh that cut a tensor, in the order in which they do.

    From left to right, but for what PyTorch calls a strided shard: fully_shard cuts what tensor parallelism has cut,
    though its dimension of the mesh comes first. (PyTorch's own way to see these from left to right is the same where
    sizes divide, which these need not.)
    """
    order: list[int] = []
    for dimension in reversed(range(len(tensor.placements))):
        if not hasattr(tensor.placements[dimension], "dim"):
            continue
        if _is_outer(tensor, dimension):
            order.append(dimension)
        else:
            order.insert(0, dimension)
    return order


def _is_outer(tensor: DTensor, dimension: int) -> bool:
    """Whether a shard cuts what the dimensions of the mesh after it have cut: as many pieces as its split factor."""
    placement: Any = tensor.placements[dimension]
    others = range(dimension + 1, len(tensor.placements))
    cut = 1
    for other in others:
        if getattr(tensor.placements[other], "dim", None) == placement.dim:
            cut *= tensor.device_mesh.size(other)
    return cut > 1 and getattr(placement, "split_factor", 1) == cut


def _chunk(places: torch.Tensor, count: int, which: int) -> torch.Tensor:
    """One of `count` pieces as torch.chunk cuts them, the last ones smaller or empty."""
    size = -(-len(places) // count)
    return places[which * size : (which + 1) * size]


def _chunks(places: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [_chunk(places, count, which) for which in range(count)]


def _places(model: nn.Module, names: dict[str, str], device: torch.device | str) -> dict[str, list[_Place]]:
    """What is on the meta device, by the name under which it is initialised."""
    places: dict[str, list[_Place]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.is_meta or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            name = names[f"{prefix}.{own}" if prefix else own]
            places.setdefault(name, []).append(_Place(module, own, tensor, device))
    return places


class _Sources:
    """What gives each tensor of a model its values, by the name under which it is initialised."""

    def __init__(self, weights: Weights) -> None:
        self.names = initial_names(weights.reference)
        self._reference, self._seed, self._files = weights.reference, weights.seed, weights.files
        loading = weights.loading
        saved: dict[str, str | Conversion] = {}
        if loading is not None:
            saved = {**loading.converted, **loading.same}
        self._saved = {self.names[name]: origin for name, origin in saved.items()}
        grown = {self.names[name]: rows for name, rows in weights.grown.items()}
        self._grown = {name: rows for name, rows in grown.items() if name in self._saved}

    def find(self, name: str, wanted: Set[str]) -> dict[str, Read]:
        """How to read a tensor, and those of `wanted` that come with it; what is made for all is made when one is read.

        Their order is the same on every process.
        """
        origin = self._saved.get(name)
        if origin is None or name in self._grown:
            prefix = name.rpartition(".")[0]
            anew = self._anew(prefix, wanted)
            together = [f"{prefix}.{own}" if prefix else own for own in anew]
            make = cache(partial(self._initialise, prefix, anew))
        elif isinstance(origin, str):
            return {name: partial(_take, partial(self._read, origin))}
        elif origin.is_stacked:
            return {name: partial(self._stack, origin)}
        else:
            together = [self.names[made] for made in origin.made]
            make = cache(partial(self._convert, origin))
        return {other: partial(_take, partial(_index, make, other)) for other in together if other in wanted}

    def _anew(self, prefix: str, wanted: Set[str]) -> list[str]:
        """Of a module's own tensors those of `wanted` that are not saved, or not all of their rows."""
        module = self._reference.get_submodule(prefix)
        start = f"{prefix}." if prefix else ""
        own = [*module._parameters, *module._buffers]
        return [name for name in own if start + name in wanted and self._is_new(start + name)]

    def _initialise(self, prefix: str, anew: list[str]) -> dict[str, torch.Tensor]:
        """Tensors of a module, with the rows that are saved."""
        start = f"{prefix}." if prefix else ""
        whole = not set(anew) <= self._reference.get_submodule(prefix)._non_persistent_buffers_set
        try:
            values = first_values(self._reference, prefix, self._seed, whole=whole)
        except Exception as error:  # each architecture has its own rules, and does not check what they are given
            first = " ".join(str(error).split())[:300] or type(error).__name__
            kind = self._reference.config.model_type
            raise InputError.at("model.config", f"{kind} cannot be initialised: {first}", "check its values") from None
        found = {start + name: values[name] for name in anew}
        for name in found.keys() & self._grown.keys():
            origin = self._saved[name]
            old = self._read(origin) if isinstance(origin, str) else self._convert(origin)[name]
            found[name][: self._grown[name]] = old
        return found

    def _is_new(self, name: str) -> bool:
        return name not in self._saved or name in self._grown

    def _read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        assert self._files is not None
        return self._files.read(name, index)

    def _convert(self, conversion: Conversion, rows: slice | None = None) -> dict[str, torch.Tensor]:
        assert self._files is not None
        made = conversion.convert(self._reference, self._files, rows)
        return {self.names[name]: value for name, value in made.items()}

    def _stack(self, conversion: Conversion, parts: list[Part]) -> torch.Tensor:
        """A part of a tensor whose rows are saved one by one: only those that are here are read."""
        first, *others = parts
        (rows,) = self._convert(conversion, first.span).values()
        return first.choose(_take(rows.__getitem__, [Part(torch.arange(len(rows))), *others]), 0)


def _index(make: Callable[[], dict[str, torch.Tensor]], name: str, index: tuple[slice, ...]) -> torch.Tensor:
    return make()[name][index]


def _take(source: Callable[[tuple[slice, ...]], torch.Tensor], parts: list[Part]) -> torch.Tensor:
    found = source(tuple(part.span for part in parts))
    for dim, part in enumerate(parts):
        found = part.choose(found, dim)
    return found
