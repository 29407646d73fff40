"""Many processes at the price of one start: torch is imported once and forked; each rank runs the same function.

    python tests/support/ranks.py WORLD FILE FUNCTION OUT [SECONDS]

imports FILE (a path), forks WORLD processes that join one gloo group on loopback, one thread each, calls
FUNCTION(rank, world) in each and writes what they return, as JSON in order of rank, to OUT. The first rank that fails
ends the others; so does the time limit. A rank that dies after it has returned (in teardown) is an error too.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

_THIS = Path(__file__)


def run_ranks(world: int, file: str | Path, function: str, seconds: float = 400, **environment: str) -> list[Any]:
    """What FUNCTION of FILE returns in each of `world` processes, by rank. Raises AssertionError with their output."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(_THIS), str(world), str(file), function, str(out), str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
        assert done.returncode == 0, f"status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        results: list[Any] = json.loads(out.read_bytes())
        return results


def _rank(rank: int, world: int, port: int, function: Any, out: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    if world > 1:
        dist.init_process_group("gloo")
    result = function(rank, world)
    out.with_suffix(f".{rank}").write_text(json.dumps(result))
    if world > 1:
        dist.destroy_process_group()


def _time_is_over(*_: Any) -> None:
    raise TimeoutError


def _main() -> int:
    world, file, name, out, seconds = int(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]), 400.0
    if len(sys.argv) > 5:
        seconds = float(sys.argv[5])
    sys.path[0] = str(_THIS.parents[1])  # instead of this folder: FILE imports from support
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    for needed in ("torch.distributed.tensor.parallel", "transformers.modeling_utils"):
        importlib.import_module(needed)  # before the fork, so that it is imported once

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children: dict[int, int] = {}
    for rank in range(world):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _rank(rank, world, port, getattr(module, name), out)
                status = 0
            except BaseException:
                sys.stderr.write(f"rank {rank}:\n{traceback.format_exc()}\n")
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        children[child] = rank
    ended: dict[int, int] = {}
    signal.signal(signal.SIGALRM, _time_is_over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with suppress(TimeoutError):
        while children and not any(ended.values()):
            child, status = os.waitpid(-1, 0)
            ended[children.pop(child)] = status
    signal.setitimer(signal.ITIMER_REAL, 0)
    if children:
        why = "the time limit is over" if not any(ended.values()) else "another rank failed"
        sys.stderr.write(f"ranks {sorted(children.values())} are ended: {why}\n")
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return 1
    if any(ended.values()):
        sys.stderr.write(f"wait statuses by rank: {ended}\n")
        return 1
    out.write_text(json.dumps([json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(world)]))
    return 0


if __name__ == "__main__":
    sys.exit(_main())
