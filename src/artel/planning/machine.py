"""Read facts about this machine: processor, disks, compilers, GPUs, system. See also `artel.host`."""

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
# Instruction sets that decide which kernels run. Without the last three, bf16 is emulated.
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of a folder: free and total bytes, and whether the nearest existing parent can be written."""

    folder: Path
    free: int
    total: int
    writable: bool


def read_cpu_flags() -> list[str]:
    """Return the instruction sets in `_FLAGS` that the processor has."""
    lines = [line for line in read_lines(_CPUINFO) if line.lower().startswith(("flags", "features"))]
    cpu_flags = {flag for line in lines for flag in line.split()}
    return [flag for flag in _FLAGS if flag in cpu_flags]


def get_disk(folder: Path) -> Disk:
    """Return the disk of a folder, which need not exist yet."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    usage = shutil.disk_usage(existing)
    return Disk(folder, usage.free, usage.total, os.access(existing, os.W_OK))


def get_shared_memory_bytes() -> int | None:
    """Return the size of /dev/shm, which processes of a machine use to communicate. None if it does not exist."""
    folder = Path("/dev/shm")
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def find_home() -> Path | None:
    """Return the user's home folder. None if it cannot be determined."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def find_cpp_compiler() -> str | None:
    """Return the path of the C++ compiler that torch.compile would use. None without one."""
    cxx = os.environ.get("CXX")
    return next((path for name in (cxx, "g++", "clang++") if name and (path := shutil.which(name))), None)


def has_python_headers() -> bool:
    """True if Python's C headers are installed, which torch.compile needs."""
    return (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


def find_host_address(hosts: Path = Path("/etc/hosts")) -> str | None:
    """Return this machine's address in the hosts file; None if its name is not there. Makes no DNS query."""
    name = socket.gethostname()
    for line in read_lines(hosts):
        address, *names = line.partition("#")[0].split() or [""]
        if name in names:
            return address
    return None


def list_nvidia_devices() -> list[str]:
    """Return the device files of NVIDIA GPUs. They exist even if PyTorch cannot use the GPUs."""
    return sorted(str(file) for file in Path("/dev").glob("nvidia[0-9]*"))


def read_nvidia_driver_version() -> str | None:
    """Return the version of the loaded NVIDIA driver. None without one."""
    for line in read_lines(Path("/proc/driver/nvidia/version"))[:1]:
        return next((word for word in line.split() if word[0].isdigit() and "." in word), None)
    return None


def describe_system() -> str:
    """Return the name and version of the operating system, and of the C library if known."""
    library = " ".join(platform.libc_ver()).strip()
    return f"{platform.system()} {platform.release()}" + (f", {library}" if library else "")


def describe_python() -> str:
    """Return the version and path of the running Python."""
    return f"{platform.python_version()} ({sys.executable})"


def format_gib(num_bytes: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{num_bytes / 2**30:,.1f} GiB"
