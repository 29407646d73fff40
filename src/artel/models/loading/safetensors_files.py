"""The tensors of a saved model, wherever its files lie: named, and read a slice at a time."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from artel.errors import InputError

# In the order in which transformers looks for them.
_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


_DIFFER = "the weights and config.json are of different models"
# Weights of 2 bits lie sixteen in a number.
_PACKED = 16


class TensorFiles:
    """Tensors in safetensors files, or in `pytorch_model.bin` files of tensors only; open inside a `with`."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._open: list[Any] = []
        self._tensors: dict[str, Any] = {}

    def __enter__(self) -> TensorFiles:
        for file in self._files:
            if file.suffix == ".safetensors":
                held = safe_open(file, framework="pt")
                self._open.append(held)
                self._tensors |= {name: held.get_slice(name) for name in held.keys()}  # noqa: SIM118  # not a mapping
            else:  # of tensors that lie in the file nothing is read yet; the format of before 2020 has no such thing
                mapped = zipfile.is_zipfile(file)
                self._tensors |= torch.load(file, map_location="cpu", weights_only=True, mmap=mapped or None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensors.clear()
        for held in self._open:
            held.__exit__(kind, error, trace)
        self._open.clear()

    @property
    def have_headers(self) -> bool:
        """Whether names and shapes are read without the tensors."""
        return all(file.suffix == ".safetensors" for file in self._files)

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._tensors[name]
        return tuple(found.shape if isinstance(found, torch.Tensor) else found.get_shape())

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """The part of a tensor between places of its dimensions; all of it without `index`."""
        return self._tensors[name][index or ...]


def find_files(name: str, config: PreTrainedConfig) -> TensorFiles:
    """The files with the weights of a folder or hub id. Raises OSError where there are none."""
    explicit = getattr(config, "transformers_weights", None)
    for wanted in (explicit,) if explicit else _NAMES:
        found = cached_file(name, wanted, _raise_exceptions_for_missing_entries=False)
        if found is None:
            continue
        if found.endswith(".index.json"):
            shards, _ = get_checkpoint_shard_files(name, found)
            return TensorFiles([Path(shard) for shard in shards])
        return TensorFiles([Path(found)])
    raise OSError(f"{name} does not appear to have a file named {WEIGHTS_NAME} or {SAFE_WEIGHTS_NAME}.")


def check_shapes(model: PreTrainedModel, name: str, config: PreTrainedConfig) -> None:
    """Raise InputError where a tensor of a folder or hub id has another shape than in `model`, which may be on meta.

    It is asked before a model of a wrong configuration, and of any size, is made; so far fewer numbers than such a
    model has are refused, too. Only tensors whose names are those of
    the model are looked at, and only where that costs no reading.
    """
    files = find_files(name, config)
    if not files.have_headers:
        return
    with files:
        there = set(files.names)
        for parameter, tensor in model.named_parameters():
            if parameter in there and files.shape(parameter) != tuple(tensor.shape):
                what = f"{name}: {parameter} is {files.shape(parameter)}, by its config.json {tuple(tensor.shape)}"
                raise InputError.at("model.from", what, _DIFFER)
        saved = sum(math.prod(files.shape(key)) for key in there)
    built = sum(tensor.numel() for tensor in model.parameters())
    if built > _PACKED * saved:
        what = f"{name} has {saved:,} numbers, by its config.json {built:,} parameters"
        raise InputError.at("model.from", what, _DIFFER)
