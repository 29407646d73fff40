"""Environment variables of other launchers: Slurm's srun, MPI, deepspeed, Kubeflow, accelerate.

`read_launcher` translates them to the variables that torchrun sets, `accelerate_settings` to keys of the run file.

Each task of srun or an MPI is a process of the run; with --nproc each task is the launcher of one host. Only variables
that the launcher of this process has set are read: a batch script and an interactive shell have some of them too.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from artel.errors import InputError, Problem
from artel.host import usable_cores
from artel.launching.worker import is_worker

if TYPE_CHECKING:
    from artel.config import RunConfig

# Larger step numbers are not srun's, but the batch script or the interactive shell (slurm.h).
_NO_STEP = 0xFFFFFFF0
# Below 32768, the first port that Linux assigns.
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

_PRECISIONS = {"bf16", "fp16", "fp8"}  # "no" is accelerate's default
# Sharding strategies of FSDP1, by name or number.
_SHARDING = {"FULL_SHARD": "fsdp", "SHARD_GRAD_OP": "zero2", "NO_SHARD": "ddp", "HYBRID_SHARD": "hsdp"}
_SHARDING |= {"HYBRID_SHARD_ZERO2": "hsdp", "1": "fsdp", "2": "zero2", "3": "ddp", "4": "hsdp", "5": "hsdp"}
_STAGES = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "fsdp"}
# accelerate's sizes -> keys of the run file.
_SIZES = {"TP_SIZE": "parallel.tensor", "CP_SIZE": "parallel.context", "SP_SIZE": "parallel.context"}


def read_launcher(nproc: int | None) -> dict[str, Any]:
    """Set RANK, WORLD_SIZE and so on, or with `nproc` NNODES and so on, from the variables of srun or MPI.

    Change nothing if a launcher has set them already, or for a single task. Return options of `artel train` from the
    variables of torchrun's options (PET_NNODES …). Raise InputError if --nproc does not match the tasks, if the first
    host is unknown, and for invalid numbers.
    """
    environment = os.environ
    _check_numbers(environment)
    if is_pod() and "PET_NNODES" in environment:
        return _read_pod_options(environment, nproc)
    _read_launcher_tasks(environment, nproc)
    return {}


def is_pod() -> bool:
    """True unless a launcher has started this as one of several processes on its host."""
    return "LOCAL_RANK" not in os.environ


def _read_pod_options(environment: os._Environ[str], nproc: int | None) -> dict[str, Any]:
    """Return options from PET_NNODES and so on: torchrun's options, as set by Kubeflow's PyTorchJob and TrainJob.

    RANK and WORLD_SIZE count pods or processes there, depending on the release, so they are removed.
    """
    options: dict[str, Any] = {"nnodes": environment["PET_NNODES"]}
    if nproc is None:
        options["nproc"] = _read_nproc(environment.get("PET_NPROC_PER_NODE", "1"))
    if "PET_MAX_RESTARTS" in environment:
        options["max_restarts"] = _read_number(environment, "PET_MAX_RESTARTS")
    backend = environment.get("PET_RDZV_BACKEND", "static")
    if endpoint := environment.get("PET_RDZV_ENDPOINT", ""):
        if backend not in ("c10d", "static"):
            what = f"is {backend}, but artel needs no server for the rendezvous"
            raise InputError.at("PET_RDZV_BACKEND", what, "set c10d (spec.elasticPolicy.rdzvBackend)")
        options["rdzv_endpoint"] = endpoint
    else:
        rank = next((name for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX", "RANK") if name in environment), None)
        options["node_rank"] = 0 if rank is None else _read_number(environment, rank)
        options["master_addr"] = environment.get("PET_MASTER_ADDR") or environment.get("MASTER_ADDR")
        port = next((name for name in ("PET_MASTER_PORT", "MASTER_PORT") if name in environment), None)
        options["master_port"] = None if port is None else _read_number(environment, port)
    for name in ("RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    return options


def _read_number(environment: os._Environ[str], name: str) -> int:
    if not re.fullmatch(r"\d{1,18}", environment[name], re.ASCII):
        raise InputError([_launcher_problem(name, f"is {environment[name][:100]!r}, not a number")])
    return int(environment[name])


def _read_nproc(text: str) -> int:
    """Read torchrun's --nproc-per-node: a number, gpu, cpu, or auto (GPUs, else cores)."""
    if re.fullmatch(r"\d{1,18}", text, re.ASCII):
        return int(text)
    if text not in ("auto", "gpu", "cpu"):
        raise InputError(
            [_launcher_problem("PET_NPROC_PER_NODE", f"is {text[:100]!r}: use a number, auto, gpu or cpu")]
        )
    import torch

    gpus = torch.cuda.device_count() if text != "cpu" else 0
    if text == "gpu" and not gpus:
        raise InputError([_launcher_problem("PET_NPROC_PER_NODE", "is gpu, but PyTorch finds no GPU on this host")])
    return gpus or usable_cores()


