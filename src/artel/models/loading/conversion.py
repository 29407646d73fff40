"""A loading plan maps saved tensors to the parameters of a model. Making it reads no values.

transformers' conversion table maps names and shapes. Most tensors are only renamed. Some are merged (experts saved one
by one), split or transposed.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    SkipParameters,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.loading_report import LoadStateDictInfo

from artel.models.loading.safetensors_files import TensorFiles


@dataclass(slots=True)
class Conversion:
    """Saved tensors that are converted together to one or several parameters."""

    first_target: str
    """The full name of the parameter, or of the first one."""
    converter: WeightConverter
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names of saved tensors, by pattern of the converter."""
    targets: list[str] = field(default_factory=list)
    """The full names of all parameters."""

    def convert(
        self, reference: PreTrainedModel, files: TensorFiles, rows: slice | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the full parameters, or `rows` of one that `is_stacked`. `reference`: the model on the meta device."""
        dtype = reference.get_parameter_or_buffer(self.first_target).dtype
        sources = {pattern: names[rows] if rows else names for pattern, names in self.sources.items()}
        return self._run(reference, sources, lambda name: files.read(name).to(dtype), None)

    @property
    def is_stacked(self) -> bool:
        """True if each row of the parameter is one saved tensor per pattern: experts saved one by one."""
        first, *other_operations = self.converter.operations
        return (
            len(self.targets) == 1
            and isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(
                (isinstance(operation, Concatenate) and operation.dim > 0)
                or (isinstance(operation, Transpose) and operation.dim0 > 0 and operation.dim1 > 0)
                for operation in other_operations
            )
        )

    def shapes(
        self, reference: PreTrainedModel, files: TensorFiles, info: LoadStateDictInfo
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters. Empty, with an entry in `info`, if the conversion fails."""
        try:
            tensors = self._run(
                reference, self.sources, lambda name: torch.empty(files.shape(name), device="meta"), info
            )
        except SkipParameters:
            return {}
        self.targets = list(tensors)
        return {name: tuple(value.shape) for name, value in tensors.items()}

    def _run(
        self, reference: PreTrainedModel, sources: dict[str, list[str]], read: Any, info: LoadStateDictInfo | None
    ) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)
        for pattern, names in sources.items():
            for name in names:
                converter.add_tensor(self.first_target, name, pattern, partial(read, name))
        tensors = converter.convert(self.first_target, model=reference, config=reference.config, loading_info=info)
        return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}


@dataclass(slots=True)
class LoadingPlan:
    """The source of each saved parameter or buffer, by full name, and the names that did not match."""

    key_of_target: dict[str, str]
    """Names in the files of parameters and buffers that are saved as one tensor."""
    conversion_of_target: dict[str, Conversion]
    info: LoadStateDictInfo
    used_entries: list[Any]
    """transformers' conversions that were applied. Saving reverts them."""
    unused: list[str] = field(default_factory=list)
    """Tensors of the files that are not part of any parameter or buffer."""

    def leave_out(self, names: Collection[str]) -> None:
        """Do not load these names: they become missing keys."""
        for name in names:
            self.key_of_target.pop(name, None)
            self.conversion_of_target.pop(name, None)
            self.info.missing_keys.add(name)
        self.info.mismatched_keys = {entry for entry in self.info.mismatched_keys if entry[0] not in names}


def plan_loading(model: PreTrainedModel, files: TensorFiles) -> LoadingPlan:
    """Plan how to load `model`, which is on the meta device and untied, from `files`. Reads no tensors."""
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    tensors, prefix = model.state_dict(), model.base_model_prefix
    empty: dict[str, Any] = {"conversion_errors": {}, "error_msgs": []}
    info = LoadStateDictInfo(**{key.name: empty.get(key.name, set()) for key in fields(LoadStateDictInfo)})
    info.missing_keys = set(tensors)
    key_of_target: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    unused: list[str] = []
    for key in sorted(files.names, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, tensors)
        if name not in tensors and key in tensors:  # the file already uses the new name
            name, pattern = rename_source_key(key, [], [], prefix, tensors)
        if name in tensors and pattern is None:
            key_of_target.setdefault(name, key)
        elif name in tensors:
            conversion = conversions.setdefault(name, Conversion(name, by_pattern[pattern]))
            conversion.sources.setdefault(pattern, []).append(key)
        elif pattern is None:
            unused.append(key)
            info.unexpected_keys.add(name)
        else:
            unused.append(key)
            targets = by_pattern[pattern].target_patterns
            info.unexpected_keys |= {name.replace(targets[0], target) for target in targets}
    shapes = {name: files.shape(key) for name, key in key_of_target.items()}
    for conversion in conversions.values():
        shapes |= conversion.shapes(model, files, info)
    for name, shape in shapes.items():
        if name not in tensors:
            info.unexpected_keys.add(name)
            continue
        info.missing_keys.discard(name)
        if shape != tuple(tensors[name].shape):
            info.mismatched_keys.add((name, torch.Size(shape), tensors[name].shape))
    conversion_of_target = {name: conversion for conversion in conversions.values() for name in conversion.targets}
    # Earlier versions of transformers revert all entries.
    used_entries = [entry for entry in table if not hasattr(entry, "was_used") or entry.was_used()]
    return LoadingPlan(key_of_target, conversion_of_target, info, used_entries, unused)
