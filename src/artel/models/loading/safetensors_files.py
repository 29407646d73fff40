"""The tensors of a saved model by name, read a slice at a time, from a folder or the hub's cache."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Collection
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
_FILE_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
_DIFFER = "the weights and config.json are of different models"
_MAX_PACKED_WEIGHTS = 16  # 2-bit weights in one 32-bit number


class TensorFiles:
    """Tensors in safetensors files, or in `pytorch_model.bin` files without code. Use it as a context manager."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._open: list[Any] = []
        self._tensors: dict[str, Any] = {}

    def __enter__(self) -> TensorFiles:
        for file in self._files:
            if file.suffix == ".safetensors":
                opened = safe_open(file, framework="pt")
                self._open.append(opened)
                self._tensors |= {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # no mapping
            else:  # memory-mapped, except in the format before 2020
                mapped = zipfile.is_zipfile(file)
                self._tensors |= torch.load(file, map_location="cpu", weights_only=True, mmap=mapped or None)
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensors.clear()
        for opened in self._open:
            opened.__exit__(error_type, error, trace)
        self._open.clear()

    @property
    def paths(self) -> list[Path]:
        return self._files

    @property
    def have_headers(self) -> bool:
        """True if names and shapes can be read without the tensors."""
        return all(file.suffix == ".safetensors" for file in self._files)

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensors[name]
        return tuple(tensor.shape if isinstance(tensor, torch.Tensor) else tensor.get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return self.read(name, (slice(0, 0),) if self.shape(name) else ()).dtype

    def read(self, name: str, index: tuple[slice, ...] = ()) -> torch.Tensor:
        """Return the slice `index` of a tensor, by default all of it."""
        return self._tensors[name][index or ...]


def find_files(name: str, config: PreTrainedConfig) -> TensorFiles:
    """Return the weight files of a folder or hub id. Raise OSError if there are none."""
    configured_name = getattr(config, "transformers_weights", None)
    for file_name in (configured_name,) if configured_name else _FILE_NAMES:
        file = cached_file(name, file_name, _raise_exceptions_for_missing_entries=False)
        if file is None:
            continue
        if file.endswith(".index.json"):
            shards, _ = get_checkpoint_shard_files(name, file)
            return TensorFiles([Path(shard) for shard in shards])
        return TensorFiles([Path(file)])
    raise OSError(f"{name} does not appear to have a file named {WEIGHTS_NAME} or {SAFE_WEIGHTS_NAME}.")


def saved_dtypes(name: str, config: PreTrainedConfig) -> dict[str, torch.dtype]:
    """Return the dtypes of floating-point tensors of 16 bits or more in a folder or hub id."""
    with find_files(name, config) as files:
        dtypes = {key: files.dtype(key) for key in files.names}
    return {key: dtype for key, dtype in dtypes.items() if dtype.is_floating_point and dtype.itemsize > 1}


def check_shapes(model: PreTrainedModel, name: str, config: PreTrainedConfig, ignored: Collection[str] = ()) -> None:
    """Raise InputError if a tensor of a folder or hub id has another shape than in `model` (may be on the meta device).

    Call it before a model is allocated, since a wrong configuration may describe a model of any size. For the same
    reason, files with far fewer numbers than the model are refused. Compares tensors with the model's names, except
    those in `ignored`, and reads headers only. Packed weights of a quantized folder have other shapes, so only their
    number is checked.
    """
    files = find_files(name, config)
    if not files.have_headers:
        return
    with files:
        saved_names = set(files.names)
        is_packed = getattr(config, "quantization_config", None) is not None
        for parameter, tensor in () if is_packed else model.named_parameters():
            if parameter in saved_names and parameter not in ignored and files.shape(parameter) != tuple(tensor.shape):
                what = f"{name}: {parameter} is {files.shape(parameter)}, by its config.json {tuple(tensor.shape)}"
                raise InputError.at("model.from", what, _DIFFER)
        saved_size = sum(math.prod(files.shape(key)) for key in saved_names)
    model_size = sum(tensor.numel() for tensor in model.parameters())
    if model_size > _MAX_PACKED_WEIGHTS * saved_size:
        what = f"{name} has {saved_size:,} numbers, by its config.json {model_size:,} parameters"
        raise InputError.at("model.from", what, _DIFFER)