def check_counts(nproc: int | None) -> None:
    """Raise InputError if it matters and is unclear whether RANK and WORLD_SIZE count hosts or processes."""
    environment = os.environ
    if not (is_worker() and is_pod()) or (nproc or 1) == 1 or int(environment["WORLD_SIZE"]) == 1:
        return
    rank, world = environment["RANK"], environment["WORLD_SIZE"]
    what = (
        f"would start {nproc} processes, but a launcher has set RANK={rank} and WORLD_SIZE={world}, which may "
        "count hosts or processes"
    )
    by_hosts = f"--nnodes {world} --node-rank {rank} --nproc {nproc}"
    fix = f"if they count hosts, use {by_hosts}; if processes, remove --nproc"
    raise InputError.at("--nproc", what, fix)


def _read_launcher_tasks(environment: os._Environ[str], nproc: int | None) -> None:
    """Set RANK and so on from the variables of deepspeed, srun or MPI."""
    if is_worker() and "LOCAL_SIZE" in environment:  # deepspeed's name
        environment.setdefault("LOCAL_WORLD_SIZE", environment["LOCAL_SIZE"])
    if is_worker() or "NNODES" in environment:
        return
    if int(environment.get("SLURM_STEP_ID", _NO_STEP)) < _NO_STEP and "SLURM_PROCID" in environment:
        if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            _read_slurm_step(environment, nproc)
        return
    for rank, size, local_rank, local_size in _MPI:
        if int(environment.get(size, "1")) > 1 and rank in environment:
            local_size = environment.get(local_size, "1")
            if (nproc or 1) > 1:
                _read_mpi_hosts(environment, environment[rank], environment[size], local_size, nproc)
                return
            environment |= {
                "RANK": environment[rank],
                "WORLD_SIZE": environment[size],
                "LOCAL_WORLD_SIZE": local_size,
                "LOCAL_RANK": environment.get(local_rank, "0"),
            }
            _set_master(environment, local_size == environment[size])
            return


def _read_mpi_hosts(environment: os._Environ[str], rank: str, size: str, local_size: str, nproc: int | None) -> None:
    """Set NNODES and NODE_RANK: each MPI task launches the processes of one host."""
    if local_size != "1":
        what = f"MPI has started {local_size} tasks on this host, and each would start {nproc} processes"
        fix = "start one task per host (mpirun --map-by ppr:1:node), or remove --nproc: each task is then a process"
        raise InputError.at("--nproc", what, fix)
    environment |= {"NNODES": size, "NODE_RANK": rank}
    _set_master(environment, is_single_host=False)


def check_worker() -> None:
    """Raise InputError if torchrun's variables are inconsistent."""
    environment = os.environ
    _check_numbers(environment)
    rank, world = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    problems = []
    if "RANK" not in environment and world != 1:
        problems.append(_launcher_problem("WORLD_SIZE", f"is {world:,}, but RANK is not set"))
    elif "WORLD_SIZE" not in environment and rank != 0:
        problems.append(_launcher_problem("RANK", f"is {rank:,}, but WORLD_SIZE is not set"))
    elif rank >= world:
        problems.append(_launcher_problem("RANK", f"is {rank:,}, but must be less than WORLD_SIZE, {world:,}"))
    elif world > 1:  # one process has no peers, and Kubernetes sets MASTER_PORT for a service of that name
        problems += _master_problems(environment)
    if problems:
        raise InputError(problems)


