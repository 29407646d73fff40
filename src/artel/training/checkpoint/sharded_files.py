"""Tensors that processes share, each one's pieces in safetensors files: torch.distributed.checkpoint without pickle.

Its own metadata file is a pickle; that of its safetensors form stands in each file's header (`DCP_SHARDING_INFO`).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from artel.errors import WorkError

try:
    from artel.training.checkpoint.shard_writer import ShardWriter
except ImportError:  # of a PyTorch that keeps the names of its format elsewhere: its own writer takes more memory
    ShardWriter = HuggingFaceStorageWriter  # type: ignore[assignment,misc]


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
        writer = ShardWriter(str(folder), save_distributed=True)
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


def _told(folder: Path, error: BaseException) -> WorkError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return WorkError.at(str(folder), lines[-1] if lines else type(error).__name__)
