"""The precision on which a DeepSpeed file, the run file and the device agree."""

from __future__ import annotations

import json
from typing import Any, Literal

import torch

from artel.errors import Problem
from artel.models.device import bf16_is_native, pick_precision
from artel.parallel.deepspeed.config.keys import AUTO, Findings, check_block, integers


def resolve_precision(
    findings: Findings, tree: dict[str, Any], requested: str, device: torch.device
) -> Literal["fp32", "bf16", "fp16"]:
    """What both files and the device say; the blocks of the tree are made to say the same."""
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config

    if "bfloat16" in tree:  # its old name
        tree["bf16"] = tree.pop("bfloat16")
    if requested == "fp8":
        findings.problems.append(Problem("train.precision", "fp8 is not for DeepSpeed", "write bf16, or auto"))
    enabled: dict[str, object] = {}
    for name, model in (("fp16", DeepSpeedFP16Config), ("bf16", DeepSpeedBF16Config)):
        block = dict(tree.get(name) or {})
        enabled[name] = block.pop("enabled", AUTO)
        if requested != AUTO and enabled[name] not in (AUTO, requested == name):
            what = f"is {json.dumps(enabled[name])}, and train.precision is {requested}"
            findings.problem(f"{name}.enabled", what, 'write "auto", or train.precision: auto')
        for key in (f"{name}_master_weights_and_grads", "bf16_optimizer_states"):
            if block.get(key):
                what = "needs DeepSpeed's own Adam, and artel steps with PyTorch's"
                findings.problem(f"{name}.{key}", what, "leave it out")
        findings.defaults(name, block)
        check_block(findings, name, model, block)
        tree[name] = integers(model, block)
    if all(value is True for value in enabled.values()):
        findings.problem("fp16.enabled", "and bf16.enabled are both true", "keep one")
    precision = _possible(findings, enabled, requested, device)
    for name in enabled:
        tree[name]["enabled"] = name == precision
    return precision


def _possible(
    findings: Findings, enabled: dict[str, object], requested: str, device: torch.device
) -> Literal["fp32", "bf16", "fp16"]:
    """Of what the file says of fp16 and bf16 (true, false, auto) and the run file of both, what the device can."""
    on = [name for name, value in enabled.items() if value is True or (value == AUTO and requested == name)]
    if "fp16" in on:
        if device.type != "cpu":
            return "fp16"
        findings.note("fp16", "is replaced by fp32: this is a CPU")
    elif "bf16" in on:
        if device.type != "cpu" or requested == "bf16" or bf16_is_native(device):
            return "bf16"
        findings.note("bf16", "is replaced by fp32: this CPU would only emulate it")
    elif requested == AUTO and enabled["bf16"] == AUTO and pick_precision(AUTO, device) == "bf16":
        return "bf16"
    return "fp32"
