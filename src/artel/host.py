"""What the operating system says about this host and this process: cores, memory and control groups.

Linux control groups (cgroups) of version 1 and 2 bound what a container may use; /proc/meminfo does not know of them.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # version 1 writes "no limit" as the largest multiple of a page that 64 bits hold


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory."""

    total: int
    """Of the host."""
    free: int
    """What this process can still take: the smallest of what the host and its control groups have left."""
    limit: int | None
    """The limit of this process's control groups, where there is one."""


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_quota(own: Path = _OWN_CGROUP, groups: Path = _CGROUPS) -> float | None:
    """The CPU time that this process's control groups may use, in cores; None without a limit."""
    quotas = []
    for folder in _cgroup_folders("cpu", own, groups):
        limit = _words(folder / "cpu.max")  # version 2: "QUOTA PERIOD", or "max PERIOD"
        limit = limit or [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        if len(limit) == 2 and limit[0].isdigit() and int(limit[1]):
            quotas.append(int(limit[0]) / int(limit[1]))
    return min(quotas, default=None)


def memory(own: Path = _OWN_CGROUP, groups: Path = _CGROUPS) -> Memory:
    """The memory of the host and of this process's control groups."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _field(Path("/proc/meminfo"), "MemAvailable:", total // 1024) * 1024
    limits = []
    for folder in _cgroup_folders("memory", own, groups):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= min(total, _NO_LIMIT):
            continue
        limits.append(limit)
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        # The page cache of files counts as used, but the kernel gives it back when memory is needed.
        stat = folder / "memory.stat"
        cached = max(_field(stat, "inactive_file", 0), _field(stat, "total_inactive_file", 0))
        free = min(free, limit - max(0, used - cached))
    return Memory(total, free, min(limits, default=None))


def swap() -> int:
    """Bytes of swap space on the host."""
    return _field(Path("/proc/meminfo"), "SwapTotal:", 0) * 1024


def process_memory(name: str) -> int:
    """Bytes of this process on Linux: VmRSS (resident), VmHWM (its peak), RssAnon (no files), VmSize; 0 elsewhere."""
    return _field(Path("/proc/self/status"), f"{name}:", 0) * 1024


def reset_peak_memory() -> None:
    """Let `process_memory("VmHWM")` count from now on. Does nothing where the kernel has no such switch."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5)


def processor() -> str:
    """The processor's name, or its architecture where the system tells no name."""
    for line in read_lines(_CPUINFO):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return f"{value.strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()


def read_lines(file: Path) -> list[str]:
    """The lines of a file; none where it cannot be read."""
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _cgroup_folders(controller: str, own: Path, groups: Path) -> Iterator[Path]:
    """The folders of this process's control group and of its parents, in version 2 and version 1."""
    for line in read_lines(own):
        number, names, path = line.split(":", 2)
        if number == "0":
            root = groups
        elif controller in names.split(","):
            root = groups / names if (groups / names).is_dir() else groups / controller
        else:
            continue
        inner = root / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents)


def _field(file: Path, name: str, default: int) -> int:
    """The number after `name` at the start of a line."""
    lines = (line.split() for line in read_lines(file))
    return next((int(words[1]) for words in lines if len(words) > 1 and words[0] == name), default)


def _words(file: Path) -> list[str]:
    return " ".join(read_lines(file)).split()


def _number(file: Path) -> int | None:
    words = _words(file)
    return int(words[0]) if words and words[0].isdigit() else None
