"""ZeRO's block of a DeepSpeed file: its stage, its buckets, and what it offloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from artel.parallel.deepspeed.config.keys import AUTO, Findings, check_block, integers


def zero_settings(findings: Findings, tree: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The block of ZeRO, taken from `tree`, with the forms of older versions of DeepSpeed in today's."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    block = tree.pop("zero_optimization", {})
    if isinstance(block, bool):  # its first form
        block = {"stage": int(block)}
    if not isinstance(block, dict):
        findings.problem("zero_optimization", f"is {block!r}", 'write {"stage": 1}, 2 or 3')
        block = {}
    zero = dict(block)
    for old, new in (
        ("cpu_offload", "offload_optimizer"),
        ("cpu_offload_params", "offload_param"),
        ("cpu_offload_param", "offload_param"),
    ):
        if zero.pop(old, False) is True:
            zero.setdefault(new, {"device": "cpu"})
    of_width = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    findings.defaults("zero_optimization", zero, apart=of_width)
    stage = zero.setdefault("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        findings.problem("zero_optimization.stage", f"is {stage!r}", "write 0, 1, 2 or 3")
        zero["stage"] = stage = 0
    for key in ("offload_param", "offload_optimizer"):
        if isinstance(zero.get(key), dict):
            zero[key] = _offload(findings, f"zero_optimization.{key}", dict(zero[key]), device)
    if stage < 3 and zero.pop("offload_param", None) is not None:
        findings.note("zero_optimization.offload_param", f"has no effect in stage {stage}")
    for key in of_width[1:] if stage < 3 else ():
        zero.pop(key, None)
    if zero.get("zenflow") is not None:
        findings.problem("zero_optimization.zenflow", "steps with an optimizer of its own", "leave it out")
    checked = {key: value for key, value in zero.items() if value != AUTO}
    check_block(findings, "zero_optimization", DeepSpeedZeroConfig, checked)
    return integers(DeepSpeedZeroConfig, zero)


def _offload(findings: Findings, where: str, block: dict[str, Any], device: torch.device) -> dict[str, Any]:
    findings.defaults(where, block)
    if device.type == "cpu" and block.get("device", "none") != "none":
        if block.get("pin_memory", True):
            findings.note(f"{where}.pin_memory", "is off: there is no accelerator to copy to")
        block["pin_memory"] = False
    if block.get("device") == "nvme":
        folder = block.get("nvme_path")
        if folder is None or not Path(str(folder)).is_dir():
            findings.problem(f"{where}.nvme_path", f"{folder!r} is no folder", "name a folder on the disk")
        if not _can_build("async_io"):
            what = "nvme is read and written by a part of DeepSpeed that needs libaio, which is not here"
            findings.problem(f"{where}.device", what, "apt install libaio-dev, or write cpu")
        elif where.endswith("optimizer"):
            findings.note(f"{where}.device", "is nvme: a checkpoint's optimizer state cannot be put back there")
    for key, usual in (("ratio", 1.0), ("super_offload", False)):
        if block.get(key, usual) != usual:
            what = f"{block[key]!r} needs DeepSpeed's own Adam, and artel steps with PyTorch's"
            findings.problem(f"{where}.{key}", what, "leave it out")
    return block


def _can_build(part: str) -> bool:
    """Whether a part of DeepSpeed that is compiled at its first use has what it needs."""
    import deepspeed

    return bool(deepspeed.ops.__compatible_ops__.get(part, False))
