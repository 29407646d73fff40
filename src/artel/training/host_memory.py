"""Host memory that tensors leave is kept for those of the next step, not given back to the kernel and fetched anew.

glibc's malloc gives each tensor above 32 MB pages of its own, and gives memory back that lies free at the end of its
heap. The kernel clears each page that it hands out: of a GPT-2's training step on a CPU (4 x 256, 32 rows of 256) that
was 21 to 26 % of the time. Kept memory makes the peak of the steps 17 to 22 % higher, and it does not grow from there
with rows of unequal length (benchmarks/kept_memory.py).
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

KEPT_SHARE = 0.25
"""How much more memory a step takes where it is kept: a little over the most that was measured, 0.22."""
# Of mallopt(3), with glibc's own values (malloc/malloc.c); the largest threshold is the one that it grows to by itself.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_CHOSEN = {"MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
_NEVER, _USUAL_MMAP_MAX, _LARGEST_MMAP_THRESHOLD = 2**31 - 1, 65_536, 32 << 20


@contextmanager
def kept_host_memory(device: torch.device) -> Iterator[None]:
    """Within the block free memory stays with this process, where it computes on a CPU and its C library is glibc.

    Who has set one of these numbers in the environment (_CHOSEN) has chosen otherwise, and is left alone.
    """
    if device.type != "cpu" or platform.libc_ver()[0] != "glibc" or os.environ.keys() & _CHOSEN:
        yield
        return
    library = ctypes.CDLL(None)
    library.mallopt(_TRIM_THRESHOLD, _NEVER)
    library.mallopt(_MMAP_MAX, 0)
    try:
        yield
    finally:
        library.mallopt(_MMAP_MAX, _USUAL_MMAP_MAX)
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)
        library.malloc_trim(0)
