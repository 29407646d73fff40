"""What the machine has: processor, disks, compilers, GPUs, system. Nothing is written or started. See also `host`."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from artel.host import read_lines

_CPUINFO = Path("/proc/cpuinfo")
# What decides which kernels a processor runs: without the last three, bf16 is emulated.
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes free for a folder, and whether it can be written: told by the nearest folder above it that exists."""

    folder: Path
    free: int
    total: int
    writable: bool


def flags() -> list[str]:
    """Those of the instruction sets that matter here which the processor has."""
    found = {
        word for line in read_lines(_CPUINFO) if line.lower().startswith(("flags", "features")) for word in line.split()
    }
    return [flag for flag in _FLAGS if flag in found]


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
    for line in read_lines(hosts):
        words = line.partition("#")[0].split()
        if name in words[1:]:
            return words[0]
    return None


def nvidia_devices() -> list[str]:
    """Device files of NVIDIA GPUs: they are there also where PyTorch cannot use them."""
    return sorted(str(file) for file in Path("/dev").glob("nvidia[0-9]*"))


def nvidia_driver() -> str | None:
    """The version of the NVIDIA driver that is loaded."""
    for line in read_lines(Path("/proc/driver/nvidia/version"))[:1]:
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
