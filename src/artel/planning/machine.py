"""What the machine has, as its kernel tells it: processor, cores, memory, disks. Nothing is written or started."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
# Version 1 writes "no limit" as the largest multiple of a page that 64 bits hold.
_NO_LIMIT = 1 << 60
# What decides which kernels a processor runs: without the last three, bf16 is emulated.
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: of the machine, free on it, and what this process's group may have in all where that is bounded."""

    total: int
    free: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes free for a folder, and whether it can be written: told by the nearest folder above it that exists."""

    folder: Path
    free: int
    total: int
    writable: bool


def processor() -> str:
    """The processor's name, or its architecture where the system tells no name."""
    for line in _cpuinfo():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return f"{value.strip()} ({platform.machine()})"
    return platform.processor() or platform.machine()


def flags() -> list[str]:
    """Those of the instruction sets that matter here which the processor has."""
    found = {word for line in _cpuinfo() if line.lower().startswith(("flags", "features")) for word in line.split()}
    return [flag for flag in _FLAGS if flag in found]


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def core_quota(own: Path = _OWN_CGROUP, groups: Path = _CGROUPS) -> float | None:
    """Cores' worth of time that this process's control group may use; None where it is not bounded."""
    found = []
    for folder in _folders("cpu", own, groups):
        limit = _words(folder / "cpu.max")  # version 2: "QUOTA PERIOD", or "max PERIOD"
        limit = limit or [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
        if len(limit) == 2 and limit[0].isdigit() and int(limit[1]):
            found.append(int(limit[0]) / int(limit[1]))
    return min(found, default=None)


def memory(own: Path = _OWN_CGROUP, groups: Path = _CGROUPS) -> Memory:
    """Memory of the machine and of this process's control group."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = total
    for words in map(str.split, _lines(Path("/proc/meminfo"))):
        if words[0] == "MemAvailable:":
            free = int(words[1]) * 1024
    limits = []
    for folder in _folders("memory", own, groups):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= min(total, _NO_LIMIT):
            continue
        limits.append(limit)
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        # Pages of files that were read can be taken back, and count as used until then.
        idle = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith(
            ("inactive_file ", "total_inactive_file "))]  # fmt: skip
        free = min(free, limit - max(0, used - max(idle, default=0)))
    return Memory(total, free, min(limits, default=None))


def swap() -> int:
    """Bytes that the machine can put on a disk."""
    words = next((line.split() for line in _lines(Path("/proc/meminfo")) if line.startswith("SwapTotal:")), ["", "0"])
    return int(words[1]) * 1024


def _folders(controller: str, own: Path, groups: Path) -> Iterator[Path]:
    """The folders of this process's control group and of those that it lies in, of version 2 and of version 1."""
    for line in _lines(own):
        number, names, path = line.split(":", 2)
        if number == "0":
            root = groups
        elif controller in names.split(","):
            root = groups / names if (groups / names).is_dir() else groups / controller
        else:
            continue
        inner = root / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _number(file: Path) -> int | None:
    words = _words(file)
    return int(words[0]) if words and words[0].isdigit() else None


def disk(folder: Path) -> Disk:
    """The disk that a folder is on, or would be on."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
    usage = shutil.disk_usage(there)
    return Disk(folder, usage.free, usage.total, os.access(there, os.W_OK))


def shared_memory() -> int | None:
    """Bytes of /dev/shm, which processes of one machine talk through."""
    folder = Path("/dev/shm")
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def home() -> Path | None:
    """The user's home folder, where there is one."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile finds."""
    wanted = os.environ.get("CXX")
    return next((found for name in (wanted, "g++", "clang++") if name and (found := shutil.which(name))), None)


def python_headers() -> bool:
    """Whether Python's C headers are installed, which compiled layers are built with."""
    return (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


def host_address(hosts: Path = Path("/etc/hosts")) -> str | None:
    """Where the hosts file leads from this machine's name; None where it does not know the name. No one is asked."""
    name = socket.gethostname()
    for line in _lines(hosts):
        words = line.partition("#")[0].split()
        if name in words[1:]:
            return words[0]
    return None


def nvidia_devices() -> list[str]:
    """Device files of NVIDIA GPUs: they are there also where PyTorch cannot use them."""
    return sorted(str(file) for file in Path("/dev").glob("nvidia[0-9]*"))


def nvidia_driver() -> str | None:
    """The version of the NVIDIA driver that is loaded."""
    for line in _lines(Path("/proc/driver/nvidia/version"))[:1]:
        return next((word for word in line.split() if word[0].isdigit() and "." in word), None)
    return None


def system() -> str:
    """The operating system, and the C library where it tells."""
    library = " ".join(platform.libc_ver()).strip()
    return f"{platform.system()} {platform.release()}" + (f", {library}" if library else "")


def python() -> str:
    """The Python that runs, and where it is."""
    return f"{platform.python_version()} ({sys.executable})"


def in_gib(count: int) -> str:
    """Bytes as people read them."""
    return f"{count / 2**30:,.1f} GiB"
