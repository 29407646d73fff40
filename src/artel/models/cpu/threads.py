"""Which of a process's threads PyTorch's operations are shared over.

Each thread that computes gets helpers of its own, one for each core but its own, which OpenMP keeps until it ends. As
soon as a process has more of them than cores, those of GNU OpenMP no longer watch for the next operation but sleep
(gomp_managed_threads in libgomp/team.c): waking them made a training step on two cores 1.4 to 1.5 times as
long (benchmarks/NOTES.md). So one thread computes, and the others stay on one core or give their helpers back.
"""

from __future__ import annotations

import ctypes

import torch

_PAUSE_SOFT = 1  # omp_pause_soft of OpenMP 5.0, which keeps the number of threads that was set


def compute_on_one_core() -> None:
    """Have this thread compute without helpers, and threads that are begun later; those that compute are left alone."""
    torch.set_num_threads(1)


def release_helpers() -> None:
    """Give back the helpers of this thread, which another is to compute after; its next operation makes new ones."""
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)
    if pause is not None:  # OpenMP 5.0; PyTorch for Linux loads it for all libraries
        pause(_PAUSE_SOFT)
