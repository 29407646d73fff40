"""Tensors that processes share, each one's pieces in safetensors files: torch.distributed.checkpoint without pickle.

Its own metadata file is a pickle; that of its safetensors form stands in each file's header (`DCP_SHARDING_INFO`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,
    FORMAT_KEY,
    FORMAT_VALUE,
    HF_DCP_VERSION,
    SAVED_OFFSETS_KEY,
    _gen_file_name,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from artel.errors import WorkError


def told_by_first(said: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """What the first process says, on all of a group."""
    holder = [said]
    dist.broadcast_object_list(holder, src=0, group=group)
    return holder[0]


def write_pieces(folder: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Write each process's pieces of `tensors` (plain, or DTensors) into a folder that all see. All of a group call it.

    Raises WorkError, on every process alike, when one of them cannot.
    """
    try:
        writer = _ShardWriter(str(folder), save_distributed=True)
        save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # derives from BaseException
        raise _told(folder, error) from None


def read_pieces(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `tensors` (plain, or DTensors of any layout) with what is stored under their names, whole or in pieces.

    Each process reads what it needs, and says nothing to the others. Raises WorkError.
    """
    try:
        load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise _told(folder, error) from None


def piece_shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of each tensor stored in a folder, whole or in pieces."""
    stored_tensors = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: (stored.size, stored.properties.dtype) for name, stored in stored_tensors.items()}  # type: ignore[union-attr]


class _ShardWriter(HuggingFaceStorageWriter):
    """Writes the file of a rank's shards from where they lie; PyTorch's own first joins their bytes, in two copies."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """`_write_files_from_queue` of torch.distributed.checkpoint, with `save_file` in place of `save`."""
        tensors, places = {}, {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            assert item.tensor_data is not None
            tensors[item.index.fqn] = tensor.detach().contiguous()
            places[item.index.fqn] = {SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets}
        if tensors:
            file = Path(self.path, _gen_file_name(1, 1, plan.storage_data["shard_index"]))
            header = {CUSTOM_METADATA_KEY: json.dumps(places), DCP_VERSION_KEY: str(HF_DCP_VERSION)}
            save_file(tensors, file, metadata=header | {FORMAT_KEY: FORMAT_VALUE})
            with file.open("rb") as written:
                os.fsync(written.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result([])  # where the tensors lie stands in the header of each file
        return done


def _told(folder: Path, error: BaseException) -> WorkError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return WorkError.at(str(folder), lines[-1] if lines else type(error).__name__)
