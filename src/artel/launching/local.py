"""Several processes on this machine, or this machine's part of several, by torch.distributed.run's own launcher."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from uuid import uuid4

from artel.errors import ArtelError, InputError, Interrupted, Problem, WorkError
from artel.launching.interface import choose_interface

# A worker told to stop finishes its step and saves; only after this is it ended by force.
_STOP_SECONDS = 600


@dataclass(frozen=True, slots=True)
class Hosts:
    """Which machines take part. With one, the address and port are found by themselves."""

    count: int = 1
    rank: int = 0
    address: str = ""
    port: int = 29500

    @classmethod
    def read(cls, count: int | None, rank: int | None, address: str | None, port: int | None) -> Hosts:
        """From flags, else from NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT. Raises InputError."""
        environment = os.environ
        try:
            hosts = cls(
                int(environment.get("NNODES", "1")) if count is None else count,
                int(environment.get("NODE_RANK", "0")) if rank is None else rank,
                environment.get("MASTER_ADDR", "") if address is None else address,
                int(environment.get("MASTER_PORT", "29500")) if port is None else port,
            )
        except ValueError as error:
            raise InputError([Problem("NNODES, NODE_RANK, MASTER_PORT", f"one is not a number: {error}")]) from None
        problems = []
        if hosts.count < 1:
            problems.append(Problem("--nnodes", f"{hosts.count} hosts cannot run anything", "write 1 or more"))
        elif not 0 <= hosts.rank < hosts.count:
            problems.append(Problem("--node-rank", f"{hosts.rank} is not a host of {hosts.count}", "count from 0"))
        if hosts.count > 1 and not hosts.address:
            problems.append(Problem("--master-addr", "is needed for several hosts", "give the first host's address"))
        if problems:
            raise InputError(problems)
        return hosts


def is_worker() -> bool:
    """Whether a launcher (torchrun, ours or another) has started this process."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def launch(arguments: list[str], processes: int, hosts: Hosts) -> None:
    """Run `python -m artel ARGUMENTS` as `processes` processes here, and wait for them.

    Raises Interrupted when they were told to stop and saved, and an error with their exit status when one failed;
    what was wrong they have said themselves.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    alone = hosts.count == 1
    config = LaunchConfig(
        min_nodes=hosts.count,
        max_nodes=hosts.count,
        nproc_per_node=processes,
        run_id=uuid4().hex if alone else "artel",
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint="localhost:0" if alone else f"{hosts.address}:{hosts.port}",
        rdzv_configs={"rank": hosts.rank, "timeout": 900},
        local_addr="localhost" if alone else choose_interface(hosts.address, hosts.port),
        max_restarts=0,
        monitor_interval=0.2,
        shutdown_timeout=_STOP_SECONDS,
    )
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # set again by each process; without it torchrun warns
    try:
        elastic_launch(config, sys.executable)("-m", "artel", *arguments)
    except SignalException:
        raise Interrupted([Problem("", "stopped", "the same command goes on from the last checkpoint")]) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise _failed(failure.exitcode, rank) from None


def _failed(status: int, rank: int) -> ArtelError:
    problem = Problem(f"process {rank}", f"ended with status {status}", "what was wrong is said above")
    kinds: dict[int, type[ArtelError]] = {2: InputError, 130: Interrupted}
    return kinds.get(status, WorkError)([problem])
