"""Cores and memory of this host and this process, as limited by control groups.

Linux control groups (cgroups, versions 1 and 2) limit containers. /proc/meminfo does not take them into account.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PROCESS_CGROUP = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # version 1 represents "no limit" by the largest multiple of a page in 64 bits


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a host, in bytes."""

    total: int
    """Total memory of the host."""
    free: int
    """Memory still available to this process: the minimum over the host and its control groups."""
    limit: int | None
    """Limit set by the control groups of this process, or None."""


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_exists(pid: int) -> bool:
    """True if a process with this id exists on this host, even if it belongs to another user."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def core_quota(cgroup_file: Path = _PROCESS_CGROUP, root: Path = _CGROUP_ROOT) -> float | None:
    """Return the CPU quota of the control groups of this process, in cores, or None without a limit."""
    quotas = []
    for folder in _cgroup_folders("cpu", cgroup_file, root):
        limit = _read_words(folder / "cpu.max")  # version 2: "QUOTA PERIOD", or "max PERIOD"
        limit = limit or [*_read_words(folder / "cpu.cfs_quota_us"), *_read_words(folder / "cpu.cfs_period_us")]
        if len(limit) == 2 and limit[0].isdigit() and int(limit[1]):
            quotas.append(int(limit[0]) / int(limit[1]))
    return min(quotas, default=None)


def memory(cgroup_file: Path = _PROCESS_CGROUP, root: Path = _CGROUP_ROOT) -> Memory:
    """Return the memory of the host, as limited by the control groups of this process."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _read_field(Path("/proc/meminfo"), "MemAvailable:", total // 1024) * 1024
    limits = []
    for folder in _cgroup_folders("memory", cgroup_file, root):
        limit = _read_number(folder / "memory.max") or _read_number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= min(total, _NO_LIMIT):
            continue
        limits.append(limit)
        used = _read_number(folder / "memory.current") or _read_number(folder / "memory.usage_in_bytes") or 0
        # The page cache of files counts as used, but the kernel gives it back when memory is needed.
        stat = folder / "memory.stat"
        cached = max(_read_field(stat, "inactive_file", 0), _read_field(stat, "total_inactive_file", 0))
        free = min(free, limit - max(0, used - cached))
    return Memory(total, free, min(limits, default=None))


def swap_bytes() -> int:
    """Return the bytes of swap space on the host."""
    return _read_field(Path("/proc/meminfo"), "SwapTotal:", 0) * 1024


def process_memory(name: str) -> int:
    """Return a field of /proc/self/status in bytes, or 0 on other systems than Linux.

    VmRSS is the resident size, VmHWM its peak, RssAnon the resident size without files, VmSize the virtual size.
    """
    return _read_field(Path("/proc/self/status"), f"{name}:", 0) * 1024


def reset_peak_memory() -> None:
    """Reset the peak returned by `process_memory("VmHWM")`. Does nothing if the kernel does not support that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5)


def processor_name() -> str:
    """Return the name of the processor, or its architecture if the name is unknown."""
    for line in read_lines(_CPUINFO):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return f"{value.strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()


def read_lines(file: Path) -> list[str]:
    """Return the lines of a file, or an empty list if it cannot be read."""
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _cgroup_folders(controller: str, cgroup_file: Path, mount: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and its parents, in versions 2 and 1."""
    for line in read_lines(cgroup_file):
        hierarchy_id, controllers, path = line.split(":", 2)
        if hierarchy_id == "0":
            root = mount
        elif controller in controllers.split(","):
            root = mount / controllers if (mount / controllers).is_dir() else mount / controller
        else:
            continue
        inner = root / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents)


def _read_field(file: Path, name: str, default: int) -> int:
    """Return the number after `name` at the start of a line, or `default`."""
    lines = (line.split() for line in read_lines(file))
    return next((int(words[1]) for words in lines if len(words) > 1 and words[0] == name), default)


def _read_words(file: Path) -> list[str]:
    return " ".join(read_lines(file)).split()


def _read_number(file: Path) -> int | None:
    words = _read_words(file)
    return int(words[0]) if words and words[0].isdigit() else None
