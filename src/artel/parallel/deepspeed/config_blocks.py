"""Sections of a DeepSpeed file: batch, ZeRO, optimizer, schedule and precision, each compared with the run file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch

from artel.config import TrainConfig
from artel.errors import Problem
from artel.models.device import bf16_is_native, pick_precision
from artel.parallel.deepspeed.config_keys import AUTO, Findings, check_block, convert_integers

# DeepSpeed's schedules by type, with artel's names.
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def resolve_micro_batch(
    findings: Findings, tree: dict[str, Any], train: TrainConfig, world: int, stage: int
) -> int | None:
    """Return the rows of a micro-batch, or None if both files leave it open.

    The file may set any of its three batch numbers. The global batch is always the run file's.
    """
    numbers: dict[str, int | None] = {}
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        value = tree.pop(key, AUTO)
        if value in (AUTO, None):
            numbers[key] = None
        elif isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
            findings.add_problem(key, f"is {value!r}", 'use a positive integer, or "auto"')
            return None
        else:
            numbers[key] = int(value)
    batch, micro_batch, accumulation = numbers.values()
    if batch is not None and batch != train.batch:
        what = f"is {batch:,}, but train.batch is {train.batch:,}"
        findings.add_problem("train_batch_size", what, f'set "auto", or train.batch: {batch}')
    if isinstance(train.micro_batch, int):
        if micro_batch not in (None, train.micro_batch):
            what = f"is {micro_batch}, but train.micro_batch is {train.micro_batch}"
            fix = f'set "auto", or train.micro_batch: {micro_batch}'
            findings.add_problem("train_micro_batch_size_per_gpu", what, fix)
        micro_batch = train.micro_batch
    rows_per_process = math.ceil(train.batch / world)
    if accumulation is not None:
        if micro_batch is None:
            micro_batch = math.ceil(rows_per_process / accumulation)
        num_micro_batches = math.ceil(rows_per_process / micro_batch)
        if num_micro_batches != accumulation:
            what = (
                f"is {accumulation}, but with train.batch {train.batch} on {world} process(es), "
                f"{rows_per_process} rows each, there are {num_micro_batches} micro-batches of {micro_batch}"
            )
            findings.add_problem("gradient_accumulation_steps", what, 'set "auto"')
    if micro_batch is None and stage == 3:
        findings.note("train_micro_batch_size_per_gpu", "is 1: stage 3 cannot search for it; set a number")
        micro_batch = 1
    return micro_batch


def pop_zero_settings(findings: Findings, tree: dict[str, Any]) -> dict[str, Any]:
    """Remove the ZeRO section from `tree` and return it, with old forms of DeepSpeed converted to today's."""
    block = tree.pop("zero_optimization", {})
    if isinstance(block, bool):  # its first form
        block = {"stage": int(block)}
    if not isinstance(block, dict):
        findings.add_problem("zero_optimization", f"is {block!r}", 'set {"stage": 1}, 2 or 3')
        block = {}
    zero = dict(block)
    for old, new in (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_params", "offload_param"),
        ("cpu_offload_param", "offload_param"),
    ):
        if zero.pop(old, False) is True:
            zero.setdefault(new, {"device": "cpu"})
    return zero


