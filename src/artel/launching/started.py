"""Read the environment of Slurm's srun, an MPI or deepspeed into the variables that torchrun sets.

Each task of srun is a process of the run; with --nproc each task is the launcher of one host. Only variables that the
launcher of this process has set are read: a batch script and an interactive shell have some of them too.
"""

from __future__ import annotations

import os
import re

from artel.errors import InputError, Problem
from artel.launching.worker import is_worker

# Step numbers from here on are not srun's: the batch script, the interactive shell (slurm.h).
_NO_STEP = 0xFFFFFFF0
# Below 32768, where the ports begin that Linux assigns.
_PORTS = range(15000, 31000)

# Rank, size, rank and size on this host: Open MPI; Intel MPI and MPICH's hydra; MVAPICH.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)

_NUMBERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_JOB_ID",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    *(name for names in _MPI for name in names),
)


def read_launcher(nproc: int | None) -> None:
    """Set RANK, WORLD_SIZE and so on, or with `nproc` NNODES and so on, from the variables of srun or an MPI.

    Nothing changes where a launcher has set them already, or for a single task. Raises InputError where --nproc does
    not fit the tasks, where the first host is unknown, and for numbers that no launcher sets.
    """
    environment = os.environ
    _check_numbers(environment)
    if is_worker() and "LOCAL_SIZE" in environment:  # deepspeed's name
        environment.setdefault("LOCAL_WORLD_SIZE", environment["LOCAL_SIZE"])
    if is_worker() or "NNODES" in environment:
        return
    if int(environment.get("SLURM_STEP_ID", _NO_STEP)) < _NO_STEP and "SLURM_PROCID" in environment:
        if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            _read_step(environment, nproc)
        return
    for rank, size, local_rank, local_size in _MPI:
        if int(environment.get(size, "1")) > 1 and rank in environment:
            on_host = environment.get(local_size, "1")
            environment |= {
                "RANK": environment[rank],
                "WORLD_SIZE": environment[size],
                "LOCAL_WORLD_SIZE": on_host,
                "LOCAL_RANK": environment.get(local_rank, "0"),
            }
            _set_meeting(environment, on_host == environment[size])
            return


def check_worker() -> None:
    """Raise InputError where the variables of torchrun cannot be those of a process of a run."""
    environment = os.environ
    _check_numbers(environment)
    rank, world = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    problems = []
    if "RANK" not in environment and world != 1:
        problems.append(_wrong("WORLD_SIZE", f"is {world:,}, and RANK is not set"))
    elif "WORLD_SIZE" not in environment and rank != 0:
        problems.append(_wrong("RANK", f"is {rank:,}, and WORLD_SIZE is not set"))
    elif rank >= world:
        problems.append(_wrong("RANK", f"is {rank:,}, which must be less than WORLD_SIZE, {world:,}"))
    elif world > 1:  # one process has no peers, and Kubernetes sets MASTER_PORT for a service of that name
        problems += _meeting_problems(environment)
    if problems:
        raise InputError(problems)


def _meeting_problems(environment: os._Environ[str]) -> list[Problem]:
    problems = []
    port, address = environment.get("MASTER_PORT", "29500"), environment.get("MASTER_ADDR", "localhost")
    if not re.fullmatch(r"\d{1,18}", port, re.ASCII):
        problems.append(_wrong("MASTER_PORT", f"is {port[:100]!r}, no number"))
    elif not 0 < int(port) < 2**16:
        problems.append(_wrong("MASTER_PORT", f"is {port}, and ports are 1 to 65535"))
    if not re.fullmatch(r"[\w.:%-]+", address):
        problems.append(_wrong("MASTER_ADDR", f"is {address[:100]!r}, no name or address of a host"))
    return problems


def _check_numbers(environment: os._Environ[str]) -> None:
    problems = [
        _wrong(name, f"is {environment[name][:100]!r}, no number")
        for name in _NUMBERS
        if name in environment and not re.fullmatch(r"\d{1,18}", environment[name], re.ASCII)
    ]
    if problems:
        raise InputError(problems)


def _wrong(name: str, what: str) -> Problem:
    return Problem(name, what, "launchers set it, as torchrun or srun: unset it, or let one of them start artel")


def _read_step(environment: os._Environ[str], nproc: int | None) -> None:
    tasks, hosts = int(environment["SLURM_STEP_NUM_TASKS"]), int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    number = int(environment.get("SLURM_JOB_ID", "0")) + int(environment["SLURM_STEP_ID"])
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(_PORTS[number % len(_PORTS)]))
    if nproc is not None:
        if tasks != hosts:
            what, fix = (
                f"srun has started {tasks} tasks on {hosts} hosts, and each would start {nproc} processes",
                "give srun --ntasks-per-node=1, or leave out --nproc: each task is then a process",
            )
            raise InputError.at("--nproc", what, fix)
        environment |= {"NNODES": str(hosts), "NODE_RANK": environment["SLURM_NODEID"]}
        return
    on_host = tasks_of_node(environment["SLURM_STEP_TASKS_PER_NODE"], int(environment["SLURM_NODEID"]))
    local_rank = environment["SLURM_LOCALID"]
    if len(environment.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")) == 1:
        local_rank = "0"  # srun --gpus-per-task shows each task only its own GPU
    environment |= {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": str(on_host),
    }


def first_host(nodes: str) -> str:
    """The first node in Slurm's list: `n007` of `n[007-012,20],m1`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first)


def tasks_of_node(counts: str, node: int) -> int:
    """The number of tasks on a node: with `4(x2),3`, 4 on each of the first two."""
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            break
        if node < int(match[2] or 1):
            return int(match[1])
        node -= int(match[2] or 1)
    raise InputError.at("SLURM_STEP_TASKS_PER_NODE", f"{counts!r} does not say how many tasks this node has")


def _set_meeting(environment: os._Environ[str], alone: bool) -> None:
    if "MASTER_ADDR" not in environment:
        if not alone:
            what, fix = (
                "MPI has started processes on several hosts and does not say which is the first",
                "export MASTER_ADDR and MASTER_PORT, as mpirun -x MASTER_ADDR=node1",
            )
            raise InputError.at("MASTER_ADDR", what, fix)
        environment["MASTER_ADDR"] = "127.0.0.1"
    environment.setdefault("MASTER_PORT", "29500")
