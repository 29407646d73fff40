"""The file of a rank's shards, in the format of torch.distributed.checkpoint's safetensors files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
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
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class ShardWriter(HuggingFaceStorageWriter):
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
