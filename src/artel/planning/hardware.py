"""Hardware to plan a run for: this machine, or accelerators from a table, such as `h100-80gb:8`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from artel.config.schema.quantities import read_bytes
from artel.errors import InputError
from artel.host import memory, processor_name, usable_cores
from artel.models.flops import data_sheet

_GIGA = 10**9
_MAX_DEVICES = 1024  # on one node; today's largest have 72
_RATE = re.compile(r"([\d.]+)\s*([GTM])(b|bit|B)(?:/s|ps)?")
_RATE_EXAMPLE = "give the rate of one accelerator in bits or bytes per second: 400Gb/s or 50GB/s"


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between accelerators."""

    name: str
    bandwidth: float
    """Peak bytes/s of one accelerator, in one direction."""


@dataclass(frozen=True, slots=True)
class Host:
    """Peak rates of the machine around the accelerators, in GB/s. Offloaded weights and state wait for them."""

    name: str
    link: float
    """One accelerator to host memory, in one direction."""
    links: float
    """All accelerators of the machine together: PCIe switches share uplinks."""
    memory: float
    """Memory of all processors: channels x transfers/s x 8 bytes."""
    disk: float
    """Local NVMe disks together, reading."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """`nodes` machines with `count` accelerators each. On a CPU each process counts as one accelerator."""

    name: str
    """Name in the table, `h100-80gb`; for this machine, the name of its GPU or processor."""
    device: str
    """`cuda` (also for ROCm, as PyTorch calls it) or `cpu`."""
    count: int
    nodes: int
    memory_bytes: int
    """Memory of each accelerator, as PyTorch sees it. On a CPU, memory shared by all processes of a node."""
    memory_bandwidth: float | None
    """Peak bytes/s of one accelerator; None if it is not in the table."""
    peak_flops: dict[str, float] = field(hash=False)
    """Dense peak FLOP/s of one accelerator by precision; empty if unknown."""
    link: Link | None
    """Between the accelerators of a node; None if unknown."""
    network: Link | None
    """Between nodes; None if unknown."""
    watts: float | None
    """Maximum power of one accelerator; None if unknown."""
    host_memory_bytes: int | None
    """Memory of each node; None if unknown."""
    source: str
    """Source of the numbers."""
    host: Host | None = None
    """Rates of each node; None if unknown."""

    @property
    def world_size(self) -> int:
        return self.count * self.nodes

    @property
    def has_rates(self) -> bool:
        """True if compute and memory rates are known."""
        return bool(self.memory_bandwidth and self.peak_flops)

    @property
    def shares_memory(self) -> bool:
        """True if all processes of a node share `memory_bytes`."""
        return self.device == "cpu"


class Accelerator(NamedTuple):
    """Published numbers of an accelerator, from the maker's data sheet.

    Peak FLOP/s are in `models.flops`, by the name that the device reports. Bandwidths are peaks of one accelerator in
    one direction: data sheets give both directions together for NVLink and Infinity Fabric, and some do for PCIe.
    """

    reported_name: str
    """Name that CUDA reports, without the maker's name."""
    gib: float
    """Memory that PyTorch sees: the smallest "total capacity" in public reports of its out-of-memory message. The data
    sheet has more, because the driver and error correction take some."""
    memory_bandwidth: float
    """GB/s."""
    link: str
    link_bandwidth: float
    """GB/s to the other accelerators of its node."""
    network_bandwidth: float
    """GB/s to other nodes: the adapters of the maker's machine with eight accelerators, or of a common one."""
    watts: float
    """Maximum power of the board."""
    source: str
    host: Host


# Gen 3, 4 and 5 of PCIe x16, in one direction.
_PCIE3, _PCIE4, _PCIE5 = ("PCIe 3", 16.0), ("PCIe 4", 32.0), ("PCIe 5", 64.0)
# Network of one accelerator: an adapter of 400, 200 or 100 Gb/s, or an eighth of one of 200 Gb/s.
_NDR, _HDR, _EDR, _SHARED = 50.0, 25.0, 12.5, 3.125

