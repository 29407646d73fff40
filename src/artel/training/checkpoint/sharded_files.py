"""Sharded tensors in safetensors files, through torch.distributed.checkpoint, without pickle.

The default metadata file of torch.distributed.checkpoint is a pickle. With safetensors the metadata is in each file's
header (`DCP_SHARDING_INFO`).
"""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from artel.errors import WorkError
from artel.training.optim.local_shards import Shapes


class _ShardWriter(HuggingFaceStorageWriter):
    """Writes a rank's shards directly. PyTorch's `write_data` first joins their bytes, in two copies."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Like `_write_files_from_queue` in torch.distributed.checkpoint, with `save_file` in place of `save`."""
        try:
            from torch.distributed.checkpoint import _hf_utils as hf
        except ImportError:  # another PyTorch version, with these names elsewhere
            return super().write_data(plan, planner)
        tensors, offsets = {}, {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, torch.Tensor)
            assert item.tensor_data is not None
            tensors[item.index.fqn] = tensor.detach().contiguous()
            offsets[item.index.fqn] = {hf.SAVED_OFFSETS_KEY: item.tensor_data.chunk.offsets}
        if tensors:
            file = Path(self.path, hf._gen_file_name(1, 1, plan.storage_data["shard_index"]))
            header = {hf.CUSTOM_METADATA_KEY: json.dumps(offsets), hf.DCP_VERSION_KEY: str(hf.HF_DCP_VERSION)}
            save_file(tensors, file, metadata=header | {hf.FORMAT_KEY: hf.FORMAT_VALUE})
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        result: Future[list[WriteResult]] = Future()
        result.set_result([])  # each file's header locates its tensors
        return result


def broadcast_from_first(value: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """Return rank 0's value on all ranks of a group."""
    holder = [value]
    dist.broadcast_object_list(holder, src=0, group=group)
    return holder[0]


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Write each process's shards of `tensors` (plain tensors or DTensors) into a shared folder. Collective.

    Raise WorkError on every process if one of them fails.
    """
    try:
        writer = _ShardWriter(str(folder), save_distributed=True)
        save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as error:  # derives from BaseException
        raise _work_error(folder, error) from None


def read_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill `tensors` (plain tensors or DTensors of any layout) with the values stored under their names.

    Each process reads its own shards, without communication. Raise WorkError if a file cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns that each process reads for itself
            load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        raise _work_error(folder, error) from None


def stored_shapes(folder: Path) -> Shapes:
    """Return the full shape and dtype of each stored tensor, sharded or not."""
    stored_tensors = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: (stored.size, stored.properties.dtype) for name, stored in stored_tensors.items()}  # type: ignore[union-attr]


def _work_error(folder: Path, error: BaseException) -> WorkError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return WorkError.at(str(folder), lines[-1] if lines else type(error).__name__)
