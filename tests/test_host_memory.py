"""Memory that tensors leave stays with the process while it trains on a CPU, in large pages; then it is given back."""

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from artel.training.memory import release_free_memory, retained_host_memory
from support.waiting import LIMIT

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told to keep memory")

LAYERS, KEPT, PASSING = 16, 4, 12  # layers; megabytes that each keeps, and of each of four tensors that it does not
MEGABYTES = 64  # above the 32 MB from which on glibc's malloc would give a tensor pages of its own


def page_faults(megabytes: int = MEGABYTES) -> int:
    """Pages that the kernel hands out for one tensor after another, each gone before the next."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        torch.ones(megabytes << 18)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def in_large_pages() -> int:
    """Bytes of this process's memory that lie in pages of 2 MB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))


def address_space() -> int:
    """Bytes, used or not."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measured(**environment: str) -> dict:
    """Page faults and memory before, within and after the block, in a process of its own."""
    command = [sys.executable, __file__]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_kept_within_the_block_and_given_back_after_it():
    result = measured()
    assert result["within"] < result["before"] / 8
    assert result["after"] > result["before"] / 2
    assert result["kept"] > 0.9 * (MEGABYTES << 20)
    assert result["given back"] > 0.9 * (MEGABYTES << 20)
    assert result["released"] > 0.9 * (MEGABYTES << 20)  # within the block, for what is measured next


LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.slow
@pytest.mark.skipif(
    not LARGE_PAGES.is_file() or "[never]" in LARGE_PAGES.read_text(), reason="this kernel has no large pages"
)
def test_it_lies_in_large_pages():
    assert measured()["large"] > 0.8 * (MEGABYTES << 20)


@pytest.mark.processes
def test_address_space_that_is_limited_is_not_taken_ahead():
    free, limited = measured(), measured(LIMITED="1")
    assert free["taken"] > 1 << 30
    assert limited["taken"] < 1 << 30
    assert limited["within"] < limited["before"] / 8
    assert free["left"] < 1 << 30


@pytest.mark.processes
@pytest.mark.skipif(not shutil.which("g++"), reason="tensors have memory of their own where C++ can be built")
def test_where_a_tensor_was_one_of_its_size_fits():
    """Layers whose inputs alone are kept: each makes room for no more than that, whatever small things lie between."""
    assert measured(LAYERS="1")["layers"] < (LAYERS * KEPT + 4 * PASSING + 12) << 20


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="tensors have memory of their own where C++ can be built")
def test_addresses_are_given_back_with_the_last_tensor():
    """A model may outlive its training, as in a notebook."""
    result = measured(OUTLIVING="1")
    assert result["within"] > 1 << 30
    assert result["left"] < 1 << 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_who_has_tuned_the_library_is_left_alone(name):
    result = measured(**{name: "glibc.malloc.mmap_max=65536" if name == "GLIBC_TUNABLES" else "65536"})
    assert result["within"] > result["before"] / 2


def run_layers() -> list[object]:
    """What layers keep, each of them after tensors that are gone when it ends, and small ones that stay."""
    kept: list[object] = []
    for _ in range(LAYERS):
        passing = []
        for _ in range(4):
            passing.append(torch.ones(PASSING << 18))
            kept += [torch.ones(5) for _ in range(20)]
        kept.append(torch.ones(KEPT << 18))
    return kept


def main() -> None:
    if "LAYERS" in os.environ:
        with retained_host_memory(torch.device("cpu")):
            start = resident()
            kept = run_layers()
            print(json.dumps({"layers": resident() - start}))
            del kept
        return
    if "OUTLIVING" in os.environ:
        room = address_space()
        with retained_host_memory(torch.device("cpu")):
            outliving = torch.ones(MEGABYTES << 18)
            within = address_space() - room
        del outliving
        print(json.dumps({"within": within, "left": address_space() - room}))
        return
    if "LIMITED" in os.environ:
        resource.setrlimit(resource.RLIMIT_AS, (64 << 30, resource.RLIM_INFINITY))
    page_faults()
    result = {"before": page_faults()}
    start, room = resident(), address_space()
    with retained_host_memory(torch.device("cpu")):
        page_faults()
        result["within"] = page_faults()
        result["kept"] = resident() - start
        result["taken"] = address_space() - room
        kept = torch.ones(MEGABYTES << 18)
        result["large"] = in_large_pages()
        del kept
        free = resident()
        release_free_memory()
        result["released"] = free - resident()
    result["given back"] = start + result["kept"] - resident()
    result["left"] = address_space() - room
    # Larger than what was kept, 64 MB or now and then twice that: they find no place where that was.
    result["after"] = page_faults(4 * MEGABYTES) / 4
    print(json.dumps(result))


if __name__ == "__main__":
    main()
