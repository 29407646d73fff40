"""The hardware that a run is planned for: this machine, or one named on the command line, `h100-80gb:8`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field

import torch

from artel.config.schema.quantities import read_bytes
from artel.errors import InputError
from artel.host import memory, processor, usable_cores
from artel.models.flops import data_sheet
from artel.planning.accelerators import ACCELERATORS, Accelerator

_GIGA = 10**9
_MOST_DEVICES = 1024  # on one node; there are none with more than 72 yet
_RATE = re.compile(r"([\d.]+)\s*([GTM])(b|bit|B)(?:/s|ps)?")
_RATE_EXAMPLE = "write it for one accelerator, in bits or bytes a second: 400Gb/s or 50GB/s"


@dataclass(frozen=True, slots=True)
class Link:
    """What accelerators talk through."""

    name: str
    bandwidth: float
    """Peak bytes/s of one accelerator, in one direction."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """`nodes` machines with `count` accelerators each; a CPU counts as one accelerator for each process."""

    name: str
    """As in the table, `h100-80gb`; of this machine, what its GPU or its processor is called."""
    device: str
    """`cuda` (also for ROCm, as PyTorch calls it) or `cpu`."""
    count: int
    nodes: int
    memory_bytes: int
    """Of each accelerator, as PyTorch sees it. On a CPU all processes of a node share it."""
    memory_bandwidth: float | None
    """Peak bytes/s of one accelerator; None: not in the table."""
    peak_flops: dict[str, float] = field(hash=False)
    """Peak FLOP/s of one accelerator by precision, dense; empty: unknown."""
    link: Link | None
    """Between the accelerators of a node; None: unknown."""
    network: Link | None
    """Between nodes; None: unknown."""
    watts: float | None
    """The most that one accelerator may draw; None: unknown."""
    host_memory_bytes: int | None
    """Of each node; None: unknown."""
    source: str
    """Where the figures are from."""

    @property
    def world_size(self) -> int:
        return self.count * self.nodes

    @property
    def has_rates(self) -> bool:
        """Whether it is known how fast an accelerator computes and moves bytes."""
        return bool(self.memory_bandwidth and self.peak_flops)

    @property
    def shares_memory(self) -> bool:
        """Whether `memory_bytes` is that of all processes of a node together."""
        return self.device == "cpu"


def find_hardware(
    text: str = "", nodes: int = 1, host_memory: str | None = None, interconnect: str | None = None
) -> Hardware:
    """The hardware that a user names: `h100-80gb:8`, `cpu:2` (processes on this machine's processor), or "" for this
    machine as it is.

    `host_memory` is a size (`1TB`); `interconnect` is the rate of one accelerator to other nodes (`400Gb/s`, `50GB/s`).
    Raises InputError, at the option that is wrong, with the nearest names.
    """
    if nodes < 1:
        raise InputError.at("--nodes", f"{nodes} nodes are none", "write 1 or more")
    name, _, count = text.strip().partition(":")
    if count and not (count.isdecimal() and 1 <= int(count) <= _MOST_DEVICES):
        what = f"{count!r} is no number of accelerators of a node"
        raise InputError.at("--hardware", what, f"write {name}:8, at most {_MOST_DEVICES:,}")
    host = _size(host_memory) if host_memory else None
    network = Link(interconnect, _rate(interconnect)) if interconnect else None
    if name in ("", "cpu"):
        return _this_machine(int(count) if count else None, nodes, host, network, on_cpu=name == "cpu")
    name, row = _row(name)
    return _from_table(name, row, int(count or 1), nodes, host, network)


def _row(name: str) -> tuple[str, Accelerator]:
    """The row of an accelerator by our name or by the name that the device reports."""
    asked = re.sub(r"[\s_]+", "-", name.lower().strip()).removeprefix("nvidia-")
    if asked in ACCELERATORS:
        return asked, ACCELERATORS[asked]
    near = [key for key in ACCELERATORS if asked and key.startswith(asked)]
    by_report = {row.reports.lower().replace(" ", "-"): key for key, row in ACCELERATORS.items()}
    if asked in by_report and not near:
        return by_report[asked], ACCELERATORS[by_report[asked]]
    near = near or difflib.get_close_matches(asked, ACCELERATORS, 3, cutoff=0.5)
    fix = f"did you mean {' or '.join(near)}?" if near else f"write cpu, or one of: {', '.join(ACCELERATORS)}"
    raise InputError.at("--hardware", f"there is no {name!r} in the table of accelerators", fix)


def _from_table(
    name: str, row: Accelerator, count: int, nodes: int, host_memory: int | None, network: Link | None
) -> Hardware:
    return Hardware(
        name=name,
        device="cuda",
        count=count,
        nodes=nodes,
        memory_bytes=int(row.gib * 2**30),
        memory_bandwidth=row.memory_bandwidth * _GIGA,
        peak_flops={precision: peak * 1e12 for precision, peak in data_sheet(row.reports).items()},
        link=Link(row.link, row.link_bandwidth * _GIGA),
        network=network or Link("network", row.network_bandwidth * _GIGA),
        watts=row.watts,
        host_memory_bytes=host_memory,
        source=row.source,
    )


def _this_machine(
    count: int | None, nodes: int, host_memory: int | None, network: Link | None, on_cpu: bool
) -> Hardware:
    here = memory()
    host = host_memory or here.limit or here.total
    if torch.cuda.is_available() and not on_cpu:
        return _gpus_here(count or torch.cuda.device_count(), nodes, host, network)
    return Hardware(
        name=f"{processor()}, {usable_cores()} cores",
        device="cpu",
        count=count or 1,
        nodes=nodes,
        memory_bytes=host,
        memory_bandwidth=None,
        peak_flops={},
        link=None,
        network=network,
        watts=None,
        host_memory_bytes=host,
        source="this machine",
    )


def _gpus_here(count: int, nodes: int, host_memory: int, network: Link | None) -> Hardware:
    about = torch.cuda.get_device_properties(0)
    reported = about.name.removeprefix("NVIDIA ")
    row = next((row for row in ACCELERATORS.values() if row.reports == reported), None)
    return Hardware(
        name=about.name,
        device="cuda",
        count=count,
        nodes=nodes,
        memory_bytes=about.total_memory,
        memory_bandwidth=row.memory_bandwidth * _GIGA if row else None,
        peak_flops={precision: peak * 1e12 for precision, peak in data_sheet(reported).items()},
        link=Link(row.link, row.link_bandwidth * _GIGA) if row else None,
        network=network or (Link("network", row.network_bandwidth * _GIGA) if row else None),
        watts=row.watts if row else None,
        host_memory_bytes=host_memory,
        source=row.source if row else "this machine",
    )


def _size(text: str) -> int:
    try:
        return read_bytes(text)
    except ValueError as error:
        what, _, fix = str(error).partition("; ")
        raise InputError.at("--host-memory", what, fix) from None


def _rate(text: str) -> float:
    """Bytes a second of `400Gb/s` or `50GB/s`: a small b is a bit, as networks are sold."""
    match = _RATE.fullmatch(text.strip())
    if match is None or match[1].count(".") > 1 or not float(match[1]):
        raise InputError.at("--interconnect", f"{text!r} is no rate", _RATE_EXAMPLE)
    scale = {"M": 1e6, "G": 1e9, "T": 1e12}[match[2]]
    return float(match[1]) * scale / (1 if match[3] == "B" else 8)
