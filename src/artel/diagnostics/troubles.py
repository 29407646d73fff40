"""Problems of this machine, each with a fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from artel import host
from artel.config import RunConfig
from artel.diagnostics.software import install, packages
from artel.errors import Problem
from artel.launching.hosts import is_loopback
from artel.models.device import bf16_is_native
from artel.planning import machine
from artel.planning.machine import Disk, in_gib

_LITTLE = 2**30  # bytes free on a disk, in memory or in /dev/shm, below which work is likely to fail


def troubles(
    config: RunConfig,
    device: torch.device,
    gpus: list[dict[str, Any]],
    disks: dict[str, Disk],
    variables: Mapping[str, str],
) -> list[Problem]:
    """Return the problems, each with a fix. `gpus`: those that PyTorch can use; `disks`: by what artel keeps there."""
    return [
        *_about_compiling(device, config),
        *_about_gpus(gpus, variables),
        *_about_memory(),
        *_about_cores(config),
        *_about_disks(disks),
        *_about_precision(config, device),
        *_about_packages(),
        *_about_hosts(variables),
    ]


def _about_compiling(device: torch.device, config: RunConfig) -> list[Problem]:
    if config.train.compile == "off":
        return []
    problems = []
    if device.type == "cpu" and machine.cpp_compiler() is None:
        fix = "install one: apt install g++"
        problems.append(Problem("C++ compiler", "there is none, so layers are not compiled on this processor", fix))
    if not machine.python_headers():
        fix = "install them (apt install python3-dev), or write train.compile: off"
        problems.append(Problem("Python's headers", "are not installed, and compiled layers are built with them", fix))
    return problems


def _about_gpus(gpus: list[dict[str, Any]], variables: Mapping[str, str]) -> list[Problem]:
    devices, shared = machine.nvidia_devices(), machine.shared_memory()
    problems = []
    if devices and torch.version.cuda is None:
        what = f"this PyTorch is built without CUDA, and the machine has {len(devices)} NVIDIA GPU(s)"
        problems.append(Problem("torch", what, "install a build for CUDA: pytorch.org/get-started"))
    elif devices and not gpus and "CUDA_VISIBLE_DEVICES" in variables:
        what = f"CUDA_VISIBLE_DEVICES={variables['CUDA_VISIBLE_DEVICES']} hides the GPUs of this machine"
        problems.append(Problem("GPU", what, "unset it, if that is not meant"))
    elif devices and not gpus:
        what = f"PyTorch for CUDA {torch.version.cuda} cannot use {devices[0]} with driver {machine.nvidia_driver()}"
        problems.append(Problem("GPU", what, "install a newer driver, or PyTorch for an older CUDA"))
    if len(gpus) > 1 and shared is not None and shared < _LITTLE:
        what = f"has {in_gib(shared)}, and several GPUs of one machine talk through it"
        problems.append(Problem("/dev/shm", what, "start the container with --ipc=host or --shm-size=8g"))
    return problems


def _about_memory() -> list[Problem]:
    free = host.memory().free
    if free >= _LITTLE:
        return []
    return [Problem("memory", f"only {in_gib(free)} are free", "end other programs, or raise the container's limit")]


def _about_cores(config: RunConfig) -> list[Problem]:
    cores, quota = host.usable_cores(), host.core_quota()
    if quota is None or quota >= cores or config.train.threads is not None:
        return []
    what = f"{cores} are seen, and the container has time for {quota:g}: {cores} threads would wait for one another"
    return [Problem("cores", what, f"write train.threads: {max(1, int(quota))}")]


def _about_disks(disks: dict[str, Disk]) -> list[Problem]:
    problems = []
    elsewhere = {"cache folder": "ARTEL_CACHE", "run folder": "run", "temporary files": "TMPDIR"}
    for name, disk in disks.items():
        if disk.free < _LITTLE:
            fix = f"free space there, or choose another folder ({elsewhere[name]})"
            problems.append(Problem(name, f"{disk.folder}: only {in_gib(disk.free)} are free", fix))
        if not disk.writable:
            fix = f"choose a folder that can be ({elsewhere[name]}), or change its permissions"
            problems.append(Problem(name, f"{disk.folder} cannot be written", fix))
    home = machine.home()
    if home is None or not machine.disk(home).writable:
        fix = "set HOME, or HF_HOME, ARTEL_CACHE and TORCHINDUCTOR_CACHE_DIR, to folders that can be"
        problems.append(
            Problem("HOME", f"{home or 'no home folder'} cannot be written, and libraries keep files there", fix)
        )
    return problems


def _about_precision(config: RunConfig, device: torch.device) -> list[Problem]:
    in_bf16 = config.train.precision == "bf16" or config.train.weights == "bf16"
    if not in_bf16 or bf16_is_native(device):
        return []
    what = "the run requests bf16, and this machine emulates it: hundreds of times slower than fp32 on a processor"
    return [Problem("train.precision", what, "write auto or fp32")]


def _about_packages() -> list[Problem]:
    problems = []
    for extra, members in packages().items():
        for package in members:
            if package.fits or (extra and package.installed is None):  # extras are optional
                continue
            fix = (
                install(extra) if extra else f"pip install '{package.requirement.name}{package.requirement.specifier}'"
            )
            problems.append(Problem(package.requirement.name, str(package).partition(" ")[2], fix))
    return problems


def _about_hosts(variables: Mapping[str, str]) -> list[Problem]:
    address = machine.host_address()
    if address is None or "GLOO_SOCKET_IFNAME" in variables or not is_loopback(address):
        return []
    what = f"leads to {address}, where other hosts cannot reach this one; that does not matter on a single machine"
    fix = "on several give --master-addr as the others see it (artel finds the interface), or set GLOO_SOCKET_IFNAME"
    return [Problem("host name", what, fix)]
