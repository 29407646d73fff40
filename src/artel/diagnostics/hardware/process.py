"""One of several processes that measure at the same time: python -m … FOLDER COUNT COMPILES, with RANK set."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import orjson
import torch
import torch.distributed as dist

from artel.diagnostics.hardware.operators import measure
from artel.host import usable_cores
from artel.parallel import local_device
from artel.training.memory import retained_host_memory


def main(folder: Path, count: int, compiles: bool) -> None:
    rank = int(os.environ["RANK"])
    device = local_device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, usable_cores() // count))
    if count > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=count)
    with retained_host_memory(device):  # as a run does: what is freed is not cleared and handed out anew
        measured = measure(device, compiles=compiles)
    if rank == 0:
        (folder / "result.json").write_bytes(orjson.dumps(measured))
    if count > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True")
