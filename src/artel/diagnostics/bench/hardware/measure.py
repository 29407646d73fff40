"""Measure this machine alone and with several processes, and keep the result for `artel plan`."""

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

from artel.diagnostics.bench.figures import Figure, Tell
from artel.errors import WorkError
from artel.host import usable_cores
from artel.parallel import local_device
from artel.planning.rates import Points, Rates, about_here, save_rates

_EXCHANGED = {"all_reduce": "reduced", "all_gather": "gathered", "reduce_scatter": "reduced and shared out"}
_SECONDS = 1200  # for the processes to start and measure: on a busy host importing alone may take a minute


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured, and where it is kept."""

    about: dict[str, Any]
    rates: list[Rates]
    path: Path
    seconds: float

    def figures(self) -> list[Figure]:
        """The rates at the largest size that was measured, of each process."""
        figures = []
        for rates in self.rates:
            suffix = f" x {rates.processes}" if rates.processes > 1 else ""
            for key, points in rates.points.items():
                figures.append(_figure(f"{key}{suffix}", key, points))
        return figures

    def to_json(self) -> dict[str, Any]:
        return {
            **self.about,
            "seconds": self.seconds,
            "file": str(self.path),
            "processes": {str(rates.processes): rates.points for rates in self.rates},
        }


def measure_hardware(tell: Tell) -> Measured:
    """Measure one process, then two at once (on GPUs as many as there are), and keep the result.

    Raises WorkError where a process fails.
    """
    start = time.monotonic()
    device = local_device()
    about = about_here(device)
    rates = []
    several = torch.cuda.device_count() if device.type == "cuda" else 2
    for count in (1, several) if several > 1 else (1,):
        tell(f"measuring {about['device']}: {count} process(es)")
        rates.append(Rates(count, _measure(count)))
    about |= {"cores": usable_cores(), "measured": time.strftime("%Y-%m-%d %H:%M")}
    return Measured(about, rates, save_rates(about, rates), time.monotonic() - start)


def _measure(count: int) -> dict[str, Points]:
    """What the first of `count` processes measures while all do the same."""
    compiles = torch.cuda.is_available() or bool(shutil.which("g++") or shutil.which("clang++"))
    environment = dict(os.environ)
    if sys.platform.startswith("linux"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, "-m", "artel.diagnostics.bench.hardware.process", name, str(count), str(compiles)]
        processes = []
        try:
            for rank in range(count):
                with (folder / f"{rank}.log").open("wb") as log:
                    own = {**environment, "RANK": str(rank)}
                    processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
            failed = [process for process in processes if process.wait(_SECONDS)]
        except subprocess.TimeoutExpired:
            failed = processes
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if failed:
            text = (folder / f"{processes.index(failed[0])}.log").read_text(errors="replace")
            last = tuple(text.splitlines()[-5:])
            raise WorkError.at("artel bench hardware", f"{count} process(es) could not be measured", "", last)
        return orjson.loads((folder / "result.json").read_bytes())


def _figure(name: str, key: str, points: Points) -> Figure:
    size, seconds = points[-1]
    if key.startswith(("product", "attention")):
        return Figure(name, size / seconds / 1e9, "GFLOP/s", f"{size / 1e9:,.2f} GFLOP in {1000 * seconds:,.2f} ms")
    if key == "waiting":
        return Figure(
            name, 1000 * seconds, "ms", f"for the slower process, after both computed for {1000 * size:,.0f} ms"
        )
    if key == "exponentials":
        return Figure(name, size / seconds / 1e9, "10^9/s", f"{size:,.0f} in {1000 * seconds:,.2f} ms, compiled")
    if key in ("start", "dispatch"):
        what = "operators on DTensors" if key == "dispatch" else "operators"
        return Figure(name, 1e6 * seconds / size, "µs", f"{size:,.0f} small {what} in {1000 * seconds:,.2f} ms")
    what = _EXCHANGED.get(key, "read and written")
    return Figure(name, size / seconds / 1e9, "GB/s", f"{size / 1e6:,.1f} MB {what} in {1000 * seconds:,.2f} ms")
