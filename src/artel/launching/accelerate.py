"""The configuration of `accelerate launch`, as keys of the run file.

accelerate sets environment variables (accelerate/utils/launch.py); torchrun sets the number of processes. A key in the
run file takes precedence, with a note.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from artel.errors import InputError

if TYPE_CHECKING:
    from artel.config import RunConfig

_PRECISIONS = {"bf16", "fp16", "fp8"}  # "no" is accelerate's default
# Of PyTorch's first FSDP, by name or by number.
_SHARDING = {
    "FULL_SHARD": "fsdp",
    "1": "fsdp",
    "SHARD_GRAD_OP": "zero2",
    "2": "zero2",
    "NO_SHARD": "ddp",
    "3": "ddp",
    "HYBRID_SHARD": "hsdp",
    "4": "hsdp",
    "HYBRID_SHARD_ZERO2": "hsdp",
    "5": "hsdp",
}
_STAGES = {"0": "ddp", "1": "zero1", "2": "zero2", "3": "fsdp"}
# Sizes of accelerate, and their keys in the run file.
_SIZES = {"TP_SIZE": "parallel.tensor", "CP_SIZE": "parallel.context", "SP_SIZE": "parallel.context"}


@dataclass(slots=True)
class Taken:
    """The changes that accelerate's configuration makes to a run."""

    overrides: list[str] = field(default_factory=list)
    """As on the command line: `parallel.data=fsdp`."""
    notes: list[str] = field(default_factory=list)
    """A line for each setting that was taken over or has no effect."""


def take_over(run: RunConfig) -> Taken:
    """The settings of accelerate for this run; none when accelerate has not started this process.

    It also hides the GPUs where accelerate is configured for CPUs: call it before torch looks for GPUs.
    Raises InputError for settings that artel does not support.
    """
    environment = os.environ
    taken = Taken()
    if "ACCELERATE_MIXED_PRECISION" not in environment:
        return taken
    if _flag("ACCELERATE_USE_CPU"):
        environment["CUDA_VISIBLE_DEVICES"] = ""
        if "MASTER_ADDR" in environment and "RANK" not in environment:
            taken.notes.append(
                "accelerate has started one process: for several on CPUs it needs mpirun_hostfile, or start them by "
                "artel train --nproc N"
            )
    precision = environment["ACCELERATE_MIXED_PRECISION"]
    if precision in _PRECISIONS:
        _take(taken, run, "train.precision", precision)
    if _flag("ACCELERATE_USE_MEGATRON_LM"):
        fix = "take it out of accelerate's configuration, and write parallel.tensor and parallel.pipeline"
        raise InputError.at("accelerate's megatron_lm_config", "artel has no Megatron-LM in it", fix)
    if _flag("ACCELERATE_USE_FSDP"):
        _take_fsdp(taken, run)
    if _flag("ACCELERATE_USE_DEEPSPEED"):
        _take_deepspeed(taken, run)
    if _flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        _take_sizes(taken, run)
    return taken


def _take_fsdp(taken: Taken, run: RunConfig) -> None:
    environment = os.environ
    mode = _SHARDING.get(environment.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper(), "fsdp")
    if environment.get("FSDP_VERSION", "1") != "1":
        mode = "fsdp" if _flag("FSDP_RESHARD_AFTER_FORWARD", "true") else "zero2"
    _take(taken, run, "parallel.data", mode)
    if _flag("FSDP_OFFLOAD_PARAMS"):
        _take(taken, run, "parallel.offload", "cpu")
    if _flag("FSDP_ACTIVATION_CHECKPOINTING"):
        _take(taken, run, "train.activation_checkpointing", "full")


def _take_deepspeed(taken: Taken, run: RunConfig) -> None:
    """The file where there is one; accelerate's own fields as what PyTorch has instead."""
    environment = os.environ
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file.lower() != "none":
        _take(taken, run, "parallel.deepspeed", file)
        return
    if run.parallel.deepspeed is not None:
        taken.notes.append(f"accelerate's deepspeed_config has no effect: the run file has {run.parallel.deepspeed}")
        return
    places = {environment.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE", "none") for part in ("OPTIMIZER", "PARAM")}
    if "nvme" in places:
        what, fix = (
            "offload to NVMe is DeepSpeed's own, and has no keys in the run file",
            "write a ds_config.json with it, and parallel.deepspeed: ds_config.json",
        )
        raise InputError.at("accelerate's deepspeed_config", what, fix)
    _take(taken, run, "parallel.data", _STAGES.get(environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"), "zero2"))
    if "cpu" in places:
        _take(taken, run, "parallel.offload", "cpu")
    taken.notes.append(
        "stages of deepspeed_config without a file run in PyTorch; for DeepSpeed itself write "
        "parallel.deepspeed: ds_config.json"
    )


def _take_sizes(taken: Taken, run: RunConfig) -> None:
    for name, key in _SIZES.items():
        size = os.environ.get(f"PARALLELISM_CONFIG_{name}", "1")
        if size != "1":
            _take(taken, run, key, size)
    copies, shard = (os.environ.get(f"PARALLELISM_CONFIG_DP_{name}_SIZE", "1") for name in ("REPLICATE", "SHARD"))
    if copies != "1" and shard != "1":
        taken.overrides = [line for line in taken.overrides if not line.startswith("parallel.data=")]
        taken.notes = [line for line in taken.notes if "parallel.data" not in line]
        _take(taken, run, "parallel.data", "hsdp")
        _take(taken, run, "parallel.shard", shard)


def _take(taken: Taken, run: RunConfig, key: str, value: str) -> None:
    """Override a key that has its default in the run file; note it where the run file sets another value."""
    section, _, name = key.partition(".")
    part = getattr(run, section)
    written = str(getattr(part, name))
    if written == value:
        return
    if name in part.model_fields_set and written != "auto":
        taken.notes.append(f"accelerate sets {key}={value}, and the run file {written}: the run file decides")
        return
    taken.overrides.append(f"{key}={value}")
    taken.notes.append(f"{key}={value}, as configured in accelerate")


def _flag(name: str, usual: str = "false") -> bool:
    return os.environ.get(name, usual).lower() in ("true", "1", "yes", "on")
