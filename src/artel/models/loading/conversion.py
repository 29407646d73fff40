"""Which tensors of a saved model make which parameters of a model, found without reading a number.

Names and forms are converted by transformers' own table: most tensors have another name at most; some are merged
(experts that are saved one by one), split or transposed.
"""

from __future__ import annotations

import copy
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
    """Tensors that make one or several parameters together."""

    first: str
    """The parameter, or the first of those, by its full name."""
    how: WeightConverter
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names of tensors, for each pattern of the converter."""
    made: list[str] = field(default_factory=list)
    """All of the parameters."""

    def convert(
        self, reference: PreTrainedModel, files: TensorFiles, rows: slice | None = None
    ) -> dict[str, torch.Tensor]:
        """The parameters in full; of those that `is_stacked` the `rows`. `reference` is the model on meta."""
        own = reference.get_parameter_or_buffer(self.first).dtype
        chosen = {pattern: names[rows] if rows else names for pattern, names in self.sources.items()}
        return self._run(reference, chosen, lambda name: files.read(name).to(own), None)

    @property
    def is_stacked(self) -> bool:
        """Whether each row of the parameter is made of one tensor a pattern: experts, saved one by one."""
        first, *others = self.how.operations
        return (
            len(self.made) == 1
            and isinstance(first, MergeModulelist)
            and first.dim == 0
            and all(
                (isinstance(other, Concatenate) and other.dim > 0)
                or (isinstance(other, Transpose) and other.dim0 > 0 and other.dim1 > 0)
                for other in others
            )
        )

    def shapes(
        self, reference: PreTrainedModel, files: TensorFiles, info: LoadStateDictInfo
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters; none, and a word in `info`, where they cannot be made."""
        try:
            found = self._run(reference, self.sources, lambda name: torch.empty(files.shape(name), device="meta"), info)
        except SkipParameters:
            return {}
        self.made = list(found)
        return {name: tuple(value.shape) for name, value in found.items()}

    def _run(
        self, reference: PreTrainedModel, sources: dict[str, list[str]], read: Any, info: LoadStateDictInfo | None
    ) -> dict[str, torch.Tensor]:
        how = copy.deepcopy(self.how)
        for pattern, names in sources.items():
            for name in names:
                how.add_tensor(self.first, name, pattern, partial(read, name))
        found = how.convert(self.first, model=reference, config=reference.config, loading_info=info)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


@dataclass(slots=True)
class Loading:
    """What each parameter or buffer that a saved model has is made of, by full name; and what did not fit."""

    same: dict[str, str]
    """Those that are a tensor of the files: its name there."""
    converted: dict[str, Conversion]
    info: LoadStateDictInfo
    used: list[Any]
    """transformers' conversions that applied: a model is saved by undoing them."""


def plan_loading(model: PreTrainedModel, files: TensorFiles) -> Loading:
    """How `model`, on the meta device and not tied, is made of what is in `files`; no tensor is read."""
    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    tensors, prefix = model.state_dict(), model.base_model_prefix
    empty: dict[str, Any] = {"conversion_errors": {}, "error_msgs": []}
    info = LoadStateDictInfo(**{key.name: empty.get(key.name, set()) for key in fields(LoadStateDictInfo)})
    info.missing_keys = set(tensors)
    same: dict[str, str] = {}
    conversions: dict[str, Conversion] = {}
    for key in sorted(files.names, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, tensors)
        if name not in tensors and key in tensors:  # it has the new name already
            name, pattern = rename_source_key(key, [], [], prefix, tensors)
        if name in tensors and pattern is None:
            same.setdefault(name, key)
        elif name in tensors:
            conversion = conversions.setdefault(name, Conversion(name, by_pattern[pattern]))
            conversion.sources.setdefault(pattern, []).append(key)
        elif pattern is None:
            info.unexpected_keys.add(name)
        else:
            targets = by_pattern[pattern].target_patterns
            info.unexpected_keys |= {name.replace(targets[0], target) for target in targets}
    shapes = {name: files.shape(key) for name, key in same.items()}
    for conversion in conversions.values():
        shapes |= conversion.shapes(model, files, info)
    for name, shape in shapes.items():
        if name not in tensors:
            info.unexpected_keys.add(name)
            continue
        info.missing_keys.discard(name)
        if shape != tuple(tensors[name].shape):
            info.mismatched_keys.add((name, torch.Size(shape), tensors[name].shape))
    converted = {name: conversion for conversion in conversions.values() for name in conversion.made}
    # Earlier versions of transformers undo all of them.
    used = [entry for entry in table if not hasattr(entry, "was_used") or entry.was_used()]
    return Loading(same, converted, info, used)
