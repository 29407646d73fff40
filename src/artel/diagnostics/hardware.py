"""`artel hardware`: measures this machine with one and several processes, and saves the result for `artel plan`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

from artel.errors import WorkError
from artel.host import usable_cores
from artel.messages import logger
from artel.parallel import local_device
from artel.planning.rates import Points, Rates, measurement_identity, save_rates

_COLLECTIVE_ACTIONS = {"all_reduce": "reduced", "all_gather": "gathered", "reduce_scatter": "reduced and scattered"}
_TIMEOUT_SECONDS = 1200  # on a busy host imports alone may take a minute


@dataclass(frozen=True, slots=True)
class Measurement:
    """Rates of this machine, and the file that has them."""

    machine: dict[str, Any]
    """Device, CPU cores and time of the measurement."""
    rates: list[Rates]
    path: Path
    seconds: float

    def lines(self) -> list[str]:
        """Return a line for each rate per process, at the largest measured size."""
        named_rates = []
        for rates in self.rates:
            suffix = f" x {rates.processes}" if rates.processes > 1 else ""
            named_rates += [(f"{key}{suffix}", _format_rate(key, points)) for key, points in rates.points.items()]
        width = max(len(name) for name, _ in named_rates)
        return [f"{name:<{width}}  {rate}" for name, rate in named_rates]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.machine,
            "seconds": self.seconds,
            "file": str(self.path),
            "processes": {str(rates.processes): rates.points for rates in self.rates},
        }


def measure_hardware() -> Measurement:
    """Measure one process, then two at once (with GPUs, one per GPU), and keep the result.

    Raise WorkError if a process fails.
    """
    start = time.monotonic()
    device = local_device()
    identity = measurement_identity(device)
    rates = []
    max_processes = torch.cuda.device_count() if device.type == "cuda" else 2
    for num_processes in (1, max_processes) if max_processes > 1 else (1,):
        logger.info("measuring %s: %s process(es)", identity["device"], num_processes)
        rates.append(Rates(num_processes, _run_processes(num_processes)))
    identity |= {"cores": usable_cores(), "measured": time.strftime("%Y-%m-%d %H:%M")}
    return Measurement(identity, rates, save_rates(identity, rates), time.monotonic() - start)


def _run_processes(num_processes: int) -> dict[str, Points]:
    """Measure in `num_processes` processes at the same time. Return the results of the first."""
    can_compile = torch.cuda.is_available() or bool(shutil.which("g++") or shutil.which("clang++"))
    environment = dict(os.environ)
    if sys.platform.startswith("linux"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "artel.diagnostics.hardware", name, str(num_processes), str(can_compile)]
        processes = []
        try:
            for rank in range(num_processes):
                with (folder / f"{rank}.log").open("wb") as log:
                    rank_environment = {**environment, "RANK": str(rank)}
                    processes.append(subprocess.Popen(command, env=rank_environment, stdout=log, stderr=log))
            failed = [process for process in processes if process.wait(_TIMEOUT_SECONDS)]
        except subprocess.TimeoutExpired:
            failed = processes
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed:
            text = (folder / f"{processes.index(failed[0])}.log").read_text(errors="replace")
            log_tail = tuple(text.splitlines()[-5:])
            raise WorkError.at("artel hardware", f"{num_processes} process(es) could not be measured", "", log_tail)
        return orjson.loads((folder / "result.json").read_bytes())


def _format_rate(key: str, points: Points) -> str:
    """Format the rate at the largest size, with that size and its time."""
    size, seconds = points[-1]
    duration = f"{1000 * seconds:,.2f} ms"
    if key.startswith(("product", "attention")):
        return f"{size / seconds / 1e9:,.4g} GFLOP/s ({size / 1e9:,.2f} GFLOP in {duration})"
    if key == "waiting":
        return f"{1000 * seconds:,.4g} ms for the slower process, after both computed for {1000 * size:,.0f} ms"
    if key == "exponentials":
        return f"{size / seconds / 1e9:,.4g} 10^9/s ({size:,.0f} in {duration}, compiled)"
    if key in ("start", "dispatch"):
        operators = "operators on DTensors" if key == "dispatch" else "operators"
        return f"{1e6 * seconds / size:,.4g} µs ({size:,.0f} small {operators} in {duration})"
    action = _COLLECTIVE_ACTIONS.get(key, "read and written")
    return f"{size / seconds / 1e9:,.4g} GB/s ({size / 1e6:,.1f} MB {action} in {duration})"


def _run_worker(folder: Path, world_size: int, can_compile: bool) -> None:
    """Measure as one of `world_size` processes that measure at the same time, with RANK set."""
    import torch.distributed as dist

    from artel.diagnostics.hardware_operators import measure
    from artel.training.memory import retained_host_memory

    rank = int(os.environ["RANK"])
    device = local_device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, usable_cores() // world_size))
    if world_size > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=world_size
        )
    with retained_host_memory(device):  # as in training: freed memory is kept and reused
        rates = measure(device, can_compile=can_compile)
    if rank == 0:
        (folder / "result.json").write_bytes(orjson.dumps(rates))
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    _run_worker(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True")
