"""The processes of a run, as the launcher's environment describes them (torchrun, or none for a single process)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from artel.errors import InputError, WorkError
from artel.host import usable_cores
from artel.parallel.tcp_store import process_store

T = TypeVar("T")
R = TypeVar("R")

# Long enough for a checkpoint on a slow disk, short enough that a lost rank does not hold its peers for an hour.
_TIMEOUT = timedelta(minutes=20)
# The newest process group. DistributedDataParallel holds it too; were that reference the last, the model's end would
# destroy the group with the interpreter's lock held, and wait for gloo's threads while one of them waits for that lock
# (torch 2.13; one of 24 interrupted runs never ended). What Python itself holds is given up without the lock.
_kept: list[dist.ProcessGroup | None] = []


@dataclass(frozen=True, slots=True)
class World:
    """This process among those of the run."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    on_host: int = 1
    """How many of them are on this host."""

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and tells."""
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank; each is what can be pickled."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def share(self, work: Callable[[list[T]], list[R]], items: list[T]) -> list[R]:
        """What `work` makes of all items, one of each; each rank does a part. Raises WorkError on all if one fails."""
        if self.size == 1:
            return work(items)
        mine, done, failure = items[self.rank :: self.size], [], ""
        try:
            done = work(mine) if mine else []
        except Exception as error:  # else the others would wait for ever
            failure = str(error) or type(error).__name__
        together: list[Any] = [None] * len(items)
        for number, (theirs, wrong) in enumerate(self.all_gather((done, failure))):
            if wrong:
                raise WorkError.at(f"process {number}", wrong, "see what it says")
            together[number :: self.size] = theirs
        return together

    def wait_at_most(self, seconds: float) -> None:
        """From now on collectives, of every group there is, fail after so long; libraries give each group its own."""
        if self.size > 1:
            for group in dist.distributed_c10d._world.pg_map:
                group.set_timeout(timedelta(seconds=seconds))


def local_device(local_rank: int = 0) -> torch.device:
    """What a process of this host computes on: the GPU of its number, or the CPU where there is none."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def join_world(threads: int | None) -> Iterator[World]:
    """Join the process group, gloo on CPU and nccl on GPU, for the length of the block; on a single process, none.

    `threads` are CPU threads of each process; by default its cores, shared with others that may use them.
    """
    environment = os.environ
    world_size = int(environment.get("WORLD_SIZE", "1"))
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    local_size = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    device = local_device(local_rank)
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            what = f"process {local_rank} of this host has no GPU: PyTorch sees {torch.cuda.device_count()}"
            fix = "start as many processes as there are GPUs, or write CUDA_VISIBLE_DEVICES= to train on CPUs"
            raise InputError.at("--nproc", what, fix)
        torch.cuda.set_device(device)
    if world_size == 1:
        torch.set_num_threads(threads or usable_cores())
        yield World(0, 1, 0, device)
        return
    # Numbers that the host needs (counts, signals) go through gloo in either case, so that no step waits for a GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank = int(environment["RANK"])
    store = process_store(rank, _TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    _kept[:] = [dist.group.WORLD]
    torch.set_num_threads(threads or _threads_here())
    try:
        yield World(dist.get_rank(), dist.get_world_size(), local_rank, device, local_size)
    except BaseException:
        if device.type == "cpu":  # nccl would wait for a peer that may be gone
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _threads_here() -> int:
    """How many threads keep the cores busy that this process may use, with the others of its host that may use them.

    srun and mpirun may give each process cores of its own (--cpus-per-task, --bind-to): they are not shared.
    """
    cores = sorted(os.sched_getaffinity(0))
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, (socket.gethostname(), cores))
    return threads_of(cores, [theirs for host, theirs in of_all if host == socket.gethostname()])


def threads_of(cores: list[int], of_all: list[list[int]]) -> int:
    """The threads of a process that may use these `cores`, where all processes of its host may use `of_all`."""
    sharing = sum(not set(cores).isdisjoint(theirs) for theirs in of_all)
    return max(1, len(cores) // sharing)
