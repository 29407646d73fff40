"""Time, processor time and memory of a command with all the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import psutil

_SAMPLE = 0.1
"""Seconds between two readings; a shorter peak is not seen."""


@dataclass(frozen=True)
class Cost:
    elapsed: float
    """Seconds by the clock, from start to end."""
    processor: float
    """Seconds of processor time, user and system, of the command and everything it started."""
    memory: int
    """Peak in bytes of PSS, summed over the processes: shared pages count once. 0 if not requested."""


def run(command: list[str], environment: dict[str, str] | None = None, *, memory: bool = False) -> Cost:
    """Run a command to its end. Exit with its last lines if it fails."""
    start, before = time.perf_counter(), os.times()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command, env={**os.environ, **(environment or {})}, stdout=subprocess.DEVNULL, stderr=errors
        )
        peak = 0
        while memory and process.poll() is None:
            peak = max(peak, _pss(process.pid))
            time.sleep(_SAMPLE)
        process.wait()
        elapsed, after = time.perf_counter() - start, os.times()
        errors.seek(0)
        last = errors.read().splitlines()[-5:]
    if process.returncode:
        sys.exit(f"{' '.join(command[:6])} failed:\n" + "\n".join(last))
    processor = after.children_user + after.children_system - before.children_user - before.children_system
    return Cost(elapsed, processor, peak)


def _pss(pid: int) -> int:
    total = 0
    try:
        for process in (root := psutil.Process(pid), *root.children(recursive=True)):
            total += process.memory_full_info().pss
    except psutil.Error:  # one has just ended
        pass
    return total
