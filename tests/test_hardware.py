"""The table of accelerators and what a user may write for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from artel.errors import InputError
from artel.host import memory
from artel.models.flops import data_sheet
from artel.planning.hardware import ACCELERATORS, find_hardware


def test_every_accelerator_has_all_figures_and_a_source() -> None:
    for name, row in ACCELERATORS.items():
        peaks = data_sheet(row.reported_name)
        assert peaks.get("fp16"), name  # all train in 16 bits; those before Ampere have no bf16
        assert min(row.memory_bandwidth, row.link_bandwidth, row.network_bandwidth, row.watts) > 0, name
        assert row.source, name
        # PyTorch sees a little less than the number in the name, which counts GiB on some boards and GB on others.
        gigabytes = [int(word.removesuffix("gb")) for word in name.split("-") if word.endswith("gb")]
        assert all(0.88 < row.gib / size <= 1 for size in gigabytes), name
        assert row.link_bandwidth < row.memory_bandwidth, name


def test_a_node_of_eight() -> None:
    node = find_hardware("h100-80gb:8", nodes=4, host_memory="1TB")
    assert (node.count, node.nodes, node.world_size, node.device) == (8, 4, 32, "cuda")
    assert 79 * 2**30 < node.memory_bytes < 80 * 10**9 * 1.07
    assert node.peak_flops["bf16"] == 989.5e12
    assert node.memory_bandwidth == 3.35e12
    assert node.link is not None
    assert node.network is not None
    assert (node.link.bandwidth, node.network.bandwidth) == (450e9, 50e9)
    assert node.host_memory_bytes == 10**12
    assert not node.shares_memory


def test_the_name_that_the_device_reports_is_a_name() -> None:
    assert find_hardware("NVIDIA H100 80GB HBM3").name == "h100-80gb"
    assert find_hardware("NVIDIA GeForce RTX 4090:2").name == "rtx-4090"
    assert find_hardware("A100_80GB").name == "a100-80gb"


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("h100", {}, "did you mean h100-80gb or h100-80gb-pcie or h100-96gb?"),
        ("a100-80", {}, "did you mean a100-80gb or a100-80gb-pcie?"),
        ("rtx4090", {}, "rtx-4090"),
        ("tpu", {}, "use cpu, or one of: h100-80gb"),
        *((f"h100-80gb:{count}", {}, "not a number of accelerators") for count in ("0", "-1", "many", "1000000")),
        *(("h100-80gb:8", {"interconnect": rate}, "is not a rate") for rate in ("fast", "400", "0GB/s", "4.0.0Gb/s")),
        ("h100-80gb", {"host_memory": "much"}, "--host-memory"),
        ("h100-80gb", {"nodes": 0}, "--nodes"),
    ],
)
def test_what_is_no_hardware_is_refused(text: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        find_hardware(text, **options)
    (problem,) = error.value.problems
    assert says in str(problem)
    if not options:
        assert problem.where == "--hardware"


def test_the_interconnect_in_bits_and_in_bytes() -> None:
    for text, bandwidth in (("400Gb/s", 50e9), ("50GB/s", 50e9), ("100Gbit/s", 12.5e9), ("3.2Tb/s", 400e9)):
        network = find_hardware("h100-80gb:8", 2, interconnect=text).network
        assert network is not None
        assert network.bandwidth == bandwidth


def test_this_machine_as_a_cpu() -> None:
    here = find_hardware("cpu:2")
    about = memory()
    assert (here.device, here.count, here.shares_memory) == ("cpu", 2, True)
    assert here.memory_bytes == (about.limit or about.total)


def test_the_page_lists_all_names() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs/hardware.md").read_text(encoding="utf-8")
    block = "".join(line for line in page.splitlines(keepends=True) if line.startswith("    "))
    assert block.split() == list(ACCELERATORS)
