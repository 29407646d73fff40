"""The tensors of a saved model, wherever its files lie: named, and read a slice at a time."""

from __future__ import annotations

import zipfile
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

# In the order in which transformers looks for them.
_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)


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