def _master_problems(environment: os._Environ[str]) -> list[Problem]:
    problems = []
    port, address = environment.get("MASTER_PORT", "29500"), environment.get("MASTER_ADDR", "localhost")
    if not re.fullmatch(r"\d{1,18}", port, re.ASCII):
        problems.append(_launcher_problem("MASTER_PORT", f"is {port[:100]!r}, not a number"))
    elif not 0 < int(port) < 2**16:
        problems.append(_launcher_problem("MASTER_PORT", f"is {port}, not a port from 1 to 65535"))
    if not re.fullmatch(r"[\w.:%-]+", address):
        problems.append(_launcher_problem("MASTER_ADDR", f"is {address[:100]!r}, not a name or address of a host"))
    return problems


def _check_numbers(environment: os._Environ[str]) -> None:
    problems = [
        _launcher_problem(name, f"is {environment[name][:100]!r}, not a number")
        for name in _NUMBERS
        if name in environment and not re.fullmatch(r"\d{1,18}", environment[name], re.ASCII)
    ]
    if problems:
        raise InputError(problems)


def _launcher_problem(name: str, what: str) -> Problem:
    return Problem(name, what, "launchers such as torchrun and srun set it: unset it, or start artel with one of them")


def _read_slurm_step(environment: os._Environ[str], nproc: int | None) -> None:
    tasks, hosts = int(environment["SLURM_STEP_NUM_TASKS"]), int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    port_seed = int(environment.get("SLURM_JOB_ID", "0")) + int(environment["SLURM_STEP_ID"])
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(_PORTS[port_seed % len(_PORTS)]))
    if nproc is not None:
        if tasks != hosts:
            what = f"srun has started {tasks} tasks on {hosts} hosts, and each would start {nproc} processes"
            fix = "use srun --ntasks-per-node=1, or remove --nproc: each task is then a process"
            raise InputError.at("--nproc", what, fix)
        environment |= {"NNODES": str(hosts), "NODE_RANK": environment["SLURM_NODEID"]}
        return
    local_size = count_node_tasks(environment["SLURM_STEP_TASKS_PER_NODE"], int(environment["SLURM_NODEID"]))
    local_rank = environment["SLURM_LOCALID"]
    if len(environment.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")) == 1:
        local_rank = "0"  # srun --gpus-per-task shows each task only its own GPU
    environment |= {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": str(local_size),
    }


def first_host(nodes: str) -> str:
    """Return the first node in Slurm's list: `n007` of `n[007-012,20],m1`."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first)


def count_node_tasks(counts: str, node: int) -> int:
    """Return the number of tasks on a node: with `4(x2),3`, 4 on each of the first two."""
    for group in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group)
        if match is None:
            break
        if node < int(match[2] or 1):
            return int(match[1])
        node -= int(match[2] or 1)
    raise InputError.at("SLURM_STEP_TASKS_PER_NODE", f"{counts!r} does not contain the number of tasks on this node")


def _set_master(environment: os._Environ[str], is_single_host: bool) -> None:
    if "MASTER_ADDR" not in environment:
        if not is_single_host:
            what = "MPI has started processes on several hosts, but does not say which is the first"
            fix = "export MASTER_ADDR and MASTER_PORT, e.g. mpirun -x MASTER_ADDR=node1"
            raise InputError.at("MASTER_ADDR", what, fix)
        environment["MASTER_ADDR"] = "127.0.0.1"
    environment.setdefault("MASTER_PORT", "29500")


@dataclass(slots=True)
class AccelerateSettings:
    """Changes to a run by the configuration of `accelerate launch`."""

    overrides: list[str] = field(default_factory=list)
    """Overrides as on the command line: `parallel.data=fsdp`."""
    notes: list[str] = field(default_factory=list)
    """A line for each setting that was applied or has no effect."""


def accelerate_settings(config: RunConfig) -> AccelerateSettings:
    """Return accelerate's settings for this run; none if accelerate has not started this process.

    accelerate sets environment variables (accelerate/utils/launch.py), torchrun sets the number of processes. A key in
    the run file takes precedence, with a note. If accelerate is configured for CPUs, hide the GPUs: call this before
    torch looks for GPUs. Raise InputError for settings that artel does not support.
    """
    environment = os.environ
    settings = AccelerateSettings()
    if "ACCELERATE_MIXED_PRECISION" not in environment:
        return settings
    if _read_flag("ACCELERATE_USE_CPU"):
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if "MASTER_ADDR" in environment and "RANK" not in environment:
            settings.notes.append(
                "accelerate has started one process. For several on CPUs it needs mpirun_hostfile; or use "
                "artel train --nproc N"
            )
    precision = environment["ACCELERATE_MIXED_PRECISION"]
    if precision in _PRECISIONS:
        _apply_key(settings, config, "train.precision", precision)
    if _read_flag("ACCELERATE_USE_MEGATRON_LM"):
        fix = "remove it from accelerate's configuration, and set parallel.tensor and parallel.pipeline"
        raise InputError.at("accelerate's megatron_lm_config", "artel does not use Megatron-LM", fix)
    if _read_flag("ACCELERATE_USE_FSDP"):
        _apply_fsdp(settings, config)
    if _read_flag("ACCELERATE_USE_DEEPSPEED"):
        _apply_deepspeed(settings, config)
    if _read_flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        _apply_sizes(settings, config)
    return settings


def _apply_fsdp(settings: AccelerateSettings, config: RunConfig) -> None:
    environment = os.environ
    mode = _SHARDING.get(environment.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper(), "fsdp")
    if environment.get("FSDP_VERSION", "1") != "1":
        mode = "fsdp" if _read_flag("FSDP_RESHARD_AFTER_FORWARD", "true") else "zero2"
    _apply_key(settings, config, "parallel.data", mode)
    if _read_flag("FSDP_OFFLOAD_PARAMS"):
        _apply_key(settings, config, "parallel.offload", "cpu")
    if _read_flag("FSDP_ACTIVATION_CHECKPOINTING"):
        _apply_key(settings, config, "train.activation_checkpointing", "full")


def _apply_deepspeed(settings: AccelerateSettings, config: RunConfig) -> None:
    """Use the DeepSpeed file, if there is one; else translate accelerate's own fields to PyTorch."""
    environment = os.environ
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file.lower() != "none":
        _apply_key(settings, config, "parallel.deepspeed", file)
        return
    if config.parallel.deepspeed is not None:
        settings.notes.append(
            f"accelerate's deepspeed_config has no effect: the run file has {config.parallel.deepspeed}"
        )
        return
    devices = {
        environment.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{kind}_DEVICE", "none") for kind in ("OPTIMIZER", "PARAM")
    }
    if "nvme" in devices:
        what = "offload to NVMe needs DeepSpeed, and has no keys in the run file"
        fix = "put it into a ds_config.json, and set parallel.deepspeed: ds_config.json"
        raise InputError.at("accelerate's deepspeed_config", what, fix)
    _apply_key(
        settings, config, "parallel.data", _STAGES.get(environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"), "zero2")
    )
    if "cpu" in devices:
        _apply_key(settings, config, "parallel.offload", "cpu")
    settings.notes.append(
        "without a file, stages of deepspeed_config run in PyTorch; for DeepSpeed itself set "
        "parallel.deepspeed: ds_config.json"
    )


def _apply_sizes(settings: AccelerateSettings, config: RunConfig) -> None:
    for name, key in _SIZES.items():
        size = os.environ.get(f"PARALLELISM_CONFIG_{name}", "1")
        if size != "1":
            _apply_key(settings, config, key, size)
    replicas, shard = (os.environ.get(f"PARALLELISM_CONFIG_DP_{name}_SIZE", "1") for name in ("REPLICATE", "SHARD"))
    if replicas != "1" and shard != "1":
        settings.overrides = [override for override in settings.overrides if not override.startswith("parallel.data=")]
        settings.notes = [line for line in settings.notes if "parallel.data" not in line]
        _apply_key(settings, config, "parallel.data", "hsdp")
        _apply_key(settings, config, "parallel.shard", shard)


def _apply_key(settings: AccelerateSettings, config: RunConfig, key: str, value: str) -> None:
    """Override a key with a default value. If the run file sets another value, add a note."""
    section, _, name = key.partition(".")
    section_config = getattr(config, section)
    value_in_run = str(getattr(section_config, name))
    if value_in_run == value:
        return
    if name in section_config.model_fields_set and value_in_run != "auto":
        settings.notes.append(f"accelerate sets {key}={value}, but the run file {value_in_run}, which takes precedence")
        return
    settings.overrides.append(f"{key}={value}")
    settings.notes.append(f"{key}={value}, as configured in accelerate")


def _read_flag(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("true", "1", "yes", "on")