# Machines that hold the accelerators: the maker's own, or a common one. Memory by the processors' data sheets: Xeon
# Platinum 8168 (6 channels of DDR4-2666), E5-2698 v4 (4 of DDR4-2400), 8480C (8 of DDR5-4800), 8570 (8 of DDR5-5600),
# EPYC 7742 (8 of DDR4-3200), 9654 (12 of DDR5-4800), two of each; one EPYC 7003 or 9004 in a server with PCIe cards.
# Uplinks and disks of the DGX-2: 3 and 1.6 GB/s for each of 16 GPUs, 12 GB/s for one (Rajbhandari et al. 2021,
# "ZeRO-Infinity", figure 2b). All links of eight H200: 504 GB/s (MLPerf Inference 4.1, NVIDIA's system description).
# Disks of the DGX A100: 25 GB/s (its data sheet), assumed for later ones too; elsewhere one disk with PCIe 4.
_DGX1 = Host("DGX-1", 16, 64, 153.6, 2)
_DGX2 = Host("DGX-2", 16, 64, 256, 25.6)
_DGX_A100 = Host("DGX A100", 32, 256, 409.6, 25)
_DGX_H100 = Host("DGX H100", 64, 504, 614.4, 25)
_DGX_B200 = Host("DGX B200", 64, 504, 716.8, 25)
_EPYC_9004 = Host("two EPYC 9654", 64, 512, 921.6, 25)
_SERVER3 = Host("a server with PCIe 3", 16, 64, 153.6, 3.5)
_SERVER = Host("a server with PCIe 4", 32, 128, 204.8, 7)
_SERVER5 = Host("a server with PCIe 5", 64, 256, 460.8, 7)
_DESKTOP4 = Host("a desktop with two channels of DDR4-3200", 32, 32, 51.2, 7)
_DESKTOP5 = Host("a desktop with two channels of DDR5-5200", 32, 32, 83.2, 7)
_DESKTOP6 = Host("a desktop with two channels of DDR5-5600", 64, 64, 89.6, 7)

