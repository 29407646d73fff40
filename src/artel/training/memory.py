"""Memory of a training process: its current size, and keeping freed host memory for the next step.

glibc's malloc gives each tensor above 32 MB its own pages, and returns free memory at the end of its heap to the
kernel. The kernel clears each page that it hands out, which takes 21 to 27 % of a GPT-2's training step on a CPU (4 x
256, 32 rows of 256). Keeping freed memory raises the peak by 12 to 33 %, and it does not grow further with rows of
unequal length (benchmarks/kept_memory.py).

The heap grows in pages of 2 MB if the kernel has them: address translation of 4 KB pages takes a part of each step,
above all in virtual machines, which translate twice (measured in benchmarks/NOTES.md).

If C++ can be built, tensors from 256 KB on get their own address range (models/cpu/memory.cpp). PyTorch asks glibc for
64-byte alignment, so glibc searches for a little more than a tensor takes, and gives the unused ends to small objects.
Afterwards a tensor of the same size no longer fits there. When layers keep only their inputs, each left 21 MB behind
in addition to the 6 MB that it kept (benchmarks/results.md).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from artel.host import memory, process_memory
from artel.integers import ceil_div
from artel.models.cpu.build import load_library

RETAINED_FRACTION = 0.35
"""Extra memory of a step when freed memory is kept, as a fraction. The largest measured was 0.33."""
# Parameters and defaults of mallopt(3) in glibc (malloc/malloc.c). glibc raises the mmap threshold to its maximum.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_MALLOC_VARIABLES = {"MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
_NO_TRIM, _DEFAULT_MMAP_MAX, _MAX_MMAP_THRESHOLD = -1, 65_536, 32 << 20
_LARGE_PAGE = 2 << 20
_OVERCOMMIT_FILE = Path("/proc/sys/vm/overcommit_memory")


@contextmanager
def retained_host_memory(device: torch.device) -> Iterator[None]:
    """Keep freed memory in this process inside the block, if it computes on a CPU and its C library is glibc.

    Does nothing if the user has set one of malloc's environment variables.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc" or os.environ.keys() & _MALLOC_VARIABLES:
        yield
        return
    library = ctypes.CDLL(None)
    library.mallopt(_TRIM_THRESHOLD, _NO_TRIM)
    library.mallopt(_MMAP_MAX, 0)
    host = memory()
    total_bytes = host.limit or host.total
    tensor_range = _reserve_tensor_range(total_bytes) if has_no_memory_limit() else None
    if tensor_range is None and has_no_memory_limit():
        _grow_in_large_pages(library, total_bytes // 2)
    try:
        yield
    finally:
        if tensor_range is not None:
            tensor_range.let_tensors_go()
        library.mallopt(_MMAP_MAX, _DEFAULT_MMAP_MAX)
        library.mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        library.mallopt(_TRIM_THRESHOLD, 2 * _MAX_MMAP_THRESHOLD)
        library.malloc_trim(0)


def release_free_memory() -> None:
    """Return free memory to the kernel, even inside `retained_host_memory`, before the memory of a step is measured."""
    if platform.libc_ver()[0] != "glibc" or os.environ.keys() & _MALLOC_VARIABLES:
        return
    ctypes.CDLL(None).malloc_trim(0)
    if has_no_memory_limit() and (tensor_range := _load_library()) is not None:
        tensor_range.trim_tensors()


def has_no_memory_limit() -> bool:
    """True if unused address space costs nothing: the process has no limit, and the kernel overcommits."""
    limits = (resource.getrlimit(name)[0] for name in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    try:
        strict = _OVERCOMMIT_FILE.read_text().strip() == "2"
    except OSError:
        return False
    return not strict and all(limit == resource.RLIM_INFINITY for limit in limits)


def _reserve_tensor_range(num_bytes: int) -> ctypes.CDLL | None:
    """Give large tensors their own address range. Return the library that manages it, or None without C++."""
    library = _load_library()
    return library if library is not None and library.keep_tensors(ctypes.c_size_t(num_bytes)) else None


def _load_library() -> ctypes.CDLL | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library is optional
        return load_library("memory")


def _grow_in_large_pages(library: ctypes.CDLL, num_bytes: int) -> None:
    """Back the next `num_bytes` bytes of the heap with large pages, if the kernel has them.

    The heap grows at once, and the bytes are free. They take address space now, but memory only when used.
    """
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    address = library.malloc(num_bytes)
    if address is None:
        return
    start, end = ceil_div(address, _LARGE_PAGE) * _LARGE_PAGE, (address + num_bytes) // _LARGE_PAGE * _LARGE_PAGE
    library.madvise(start, end - start, mmap.MADV_HUGEPAGE)
    library.free(address)


def memory_in_use(device: torch.device) -> int:
    """Return the bytes reserved by a GPU's allocator, or the resident size of a process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return process_memory("VmRSS")
