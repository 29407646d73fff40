"""The processes of a run, as described by the launcher's environment (torchrun, or none for a single process)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from artel.errors import InputError, Problem, WorkError
from artel.host import usable_cores

T = TypeVar("T")
R = TypeVar("R")

# Long enough for a checkpoint on a slow disk. Short enough that peers of a lost rank do not wait for an hour.
_TIMEOUT = timedelta(minutes=20)
# Keeps the current process group alive. DistributedDataParallel holds it too. If that were the last reference, freeing
# the model would destroy the group while holding the GIL, and wait for gloo's threads while one of them waits for the
# GIL (torch 2.13; one of 24 interrupted runs never ended). Python's own reference is released without the GIL.
_current_group: list[dist.ProcessGroup | None] = []


@dataclass(frozen=True, slots=True)
class World:
    """This process and the number of processes in the run."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    on_host: int = 1
    """Number of the run's processes on this host."""

    @property
    def first(self) -> bool:
        """True for the rank that writes files and prints."""
        return self.rank == 0

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in order of rank. Values are pickled."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def map_over_ranks(self, work: Callable[[list[T]], list[R]], items: list[T]) -> list[R]:
        """Divide the items among ranks and return `work(items)`, one result per item.

        Raise WorkError on all ranks if one fails.
        """
        if self.size == 1:
            return work(items)
        local_items = items[self.rank :: self.size]
        local_results: list[R] = []
        failure = ""
        try:
            local_results = work(local_items) if local_items else []
        except Exception as error:  # otherwise the other ranks would wait forever
            failure = str(error) or type(error).__name__
        results: list[Any] = [None] * len(items)
        for rank, (rank_results, rank_failure) in enumerate(self.all_gather((local_results, failure))):
            if rank_failure:
                raise WorkError.at(f"process {rank}", rank_failure, "see its message")
            results[rank :: self.size] = rank_results
        return results

    def call_on_first(self, work: Callable[[], T]) -> T:
        """Return `work()`, called on the first rank only. Raise WorkError on all ranks if it fails."""
        if self.size == 1:
            return work()
        result, failure = None, ""
        if self.first:
            try:
                result = work()
            except Exception as error:  # otherwise the other ranks would wait forever
                failure = str(error) or type(error).__name__
        first_result, first_failure = self.all_gather((result, failure))[0]
        if first_failure:
            raise WorkError.at("process 0", first_failure, "see its message")
        return cast(T, first_result)

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of collectives in every existing group, since libraries create their own."""
        if self.size > 1:
            for group in dist.distributed_c10d._world.pg_map:
                group.set_timeout(timedelta(seconds=seconds))


def local_device(local_rank: int = 0) -> torch.device:
    """Return the GPU with this local rank, or the CPU if there is no GPU."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


@contextmanager
def join_world(threads: int | None) -> Iterator[World]:
    """Join the process group (gloo on CPU, nccl on GPU) inside the block. A single process joins none.

    `threads`: CPU threads of each process. Default: its cores, divided among the processes that may use them.
    """
    environment = os.environ
    world_size = int(environment.get("WORLD_SIZE", "1"))
    local_rank = int(environment.get("LOCAL_RANK", "0"))
    local_size = int(environment.get("LOCAL_WORLD_SIZE", world_size))
    device = local_device(local_rank)
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            what = f"process {local_rank} of this host has no GPU: PyTorch sees {torch.cuda.device_count()}"
            fix = "start one process per GPU, or set CUDA_VISIBLE_DEVICES= to train on CPUs"
            raise InputError.at("--nproc", what, fix)
        # Batches of changing shapes fragment the memory less. PyTorch reads this when it first allocates.
        if "PYTORCH_CUDA_ALLOC_CONF" not in environment:
            environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
    if world_size == 1:
        torch.set_num_threads(threads or usable_cores())
        yield World(0, 1, 0, device)
        return
    # Numbers that the host needs (counts, signals) always go through gloo, so that no step waits for a GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank = int(environment["RANK"])
    store = process_store(rank, _TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    _current_group[:] = [dist.group.WORLD]
    torch.set_num_threads(threads or _default_threads())
    try:
        yield World(dist.get_rank(), dist.get_world_size(), local_rank, device, local_size)
    except BaseException:
        if device.type == "cpu":  # nccl would wait for a peer that may be gone
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def _default_threads() -> int:
    """Return this process's fraction of the cores that it shares with other processes of the host.

    srun and mpirun may pin each process to separate cores (--cpus-per-task, --bind-to). Those are not divided.
    """
    cores = sorted(os.sched_getaffinity(0))
    cores_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(cores_by_rank, (socket.gethostname(), cores))
    return threads_per_process(
        cores, [peer_cores for host, peer_cores in cores_by_rank if host == socket.gethostname()]
    )


def threads_per_process(cores: list[int], cores_by_process: list[list[int]]) -> int:
    """Return the threads of a process allowed to use `cores`, given the cores of every process on its host."""
    sharing = sum(not set(cores).isdisjoint(peer_cores) for peer_cores in cores_by_process)
    return max(1, len(cores) // sharing)


def serve_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Serve a store at `address` only and return it. Port 0: any free port. Raise OSError if the port is taken.

    A store opened by torch would listen on every interface of the host.
    """
    family, kind, protocol, _, location = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(location)
        listener.listen()  # raises OSError if the port was just taken; torch listens again, with a longer queue
        port = listener.getsockname()[1]
        return TCPStore(address, port, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def process_store(rank: int, timeout: timedelta) -> Store:
    """Return the store of a run at MASTER_ADDR and MASTER_PORT. The launcher serves it, or else rank 0.

    Raise InputError if the environment lacks the address, WorkError if rank 0 cannot listen there.
    """
    environment = os.environ
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        fix = "export it: the address at which rank 0 listens"
        raise InputError([Problem(name, "is not set by the launcher of this process", fix) for name in missing])
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    if rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        try:
            return serve_store(address, port, timeout)
        except OSError as error:
            fix = "set MASTER_PORT to a free port of the first host"
            raise WorkError.at(f"{address}:{port}", f"cannot listen there: {error.strerror}", fix) from None
    return TCPStore(address, port, is_master=False, timeout=timeout)