ACCELERATORS: dict[str, Accelerator] = {
    "h100-80gb": Accelerator(
        "H100 80GB HBM3",
        79.10,
        3350,
        "NVLink 4",
        450,
        _NDR,
        700,
        "NVIDIA H100 data sheet (SXM5); DGX H100 data sheet",
        _DGX_H100,
    ),
    "h100-80gb-pcie": Accelerator(
        "H100 PCIe", 79.10, 2000, *_PCIE5, _NDR, 350, "NVIDIA H100 PCIe product brief", _SERVER5
    ),
    "h100-96gb": Accelerator(
        "H100",
        95.04,
        2400,
        "NVLink 4",
        450,
        _NDR,
        500,
        "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (HBM2e, 2.4 TB/s, 500 W); links of the SXM5",
        _DGX_H100,
    ),
    "h200": Accelerator("H200", 139.80, 4800, "NVLink 4", 450, _NDR, 700, "NVIDIA H200 data sheet (SXM)", _DGX_H100),
    "b200": Accelerator(
        "B200", 178.35, 8000, "NVLink 5", 900, _NDR, 1000, "NVIDIA HGX B200 data sheet; DGX B200 data sheet", _DGX_B200
    ),
    "a100-40gb": Accelerator(
        "A100-SXM4-40GB",
        39.38,
        1555,
        "NVLink 3",
        300,
        _HDR,
        400,
        "NVIDIA A100 data sheet (SXM4); DGX A100 data sheet",
        _DGX_A100,
    ),
    "a100-80gb": Accelerator(
        "A100-SXM4-80GB",
        79.14,
        2039,
        "NVLink 3",
        300,
        _HDR,
        400,
        "NVIDIA A100 data sheet (SXM4); DGX A100 data sheet",
        _DGX_A100,
    ),
    "a100-40gb-pcie": Accelerator(
        "A100-PCIE-40GB", 39.38, 1555, *_PCIE4, _HDR, 250, "NVIDIA A100 data sheet (PCIe)", _SERVER
    ),
    "a100-80gb-pcie": Accelerator(
        "A100 80GB PCIe", 79.14, 1935, *_PCIE4, _HDR, 300, "NVIDIA A100 data sheet (PCIe)", _SERVER
    ),
    "l40s": Accelerator("L40S", 44.39, 864, *_PCIE4, _HDR, 350, "NVIDIA L40S data sheet", _SERVER),
    "l4": Accelerator("L4", 22.03, 300, *_PCIE4, _EDR, 72, "NVIDIA L4 data sheet", _SERVER),
    "a10": Accelerator("A10", 21.99, 600, *_PCIE4, _EDR, 150, "NVIDIA A10 data sheet", _SERVER),
    "t4": Accelerator("Tesla T4", 14.56, 320, *_PCIE3, _SHARED, 70, "NVIDIA T4 product brief", _SERVER3),
    "v100-16gb": Accelerator(
        "Tesla V100-SXM2-16GB",
        15.77,
        900,
        "NVLink 2",
        150,
        _EDR / 2,
        300,
        "NVIDIA V100 data sheet; DGX-1 data sheet",
        _DGX1,
    ),
    "v100-32gb": Accelerator(
        "Tesla V100-SXM2-32GB",
        31.73,
        900,
        "NVLink 2",
        150,
        _EDR / 2,
        300,
        "NVIDIA V100 data sheet; DGX-1 data sheet",
        _DGX2,
    ),
    "v100-16gb-pcie": Accelerator(
        "Tesla V100-PCIE-16GB", 15.77, 900, *_PCIE3, _SHARED, 250, "NVIDIA V100 data sheet", _SERVER3
    ),
    "v100-32gb-pcie": Accelerator(
        "Tesla V100-PCIE-32GB", 31.73, 900, *_PCIE3, _SHARED, 250, "NVIDIA V100 data sheet", _SERVER3
    ),
    "rtx-3090": Accelerator(
        "GeForce RTX 3090", 23.57, 936, *_PCIE4, _SHARED, 350, 'NVIDIA white paper "GA102"', _DESKTOP4
    ),
    "rtx-4090": Accelerator(
        "GeForce RTX 4090", 23.52, 1008, *_PCIE4, _SHARED, 450, 'NVIDIA white paper "Ada"', _DESKTOP5
    ),
    "rtx-5090": Accelerator(
        "GeForce RTX 5090", 31.34, 1792, *_PCIE5, _SHARED, 575, 'NVIDIA white paper "RTX Blackwell"', _DESKTOP6
    ),
    "mi300x": Accelerator(
        "AMD Instinct MI300X",
        191.69,
        5300,
        "Infinity Fabric",
        448,
        _NDR,
        750,
        "AMD Instinct MI300X data sheet",
        _EPYC_9004,
    ),
}


def find_hardware(
    text: str = "", nodes: int = 1, host_memory: str | None = None, interconnect: str | None = None
) -> Hardware:
    """Find hardware by name: `h100-80gb:8`, `cpu:2` (processes on this machine's processor), or "" for this machine.

    `host_memory` is a size (`1TB`); `interconnect` is the rate of one accelerator to other nodes (`400Gb/s`, `50GB/s`).
    Raise InputError at the wrong option, with the nearest names.
    """
    if nodes < 1:
        raise InputError.at("--nodes", f"{nodes} is not a number of nodes", "use 1 or more")
    name, _, count = text.strip().partition(":")
    if count and not (count.isdecimal() and 1 <= int(count) <= _MAX_DEVICES):
        what = f"{count!r} is not a number of accelerators per node"
        raise InputError.at("--hardware", what, f"use {name}:8, for example; at most {_MAX_DEVICES:,}")
    host_bytes = _parse_host_memory(host_memory) if host_memory else None
    network = Link(interconnect, _parse_interconnect(interconnect)) if interconnect else None
    if name in ("", "cpu"):
        return _describe_this_machine(int(count) if count else None, nodes, host_bytes, network, on_cpu=name == "cpu")
    name, accelerator = _find_accelerator(name)
    return _build_from_table(name, accelerator, int(count or 1), nodes, host_bytes, network)


