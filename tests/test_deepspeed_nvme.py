"""DeepSpeed's offload to a disk: weights and averages in files, the numbers of a run in memory."""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.runs import DEEPSPEED, artel, largest_difference, losses, write_run

LIBAIO = Path("/usr/include/libaio.h")


@contextmanager
def files_seen(folder: Path) -> Iterator[set[str]]:
    """The files that were in a folder at some time: DeepSpeed removes its own when it ends."""
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            seen.update(file.name for file in folder.rglob("*") if file.is_file())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield seen
    finally:
        over.set()
        looking.join()


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.usefixtures("deepspeed_beside")
@pytest.mark.skipif(not LIBAIO.is_file(), reason="libaio is not installed (apt install libaio-dev)")
def test_weights_and_averages_on_a_disk_change_no_number(tmp_path):
    swap = tmp_path / "swap"
    swap.mkdir()
    on_disk = {"device": "nvme", "nvme_path": str(swap), "buffer_count": 5}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "offload_optimizer": on_disk}
    zero["offload_param"] = on_disk | {"buffer_size": 1_000_000}  # numbers of the largest parameter
    aio = {"block_size": 2**20, "queue_depth": 8, "thread_count": 1}
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero, "aio": aio}))
    # Tensors of less than a megabyte stay in memory: matrices of 2.4, half of that on two processes.
    asked = {
        "model": {"config": {"n_embd": 384}},
        "train": {"optimizer": "adamw", "micro_batch": 8},
        "checkpoint": {"every": "never", "best": None},
    }
    runs = [write_run(tmp_path / "memory.yaml", **asked)]
    runs += [
        write_run(tmp_path / f"disk{world}.yaml", **asked, parallel={"deepspeed": str(tmp_path / "ds.json")})
        for world in (1, 2)
    ]
    # The part that reads and writes is compiled by the first run, in two minutes; ninja lies with DeepSpeed.
    paths = {
        "PYTHONPATH": [os.environ.get("PYTHONPATH"), str(DEEPSPEED)],
        "PATH": [str(DEEPSPEED / "bin"), os.environ["PATH"]],
    }
    env = {name: os.pathsep.join(filter(None, parts)) for name, parts in paths.items()}
    env["TORCH_EXTENSIONS_DIR"] = os.environ.get("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    for world, run in zip((1, 1, 2), runs, strict=True):
        with files_seen(swap) as seen:
            done = artel("train", run, "--nproc", world, env=env, timeout=500)
        assert done.returncode == 0, done.stderr
        kinds = {kind for kind in ("param", "gradient") if any(kind in name for name in seen)}
        assert kinds == (set() if run is runs[0] else {"param", "gradient"})
    memory = losses(tmp_path / "memory")
    assert sorted(memory) == [1, 2, 3, 4, 5, 6]
    for world in (1, 2):
        assert largest_difference(memory, losses(tmp_path / f"disk{world}")) < 1e-5
