"""Hardware that is larger than what a run does not fit, the smallest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from artel.planning.accelerators import ACCELERATORS
from artel.planning.hardware import Hardware, find_hardware

COUNTS = (1, 2, 4, 8)
_MOST = 1024  # accelerators


def more_of(hardware: Hardware) -> Iterator[Hardware]:
    """More accelerators of the same kind: in a node, then in more nodes. None of a CPU."""
    if hardware.shares_memory:
        return
    for count in COUNTS:
        if count > hardware.count:
            yield replace(hardware, count=count)
    count = max(hardware.count, *COUNTS)
    nodes = hardware.nodes if count == hardware.count else hardware.nodes or 1
    while count * nodes * 2 <= _MOST:
        nodes *= 2
        yield replace(hardware, count=count, nodes=nodes)


def others(hardware: Hardware) -> list[Hardware]:
    """Accelerators with more memory than those of `hardware`, by their number and then by their memory.

    Of a CPU all accelerators: their own memory comes on top of the machine's.
    """
    least = 0 if hardware.shares_memory else hardware.memory_bytes
    kinds = [find_hardware(f"{name}:{count}") for name in ACCELERATORS for count in COUNTS]
    kinds = [replace(kind, host_memory_bytes=hardware.host_memory_bytes) for kind in kinds if kind.memory_bytes > least]
    larger = [*kinds]
    for kind in kinds:
        if kind.count == COUNTS[-1]:
            larger += list(more_of(kind))
    return sorted(larger, key=lambda kind: (kind.world_size, kind.memory_bytes))