def resolve_zero_settings(findings: Findings, tree: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Remove the ZeRO section from `tree` and return it, checked by DeepSpeed."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = pop_zero_settings(findings, tree)
    width_keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    findings.use_defaults("zero_optimization", zero, exclude=width_keys)
    stage = zero.setdefault("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        findings.add_problem("zero_optimization.stage", f"is {stage!r}", "set 0, 1, 2 or 3")
        zero["stage"] = stage = 0
    for key in ("offload_param", "offload_optimizer"):
        if isinstance(zero.get(key), dict):
            zero[key] = _resolve_offload(findings, f"zero_optimization.{key}", dict(zero[key]), device)
    if stage < 3 and zero.pop("offload_param", None) is not None:
        findings.note("zero_optimization.offload_param", f"has no effect in stage {stage}")
    for key in width_keys[1:] if stage < 3 else ():
        zero.pop(key, None)
    if zero.get("zenflow") is not None:
        findings.add_problem(
            "zero_optimization.zenflow", "has its own optimizer, which artel does not use", "remove it"
        )
    checked = {key: value for key, value in zero.items() if value != AUTO}
    check_block(findings, "zero_optimization", DeepSpeedZeroConfig, checked)
    return convert_integers(DeepSpeedZeroConfig, zero)


def _resolve_offload(findings: Findings, where: str, block: dict[str, Any], device: torch.device) -> dict[str, Any]:
    findings.use_defaults(where, block)
    if device.type == "cpu" and block.get("device", "none") != "none":
        if block.get("pin_memory", True):
            findings.note(f"{where}.pin_memory", "is off: there is no accelerator")
        block["pin_memory"] = False
    if block.get("device") == "nvme":
        import deepspeed

        folder = block.get("nvme_path")
        if folder is None or not Path(str(folder)).is_dir():
            findings.add_problem(f"{where}.nvme_path", f"{folder!r} is not a folder", "set it to a folder on the disk")
        if not deepspeed.ops.__compatible_ops__.get("async_io", False):  # compiled at its first use
            what = "nvme needs libaio, which is not installed"
            findings.add_problem(f"{where}.device", what, "apt install libaio-dev, or set cpu")
        elif where.endswith("optimizer"):
            findings.note(f"{where}.device", "is nvme: optimizer state cannot be restored there from a checkpoint")
    for key, default in (("ratio", 1.0), ("super_offload", False)):
        if block.get(key, default) != default:
            what = f"{block[key]!r} needs DeepSpeed's own Adam, but artel uses PyTorch's"
            findings.add_problem(f"{where}.{key}", what, "remove it")
    return block


def check_optimizer(findings: Findings, tree: dict[str, Any], train: TrainConfig) -> None:
    """Remove the optimizer section from `tree`. Report differences from the run's optimizer, which takes the steps."""
    block = tree.pop("optimizer", None)
    if block is None:
        return
    type_name = str(block.get("type", "")).lower() if isinstance(block, dict) else ""
    parameters = dict(block.get("params") or {}) if isinstance(block, dict) else {}
    name = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}.get(type_name)  # DeepSpeed's Adam is AdamW by default
    if type_name == "adam" and parameters.get("adam_w_mode") is False:
        name = None
    if name != train.optimizer:
        what = f"is {type_name or 'missing'}, but train.optimizer is {train.optimizer}"
        findings.add_problem("optimizer.type", what, "remove the block, or change train.optimizer")
        return
    expected: dict[str, tuple[str, Any]] = {
        "lr": ("train.learning_rate", train.learning_rate),
        "weight_decay": ("train.weight_decay", train.weight_decay),
    }
    if name == "adamw":
        expected |= {"betas": ("train.betas", list(train.betas)), "eps": ("train.epsilon", train.epsilon)}
    else:
        expected |= {"momentum": ("train.momentum", train.momentum)}
    for key in ("torch_adam", "adam_w_mode", "bias_correction", "fused", "foreach"):  # do not change the result
        parameters.pop(key, None)
    findings.compare("optimizer.params", parameters, expected)


def check_schedule(findings: Findings, tree: dict[str, Any], train: TrainConfig) -> None:
    """Report differences from the run's schedule. Keep only the lengths, until the length of the run is known."""
    block = tree.get("scheduler")
    if block is None:
        return
    type_name = str(block.get("type", "")) if isinstance(block, dict) else str(block)
    if _SCHEDULES.get(type_name) != train.schedule:
        what = f"is {type_name or 'missing'}, but train.schedule is {train.schedule}"
        known = ", ".join(f"{name} is {schedule}" for name, schedule in _SCHEDULES.items())
        findings.add_problem("scheduler.type", what, f"remove the block, or change train.schedule ({known})")
        return
    parameters = dict(block.get("params") or {})
    lengths = {key: parameters.pop(key) for key in ("total_num_steps", "warmup_num_steps") if key in parameters}
    for key, value in lengths.items():
        if value != AUTO and (isinstance(value, bool) or not isinstance(value, int | float) or value != int(value)):
            findings.add_problem(f"scheduler.params.{key}", f"is {value!r}", 'use an integer or "auto"')
    if parameters.get("last_batch_iteration") == -1:
        del parameters["last_batch_iteration"]
    expected: dict[str, tuple[str, Any]] = {
        "warmup_min_lr": ("the warmup's start", 0.0),
        "warmup_min_ratio": ("the warmup's start", 0.0),
        "warmup_max_lr": ("train.learning_rate", train.learning_rate),
        "warmup_type": ("the warmup's form", "linear"),
        "cos_min_ratio": ("train.minimum_learning_rate", train.minimum_learning_rate),
    }
    findings.compare("scheduler.params", parameters, expected)
    known_lengths = {key: int(value) for key, value in lengths.items() if value != AUTO and not findings.problems}
    tree["scheduler"] = {"params": known_lengths}


def resolve_precision(
    findings: Findings, tree: dict[str, Any], requested: str, device: torch.device
) -> Literal["fp32", "bf16", "fp16"]:
    """Return the precision that both files and the device agree on, and set it in the file's blocks."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config

    if "bfloat16" in tree:  # its old name
        tree["bf16"] = tree.pop("bfloat16")
    if requested == "fp8":
        findings.problems.append(Problem("train.precision", "DeepSpeed does not support fp8", "set bf16 or auto"))
    enabled: dict[str, object] = {}
    for name, model in (("fp16", DeepSpeedFP16Config), ("bf16", DeepSpeedBF16Config)):
        block = dict(tree.get(name) or {})
        enabled[name] = block.pop("enabled", AUTO)
        if requested != AUTO and enabled[name] not in (AUTO, requested == name):
            what = f"is {json.dumps(enabled[name])}, but train.precision is {requested}"
            findings.add_problem(f"{name}.enabled", what, 'set "auto", or train.precision: auto')
        for key in (f"{name}_master_weights_and_grads", "bf16_optimizer_states"):
            if block.get(key):
                what = "needs DeepSpeed's own Adam, but artel uses PyTorch's"
                findings.add_problem(f"{name}.{key}", what, "remove it")
        findings.use_defaults(name, block)
        check_block(findings, name, model, block)
        tree[name] = convert_integers(model, block)
    if all(value is True for value in enabled.values()):
        findings.add_problem("fp16.enabled", "and bf16.enabled are both true", "keep one")
    precision = _supported_precision(findings, enabled, requested, device)
    for name in enabled:
        tree[name]["enabled"] = name == precision
    return precision


def _supported_precision(
    findings: Findings, enabled: dict[str, object], requested: str, device: torch.device
) -> Literal["fp32", "bf16", "fp16"]:
    """Return the precision that the device supports. `enabled`: true, false or "auto" in the file, by name."""
    enabled_names = [name for name, value in enabled.items() if value is True or (value == AUTO and requested == name)]
    if "fp16" in enabled_names:
        if device.type != "cpu":
            return "fp16"
        findings.note("fp16", "is replaced by fp32: this is a CPU")
    elif "bf16" in enabled_names:
        if device.type != "cpu" or requested == "bf16" or bf16_is_native(device):
            return "bf16"
        findings.note("bf16", "is replaced by fp32: this CPU would only emulate it")
    elif requested == AUTO and enabled["bf16"] == AUTO and pick_precision(AUTO, device) == "bf16":
        return "bf16"
    return "fp32"
