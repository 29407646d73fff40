"""Facts about this machine: processor, disks, compilers, GPUs, system. Read-only. See also `artel.host`."""

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
    """Free space for a folder, and whether it can be written, from its nearest existing parent."""

    folder: Path
    free: int
    total: int
    writable: bool


def flags() -> list[str]:
    """Return the relevant instruction sets of the processor."""
    words = {
        word for line in read_lines(_CPUINFO) if line.lower().startswith(("flags", "features")) for word in line.split()
    }
    return [flag for flag in _FLAGS if flag in words]


def disk(folder: Path) -> Disk:
    """Return the disk that a folder is on, or would be on."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    usage = shutil.disk_usage(existing)
    return Disk(folder, usage.free, usage.total, os.access(existing, os.W_OK))


def shared_memory() -> int | None:
    """Return the bytes of /dev/shm, through which processes of one machine communicate."""
    folder = Path("/dev/shm")
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def home() -> Path | None:
    """Return the user's home folder, if there is one."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def cpp_compiler() -> str | None:
    """Return the C++ compiler that torch.compile finds."""
    cxx = os.environ.get("CXX")
    return next((path for name in (cxx, "g++", "clang++") if name and (path := shutil.which(name))), None)


def python_headers() -> bool:
    """True if Python's C headers are installed, which torch.compile needs."""
    return (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file()


def host_address(hosts: Path = Path("/etc/hosts")) -> str | None:
    """Return this machine's address in the hosts file; None if its name is not there. Makes no DNS query."""
    name = socket.gethostname()
    for line in read_lines(hosts):
        words = line.partition("#")[0].split()
        if name in words[1:]:
            return words[0]
    return None


def nvidia_devices() -> list[str]:
    """Return the device files of NVIDIA GPUs. They exist even if PyTorch cannot use the GPUs."""
    return sorted(str(file) for file in Path("/dev").glob("nvidia[0-9]*"))


def nvidia_driver() -> str | None:
    """Return the version of the loaded NVIDIA driver."""
    for line in read_lines(Path("/proc/driver/nvidia/version"))[:1]:
        return next((word for word in line.split() if word[0].isdigit() and "." in word), None)
    return None


def system() -> str:
    """Return the operating system, and the C library if known."""
    library = " ".join(platform.libc_ver()).strip()
    return f"{platform.system()} {platform.release()}" + (f", {library}" if library else "")


def python() -> str:
    """Return the version and path of the running Python."""
    return f"{platform.python_version()} ({sys.executable})"


def in_gib(count: int) -> str:
    """Format bytes in GiB."""
    return f"{count / 2**30:,.1f} GiB"
