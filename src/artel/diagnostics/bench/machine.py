"""On what and with what a figure was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any


def machine(*packages: str) -> dict[str, Any]:
    """The processor, its cores, the versions of Python and of packages (null where not installed), and the day."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.is_file() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"processor": model, "cores": os.cpu_count(), "python": platform.python_version(), **versions(*packages),
            "measured": time.strftime("%Y-%m-%d")}  # fmt: skip


def versions(*packages: str) -> dict[str, str | None]:
    """The installed version of each package; None where there is none."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
