"""Speeds of this machine by kind of operation, measured by `artel hardware` and used by `artel plan`.

A measurement is the seconds of an operation of some size: FLOPs of a matmul or of attention, bytes of other
operations. Between two measured sizes the rate is interpolated on a log scale of the size. Beyond them it is constant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import orjson
import torch
from pydantic import Field, TypeAdapter

from artel.host import processor_name
from artel.messages import logger
from artel.models.flops import device_name
from artel.planning.operations import ATTENTION, MATMUL, MEMORY, Operation
from artel.storage import cache_folder, write_file

_FILE = "hardware.json"
_Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_MEASUREMENTS = TypeAdapter(dict[int, dict[str, Annotated[list[tuple[_Size, _Seconds]], Field(min_length=1)]]])
_VERSIONS = {"cpu": 5, "cuda": 4}
"""Version of the set of measurements, by type of device."""

FLASH_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward"

Points = Sequence[tuple[float, float]]


def rate_key(operation: Operation) -> str:
    """Return the name of the rate of a matmul, attention, or memory-bound operation.

    `product bf16 nt`, `attention bf16 forward`, `memory aten.add fp32`. On a CPU PyTorch's backward pass of attention
    has a separate rate: artel's takes half as long.
    """
    if operation.kind == MEMORY:
        return f"memory {operation.name} {operation.dtype}"
    if operation.kind == MATMUL:
        return f"product {operation.dtype} {operation.layout}"
    assert operation.kind == ATTENTION, operation
    if not operation.is_backward:
        return f"attention {operation.dtype} forward"
    return f"attention {operation.dtype} backward{' by PyTorch' if operation.name == FLASH_BACKWARD else ''}"


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds by operation, if `processes` processes run on this machine at the same time."""

    processes: int
    points: Mapping[str, Points]
    """`rate_key` of an operation -> (size, seconds), sorted by size. More keys: `fused` and `exponentials` of compiled
    layers; `start` and `dispatch`, by the number of operators started and of operators on DTensors; `all_reduce`,
    `all_gather`, `reduce_scatter`, by the bytes of the whole tensor; `waiting`, the seconds a process waits for another
    in a collective, by the seconds that both computed before."""

    def __contains__(self, key: str) -> bool:
        return key in self.points

    def seconds(self, key: str, size: float) -> float:
        """Return the seconds of one operation. `size`: FLOPs or bytes."""
        points = self.points[key]
        if size <= points[0][0]:
            return points[0][1] * size / points[0][0]
        for (small, small_seconds), (large, large_seconds) in pairwise(points):
            if size <= large:
                fraction = math.log(size / small) / math.log(large / small)
                return size / ((small / small_seconds) ** (1 - fraction) * (large / large_seconds) ** fraction)
        return points[-1][1] * size / points[-1][0]


def measurement_identity(device: torch.device) -> dict[str, Any]:
    """Return the device and the versions that a measurement is valid for."""
    name = processor_name() if device.type == "cpu" else device_name(device)
    return {"version": _VERSIONS.get(device.type, 1), "device": name, "torch": torch.__version__}


def save_rates(identity: dict[str, Any], rates: Sequence[Rates]) -> Path:
    """Write a measurement to the cache folder. Raise InputError or WorkError if it cannot be written."""
    path = cache_folder() / _FILE
    content = {**identity, "processes": {str(measured.processes): measured.points for measured in rates}}
    write_file(path, orjson.dumps(content, option=orjson.OPT_INDENT_2))
    return path


def read_rates(processes: int, device: torch.device) -> Rates | None:
    """Return the rates measured for this number of processes. None without any for this device and PyTorch.

    More processes than were measured share the same cores, and are slower in proportion.
    """
    file = cache_folder() / _FILE
    try:
        content = file.read_bytes()
    except OSError:
        return None
    identity, by_processes = _parse_measurement(file, content)
    if any(identity.get(key) != value for key, value in measurement_identity(device).items()) or not by_processes:
        return None
    nearest = max((count for count in by_processes if count <= processes), default=min(by_processes))
    slowdown = max(1.0, processes / nearest) if device.type == "cpu" else 1.0
    points = {
        key: [(size, seconds * slowdown) for size, seconds in values] for key, values in by_processes[nearest].items()
    }
    return Rates(processes, points)


@cache
def _parse_measurement(file: Path, content: bytes) -> tuple[dict[str, Any], Mapping[int, Mapping[str, Points]]]:
    """Return the identity of a measurement, and its points by processes. Warn if it is damaged."""
    try:
        identity = orjson.loads(content)
        return identity, _MEASUREMENTS.validate_python(identity["processes"])
    except (ValueError, KeyError, TypeError, IndexError):
        what = f"{file}: is damaged, so the speed of this machine is not known; artel hardware measures it again"
        logger.warning(what)
        return {}, {}
