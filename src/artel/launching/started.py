"""Read the environment of Slurm's srun, an MPI, deepspeed or Kubeflow into the variables that torchrun sets.

Each task of srun or an MPI is a process of the run; with --nproc each task is the launcher of one host. Only variables
that the launcher of this process has set are read: a batch script and an interactive shell have some of them too.
"""

from __future__ import annotations

import os
import re
from typing import Any

from artel.errors import InputError, Problem
from artel.host import usable_cores
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


def read_launcher(nproc: int | None) -> dict[str, Any]:
    """Set RANK, WORLD_SIZE and so on, or with `nproc` NNODES and so on, from the variables of srun or an MPI.

    Nothing changes where a launcher has set them already, or for a single task. Return options of `artel train` that
    the variables of torchrun's own options (PET_NNODES …) give. Raises InputError where --nproc does not fit the tasks,
    where the first host is unknown, and for numbers that no launcher sets.
    """
    environment = os.environ
    _check_numbers(environment)
    if is_pod() and "PET_NNODES" in environment:
        return _read_pod(environment, nproc)
    _read_tasks(environment, nproc)
    return {}


def is_pod() -> bool:
    """True unless a launcher has started this as one of several processes on its host."""
    return "LOCAL_RANK" not in os.environ


def _read_pod(environment: os._Environ[str], nproc: int | None) -> dict[str, Any]:
    """Options from PET_NNODES and so on: torchrun's options as Kubeflow's PyTorchJob and TrainJob set them in each pod.

    RANK and WORLD_SIZE count pods there, or processes, as the release has it: they are removed.
    """
    options: dict[str, Any] = {"nnodes": environment["PET_NNODES"]}
    if nproc is None:
        options["nproc"] = _processes(environment.get("PET_NPROC_PER_NODE", "1"))
    if "PET_MAX_RESTARTS" in environment:
        options["max_restarts"] = _pet_number(environment, "PET_MAX_RESTARTS")
    backend = environment.get("PET_RDZV_BACKEND", "static")
    if endpoint := environment.get("PET_RDZV_ENDPOINT", ""):
        if backend not in ("c10d", "static"):
            what = f"is {backend}, and hosts of artel meet without such a server"
            raise InputError.at("PET_RDZV_BACKEND", what, "write c10d (spec.elasticPolicy.rdzvBackend)")
        options["rdzv_endpoint"] = endpoint
    else:
        rank = next((name for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK") if name in environment), None)
        options["node_rank"] = 0 if rank is None else _pet_number(environment, rank)
        options["master_addr"] = environment.get("PET_MASTER_ADDR") or environment.get("MASTER_ADDR")
        port = next((name for name in ("PET_MASTER_PORT", "MASTER_PORT") if name in environment), None)
        options["master_port"] = None if port is None else _pet_number(environment, port)
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    return options


def _pet_number(environment: os._Environ[str], name: str) -> int:
    if not re.fullmatch(r"\d{1,18}", environment[name], re.ASCII):
        raise InputError([_wrong(name, f"is {environment[name][:100]!r}, no number")])
    return int(environment[name])


def _processes(text: str) -> int:
    """Number of processes by torchrun's --nproc-per-node: a number, gpu, cpu, or auto (GPUs, else cores)."""
    if re.fullmatch(r"\d{1,18}", text, re.ASCII):
        return int(text)
    if text not in ("auto", "gpu", "cpu"):
        raise InputError([_wrong("PET_NPROC_PER_NODE", f"is {text[:100]!r}, neither a number nor auto, gpu or cpu")])
    import torch

    gpus = torch.cuda.device_count() if text != "cpu" else 0
    if text == "gpu" and not gpus:
        raise InputError([_wrong("PET_NPROC_PER_NODE", "is gpu, and PyTorch sees no GPU on this host")])
    return gpus or usable_cores()


def check_counts(nproc: int | None) -> None:
    """Raise InputError where RANK and WORLD_SIZE may count hosts or processes, and it matters."""
    environment = os.environ
    if not (is_worker() and is_pod()) or (nproc or 1) == 1 or int(environment["WORLD_SIZE"]) == 1:
        return
    rank, world = environment["RANK"], environment["WORLD_SIZE"]
    what = (
        f"would start {nproc} processes here, and a launcher has set RANK {rank} of WORLD_SIZE {world}, which may "
        "count hosts or processes"
    )
    by_hosts = f"--nnodes {world} --node-rank {rank} --nproc {nproc}"
    fix = f"if they count hosts, write {by_hosts}; if processes, leave --nproc out"
    raise InputError.at("--nproc", what, fix)


def _read_tasks(environment: os._Environ[str], nproc: int | None) -> None:
    """Set RANK and so on from the variables of deepspeed, srun or an MPI."""
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
            if (nproc or 1) > 1:
                _read_mpi_hosts(environment, environment[rank], environment[size], on_host, nproc)
                return
            environment |= {
                "RANK": environment[rank],
                "WORLD_SIZE": environment[size],
                "LOCAL_WORLD_SIZE": on_host,
                "LOCAL_RANK": environment.get(local_rank, "0"),
            }
            _set_meeting(environment, on_host == environment[size])
            return


def _read_mpi_hosts(environment: os._Environ[str], rank: str, size: str, on_host: str, nproc: int | None) -> None:
    """Each task of an MPI launches the processes of one host."""
    if on_host != "1":
        what = f"MPI has started {on_host} tasks on this host, and each would start {nproc} processes"
        fix = "start one task a host (mpirun --map-by ppr:1:node), or leave out --nproc: each task is then a process"
        raise InputError.at("--nproc", what, fix)
    environment |= {"NNODES": size, "NODE_RANK": rank}
    _set_meeting(environment, alone=False)


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
