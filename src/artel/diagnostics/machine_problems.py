"""Finds problems of this machine, each with a fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from artel import host
from artel.config import RunConfig
from artel.diagnostics.software import install_command, list_packages
from artel.errors import Problem
from artel.launching.hosts import is_loopback
from artel.models.device import bf16_is_native
from artel.planning import machine
from artel.planning.machine import Disk, format_gib

_MIN_FREE_BYTES = 2**30
"""Free bytes on a disk, in memory or in /dev/shm, below which work is likely to fail."""


def machine_problems(
    config: RunConfig,
    device: torch.device,
    gpus: list[dict[str, Any]],
    disks: dict[str, Disk],
    variables: Mapping[str, str],
) -> list[Problem]:
    """Return the problems, each with a fix. `gpus`: GPUs that PyTorch can use; `disks`: by purpose."""
    return [
        *_compiler_problems(device, config),
        *_gpu_problems(gpus, variables),
        *_memory_problems(),
        *_core_problems(config),
        *_disk_problems(disks),
        *_precision_problems(config, device),
        *_package_problems(),
        *_network_problems(variables),
    ]


def _compiler_problems(device: torch.device, config: RunConfig) -> Iterator[Problem]:
    if config.train.compile == "off":
        return
    if device.type == "cpu" and machine.find_cpp_compiler() is None:
        what = "none was found, so layers are not compiled on this CPU"
        yield Problem("C++ compiler", what, "install one: apt install g++")
    if not machine.has_python_headers():
        fix = "install them (apt install python3-dev), or set train.compile: off"
        yield Problem("Python's headers", "are not installed, but torch.compile needs them", fix)


def _gpu_problems(gpus: list[dict[str, Any]], variables: Mapping[str, str]) -> Iterator[Problem]:
    devices = machine.list_nvidia_devices()
    shared_memory = machine.get_shared_memory_bytes()
    if devices and torch.version.cuda is None:
        what = f"this machine has {len(devices)} NVIDIA GPU(s), but PyTorch was built without CUDA"
        yield Problem("torch", what, "install a build for CUDA: pytorch.org/get-started")
    elif devices and not gpus and "CUDA_VISIBLE_DEVICES" in variables:
        what = f"CUDA_VISIBLE_DEVICES={variables['CUDA_VISIBLE_DEVICES']} hides the GPUs of this machine"
        yield Problem("GPU", what, "unset it if this is not intended")
    elif devices and not gpus:
        driver = machine.read_nvidia_driver_version()
        what = f"PyTorch for CUDA {torch.version.cuda} cannot use {devices[0]} with driver {driver}"
        yield Problem("GPU", what, "install a newer driver, or PyTorch for an older CUDA")
    if len(gpus) > 1 and shared_memory is not None and shared_memory < _MIN_FREE_BYTES:
        what = f"has only {format_gib(shared_memory)}, but GPUs of one machine communicate through it"
        yield Problem("/dev/shm", what, "start the container with --ipc=host or --shm-size=8g")


def _memory_problems() -> Iterator[Problem]:
    free = host.memory().free
    if free < _MIN_FREE_BYTES:
        yield Problem(
            "memory", f"only {format_gib(free)} are free", "end other programs, or raise the container's limit"
        )


def _core_problems(config: RunConfig) -> Iterator[Problem]:
    cores, quota = host.usable_cores(), host.core_quota()
    if quota is not None and quota < cores and config.train.threads is None:
        what = f"{cores} are visible, but the container may use {quota:g}: {cores} threads would wait for one another"
        yield Problem("cores", what, f"set train.threads: {max(1, int(quota))}")


def _disk_problems(disks: dict[str, Disk]) -> Iterator[Problem]:
    settings = {"cache folder": "ARTEL_CACHE", "run folder": "run", "temporary files": "TMPDIR"}
    for name, disk in disks.items():
        if disk.free < _MIN_FREE_BYTES:
            fix = f"free space there, or choose another folder ({settings[name]})"
            yield Problem(name, f"{disk.folder}: only {format_gib(disk.free)} are free", fix)
        if not disk.writable:
            fix = f"choose a writable folder ({settings[name]}), or change its permissions"
            yield Problem(name, f"{disk.folder} is not writable", fix)
    home = machine.find_home()
    if home is None or not machine.get_disk(home).writable:
        what = f"{home or 'no home folder'} is not writable, but libraries store files there"
        yield Problem(
            "HOME", what, "set HOME, or HF_HOME, ARTEL_CACHE and TORCHINDUCTOR_CACHE_DIR, to writable folders"
        )


def _precision_problems(config: RunConfig, device: torch.device) -> Iterator[Problem]:
    in_bf16 = config.train.precision == "bf16" or config.train.weights == "bf16"
    if in_bf16 and not bf16_is_native(device):
        what = "bf16 is emulated on this machine, hundreds of times slower than fp32"
        yield Problem("train.precision", what, "set auto or fp32")


def _package_problems() -> Iterator[Problem]:
    for extra, members in list_packages().items():
        for package in members:
            if package.fits or (extra and package.installed is None):  # extras are optional
                continue
            needed = package.requirement
            fix = install_command(extra) if extra else f"pip install '{needed.name}{needed.specifier}'"
            yield Problem(needed.name, str(package).partition(" ")[2], fix)


def _network_problems(variables: Mapping[str, str]) -> Iterator[Problem]:
    address = machine.find_host_address()
    if address is not None and "GLOO_SOCKET_IFNAME" not in variables and is_loopback(address):
        what = f"resolves to {address}, which other hosts cannot reach (harmless on a single machine)"
        fix = "for several hosts, pass --master-addr with an address that they can reach, or set GLOO_SOCKET_IFNAME"
        yield Problem("host name", what, fix)