def _find_accelerator(name: str) -> tuple[str, Accelerator]:
    """Look up an accelerator by artel's name or by the name that the device reports."""
    normalized = re.sub(r"[\s_]+", "-", name.lower().strip()).removeprefix("nvidia-")
    if normalized in ACCELERATORS:
        return normalized, ACCELERATORS[normalized]
    similar_names = [key for key in ACCELERATORS if normalized and key.startswith(normalized)]
    by_reported_name = {
        accelerator.reported_name.lower().replace(" ", "-"): key for key, accelerator in ACCELERATORS.items()
    }
    if normalized in by_reported_name and not similar_names:
        return by_reported_name[normalized], ACCELERATORS[by_reported_name[normalized]]
    similar_names = similar_names or difflib.get_close_matches(normalized, ACCELERATORS, 3, cutoff=0.5)
    fix = (
        f"did you mean {' or '.join(similar_names)}?"
        if similar_names
        else f"use cpu, or one of: {', '.join(ACCELERATORS)}"
    )
    raise InputError.at("--hardware", f"{name!r} is not in the table of accelerators", fix)


def _build_from_table(
    name: str, accelerator: Accelerator, count: int, nodes: int, host_memory: int | None, network: Link | None
) -> Hardware:
    return Hardware(
        name=name,
        device="cuda",
        count=count,
        nodes=nodes,
        memory_bytes=int(accelerator.gib * 2**30),
        memory_bandwidth=accelerator.memory_bandwidth * _GIGA,
        peak_flops={precision: peak * 1e12 for precision, peak in data_sheet(accelerator.reported_name).items()},
        link=Link(accelerator.link, accelerator.link_bandwidth * _GIGA),
        network=network or Link("network", accelerator.network_bandwidth * _GIGA),
        watts=accelerator.watts,
        host_memory_bytes=host_memory,
        source=accelerator.source,
        host=accelerator.host,
    )


def _describe_this_machine(
    count: int | None, nodes: int, host_memory: int | None, network: Link | None, on_cpu: bool
) -> Hardware:
    machine_memory = memory()
    host_bytes = host_memory or machine_memory.limit or machine_memory.total
    if torch.cuda.is_available() and not on_cpu:
        return _describe_gpus(count or torch.cuda.device_count(), nodes, host_bytes, network)
    return Hardware(
        name=f"{processor_name()}, {usable_cores()} cores",
        device="cpu",
        count=count or 1,
        nodes=nodes,
        memory_bytes=host_bytes,
        memory_bandwidth=None,
        peak_flops={},
        link=None,
        network=network,
        watts=None,
        host_memory_bytes=host_bytes,
        source="this machine",
    )


def _describe_gpus(count: int, nodes: int, host_memory: int, network: Link | None) -> Hardware:
    properties = torch.cuda.get_device_properties(0)
    reported = properties.name.removeprefix("NVIDIA ")
    accelerator = next(
        (accelerator for accelerator in ACCELERATORS.values() if accelerator.reported_name == reported), None
    )
    return Hardware(
        name=properties.name,
        device="cuda",
        count=count,
        nodes=nodes,
        memory_bytes=properties.total_memory,
        memory_bandwidth=accelerator.memory_bandwidth * _GIGA if accelerator else None,
        peak_flops={precision: peak * 1e12 for precision, peak in data_sheet(reported).items()},
        link=Link(accelerator.link, accelerator.link_bandwidth * _GIGA) if accelerator else None,
        network=network or (Link("network", accelerator.network_bandwidth * _GIGA) if accelerator else None),
        watts=accelerator.watts if accelerator else None,
        host_memory_bytes=host_memory,
        source=accelerator.source if accelerator else "this machine",
        host=accelerator.host if accelerator else None,
    )


def _parse_host_memory(text: str) -> int:
    try:
        return read_bytes(text)
    except ValueError as error:
        what, _, fix = str(error).partition("; ")
        raise InputError.at("--host-memory", what, fix) from None


def _parse_interconnect(text: str) -> float:
    """Return the bytes per second of `400Gb/s` or `50GB/s`: a lower-case b means bits."""
    match = _RATE.fullmatch(text.strip())
    if match is None or match[1].count(".") > 1 or not float(match[1]):
        raise InputError.at("--interconnect", f"{text!r} is not a rate", _RATE_EXAMPLE)
    scale = {"M": 1e6, "G": 1e9, "T": 1e12}[match[2]]
    return float(match[1]) * scale / (1 if match[3] == "B" else 8)
