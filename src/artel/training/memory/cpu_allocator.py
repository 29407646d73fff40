"""Host memory that tensors leave is kept for those of the next step, not given back to the kernel and fetched anew.

glibc's malloc gives each tensor above 32 MB pages of its own, and gives memory back that lies free at the end of its
heap. The kernel clears each page that it hands out: of a GPT-2's training step on a CPU (4 x 256, 32 rows of 256) that
was 21 to 27 % of the time. Kept memory makes the peak of the steps 12 to 33 % higher, and it does not grow from there
with rows of unequal length (benchmarks/kept_memory.py).

What the heap grows by is asked for in pages of 2 MB where the kernel has them: to look up where a page of 4 KB lies
costs a part of each step, in virtual machines above all, which look it up twice (benchmarks/NOTES.md has the figures).

Where C++ can be built, tensors from 256 KB on get a range of addresses of their own (models/cpu/memory.cpp). PyTorch
asks glibc for memory that begins at a multiple of 64 bytes, so glibc looks for a little more than a tensor takes, and
what it leaves at the ends goes to small objects: where a tensor was, one of its size no longer fits. Where layers keep
their inputs alone, each left 21 MB behind beside the 6 that it kept (benchmarks/results.md).
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

from artel.host import memory
from artel.models.cpu.build import library as built

KEPT_SHARE = 0.35
"""How much more memory a step takes where it is kept: a little over the most that was measured, 0.33."""
# Of mallopt(3), with glibc's own values (malloc/malloc.c); the largest threshold is the one that it grows to by itself.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_CHOSEN = {"MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
_NEVER, _USUAL_MMAP_MAX, _LARGEST_MMAP_THRESHOLD = -1, 65_536, 32 << 20
_LARGE_PAGE = 2 << 20
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")


@contextmanager
def retained_host_memory(device: torch.device) -> Iterator[None]:
    """Within the block free memory stays with this process, where it computes on a CPU and its C library is glibc.

    Who has set one of these numbers in the environment (_CHOSEN) has chosen otherwise, and is left alone.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc" or os.environ.keys() & _CHOSEN:
        yield
        return
    library = ctypes.CDLL(None)
    library.mallopt(_TRIM_THRESHOLD, _NEVER)
    library.mallopt(_MMAP_MAX, 0)
    host = memory()
    room = host.limit or host.total
    own_range = _own_range(room) if has_no_memory_limit() else None
    if own_range is None and has_no_memory_limit():
        _grow_in_large_pages(library, room // 2)
    try:
        yield
    finally:
        if own_range is not None:
            own_range.let_tensors_go()
        library.mallopt(_MMAP_MAX, _USUAL_MMAP_MAX)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)
        library.malloc_trim(0)


def release_free_memory() -> None:
    """Give what is free back to the kernel, also while it is kept: what a step takes can be measured from there."""
    if platform.libc_ver()[0] != "glibc" or os.environ.keys() & _CHOSEN:
        return
    ctypes.CDLL(None).malloc_trim(0)
    if has_no_memory_limit() and (own_range := _built()) is not None:
        own_range.trim_tensors()


def has_no_memory_limit() -> bool:
    """Whether room that is only promised counts for nothing: no limit of this process, no strict kernel."""
    limits = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    try:
        strict = _OVERCOMMIT.read_text().strip() == "2"
    except OSError:
        return False
    return not strict and all(limit == resource.RLIM_INFINITY for limit in limits)


def _own_range(size: int) -> ctypes.CDLL | None:
    """Let large tensors have `size` bytes of addresses of their own, by the functions that end it; None without C++."""
    functions = _built()
    return functions if functions is not None and functions.keep_tensors(ctypes.c_size_t(size)) else None


def _built() -> ctypes.CDLL | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is slower without it
        return built("memory")


def _grow_in_large_pages(library: ctypes.CDLL, size: int) -> None:
    """Have the next `size` bytes that the heap grows by in large pages, where the kernel has them.

    The heap grows by them at once and holds them as free: they cost address space, and memory only as they are used.
    """
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    room = library.malloc(size)
    if room is None:
        return
    first, last = -(-room // _LARGE_PAGE) * _LARGE_PAGE, (room + size) // _LARGE_PAGE * _LARGE_PAGE
    library.madvise(first, last - first, mmap.MADV_HUGEPAGE)
    library.free(room)
