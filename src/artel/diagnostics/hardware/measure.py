"""Measure this machine alone and with several processes, and keep the result for `artel plan`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch

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

    def lines(self) -> list[str]:
        """Rates at the largest measured size, per process: one line each."""
        rows = []
        for rates in self.rates:
            suffix = f" x {rates.processes}" if rates.processes > 1 else ""
            rows += [(f"{key}{suffix}", _rate(key, points)) for key, points in rates.points.items()]
        width = max(len(name) for name, _ in rows)
        return [f"{name:<{width}}  {rate}" for name, rate in rows]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.about,
            "seconds": self.seconds,
            "file": str(self.path),
            "processes": {str(rates.processes): rates.points for rates in self.rates},
        }


def measure_hardware(tell: Callable[[str], None]) -> Measured:
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
        command = [sys.executable, "-m", "artel.diagnostics.hardware.process", name, str(count), str(compiles)]
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
            raise WorkError.at("artel hardware", f"{count} process(es) could not be measured", "", last)
        return orjson.loads((folder / "result.json").read_bytes())


def _rate(key: str, points: Points) -> str:
    """The rate at the largest size, with the size and time that it was measured at."""
    size, seconds = points[-1]
    took = f"{1000 * seconds:,.2f} ms"
    if key.startswith(("product", "attention")):
        return f"{size / seconds / 1e9:,.4g} GFLOP/s ({size / 1e9:,.2f} GFLOP in {took})"
    if key == "waiting":
        return f"{1000 * seconds:,.4g} ms for the slower process, after both computed for {1000 * size:,.0f} ms"
    if key == "exponentials":
        return f"{size / seconds / 1e9:,.4g} 10^9/s ({size:,.0f} in {took}, compiled)"
    if key in ("start", "dispatch"):
        what = "operators on DTensors" if key == "dispatch" else "operators"
        return f"{1e6 * seconds / size:,.4g} µs ({size:,.0f} small {what} in {took})"
    what = _EXCHANGED.get(key, "read and written")
    return f"{size / seconds / 1e9:,.4g} GB/s ({size / 1e6:,.1f} MB {what} in {took})"
