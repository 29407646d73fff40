"""The optimizer and the schedule of a DeepSpeed file, which must be those of the run file: artel steps."""

from __future__ import annotations

from typing import Any

from artel.config import TrainConfig
from artel.parallel.deepspeed.config.keys import AUTO, Findings

# DeepSpeed's schedules, and what artel calls them.
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def check_optimizer(findings: Findings, tree: dict[str, Any], train: TrainConfig) -> None:
    """artel's optimizer steps; a block that says the same does no harm."""
    block = tree.pop("optimizer", None)
    if block is None:
        return
    kind = str(block.get("type", "")).lower() if isinstance(block, dict) else ""
    parameters = dict(block.get("params") or {}) if isinstance(block, dict) else {}
    own = {"adam": "adamw", "adamw": "adamw", "sgd": "sgd"}.get(kind)  # its Adam is AdamW by default
    if kind == "adam" and parameters.get("adam_w_mode") is False:
        own = None
    if own != train.optimizer:
        what = f"is {kind or 'not given'}, and train.optimizer is {train.optimizer}"
        findings.problem("optimizer.type", what, "leave the block out, or write another train.optimizer")
        return
    ours: dict[str, tuple[str, Any]] = {
        "lr": ("train.learning_rate", train.learning_rate),
        "weight_decay": ("train.weight_decay", train.weight_decay),
    }
    if own == "adamw":
        ours |= {"betas": ("train.betas", list(train.betas)), "eps": ("train.epsilon", train.epsilon)}
    else:
        ours |= {"momentum": ("train.momentum", train.momentum)}
    for key in ("torch_adam", "adam_w_mode", "bias_correction", "fused", "foreach"):  # no other numbers
        parameters.pop(key, None)
    findings.compare("optimizer.params", parameters, ours)


def check_schedule(findings: Findings, tree: dict[str, Any], train: TrainConfig) -> None:
    """artel's schedule leads; of the block its lengths stay, until the length of the run is known."""
    block = tree.get("scheduler")
    if block is None:
        return
    kind = str(block.get("type", "")) if isinstance(block, dict) else str(block)
    if _SCHEDULES.get(kind) != train.schedule:
        what = f"is {kind or 'not given'}, and train.schedule is {train.schedule}"
        known = ", ".join(f"{name} is {ours}" for name, ours in _SCHEDULES.items())
        findings.problem("scheduler.type", what, f"leave the block out, or write another train.schedule ({known})")
        return
    parameters = dict(block.get("params") or {})
    lengths = {key: parameters.pop(key) for key in ("total_num_steps", "warmup_num_steps") if key in parameters}
    for key, value in lengths.items():
        if value != AUTO and (isinstance(value, bool) or not isinstance(value, int | float) or value != int(value)):
            findings.problem(f"scheduler.params.{key}", f"is {value!r}", 'write a whole number or "auto"')
    if parameters.get("last_batch_iteration") == -1:
        del parameters["last_batch_iteration"]
    ours: dict[str, tuple[str, Any]] = {
        "warmup_min_lr": ("the warmup's start", 0.0),
        "warmup_min_ratio": ("the warmup's start", 0.0),
        "warmup_max_lr": ("train.learning_rate", train.learning_rate),
        "warmup_type": ("the warmup's form", "linear"),
        "cos_min_ratio": ("train.minimum_learning_rate", train.minimum_learning_rate),
    }
    findings.compare("scheduler.params", parameters, ours)
    known_lengths = {key: int(value) for key, value in lengths.items() if value != AUTO and not findings.problems}
    tree["scheduler"] = {"params": known_lengths}
