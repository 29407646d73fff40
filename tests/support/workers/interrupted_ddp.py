"""A run that is interrupted right after a step's sum over processes: its model's end comes after the process group's.

torchrun --nproc-per-node 2 interrupted_ddp.py FOLDER        writes how many threads of gloo live on then, by rank
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from artel.parallel import join_world


def interrupted() -> None:
    with join_world(threads=1):
        model = DistributedDataParallel(torch.nn.Linear(64, 64), gradient_as_bucket_view=True)
        sys.setswitchinterval(30)  # seconds for which the interpreter's lock is held, if nothing gives it up
        model(torch.ones(2, 64)).sum().backward()
        raise KeyboardInterrupt


def gloo_threads() -> int:
    names = (thread.read_text() for thread in Path("/proc/self/task").glob("*/comm"))
    return sum(name.startswith("pt_gloo_runloop") for name in names)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        interrupted()
    # Here all is gone that the block held, the model among it.
    (Path(sys.argv[1]) / os.environ["RANK"]).write_text(str(gloo_threads()))
