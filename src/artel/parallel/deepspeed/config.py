"""Checks a user's DeepSpeed file against the run file, and completes it from the run file.

The run file provides each `"auto"` value, as in transformers' integration. If the two files disagree, all differences
are reported together. Order of samples, optimizer, schedule, checkpoints and logs remain artel's.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch

from artel.config import RunConfig
from artel.errors import Problem, missing_extra
from artel.parallel.deepspeed.config_blocks import (
    check_optimizer,
    check_schedule,
    resolve_micro_batch,
    resolve_precision,
    resolve_zero_settings,
)
from artel.parallel.deepspeed.config_keys import AUTO, HANDLED_BY_ARTEL, REFUSED, TOP_LEVEL, Findings, is_off, read_tree
from artel.registry import OPTIMIZERS


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A DeepSpeed file that agrees with a run."""

    file: str
    stage: int
    """ZeRO stage. 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also weights."""
    precision: Literal["fp32", "bf16", "fp16"]
    """Precision of the weights while layers compute. The optimizer's are float32."""
    micro_batch: int | None
    """Rows per process and pass. None if both files leave it open."""
    notes: tuple[str, ...]
    """Choices and changes, a line each, for the log."""
    config: RunConfig
    world: int
    settings: dict[str, Any]
    """Settings for DeepSpeed, except those that depend on the model and the length of the run."""

    def complete(self, model_config: Any, steps: int, micro_batch: int) -> dict[str, Any]:
        """Return all settings for a model, a run of `steps` and micro-batches of `micro_batch` rows.

        Raise InputError if the file's schedule has a different length than the run, or if the file needs the hidden
        size and the model has none.
        """
        findings = Findings(self.file)
        zero = dict(self.settings["zero_optimization"])
        width = hidden_size(model_config)
        rules = {
            "reduce_bucket_size": lambda width: width * width,
            "stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
            "stage3_param_persistence_threshold": lambda width: 10 * width,
        }
        for key, rule in rules.items():
            if zero.get(key) != AUTO:
                continue
            if width is None:
                what = '"auto" depends on the hidden size, which this model does not have'
                findings.add_problem(f"zero_optimization.{key}", what, "set a number")
            else:
                zero[key] = rule(width)
        rows_per_process = math.ceil(self.config.train.batch / self.world)
        accumulation = math.ceil(rows_per_process / micro_batch)
        schedule = self.settings.get("scheduler", {}).get("params", {})
        lengths = {"total_num_steps": steps, "warmup_num_steps": max(1, self.config.train.warmup.of(steps))}
        for key, length in lengths.items():
            if schedule.get(key, length) != length:
                what = f"is {schedule[key]:,}, but with {steps:,} steps it must be {length:,}"
                findings.add_problem(f"scheduler.params.{key}", what, 'set "auto"')
        findings.raise_if_any()
        settings = {key: value for key, value in self.settings.items() if key != "scheduler"}
        return settings | {
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "train_batch_size": micro_batch * accumulation * self.world,  # with the padding of the last micro-batch
        }


def read_deepspeed(file: str, config: RunConfig, world: int, device: torch.device) -> ResolvedConfig:
    """Return a DeepSpeed file resolved for a run on `world` processes.

    Raise InputError with everything that is wrong in the file or differs from the run file, or if DeepSpeed is not
    installed.
    """
    _import_deepspeed(file, device)
    tree = read_tree(file)
    findings = Findings(file)
    check_keys(findings, tree)
    check_run(findings, config)
    zero = resolve_zero_settings(findings, tree, device)
    stage = int(zero["stage"])
    micro_batch = resolve_micro_batch(findings, tree, config.train, world, stage)
    clip = config.train.clip.limit if config.train.clip else 0.0
    if config.train.clip and config.train.clip.by != "norm":
        fix = "set a number (the maximum norm), or null"
        findings.problems.append(Problem("train.clip", "DeepSpeed clips only by the norm", fix))
    clipping = {"gradient_clipping": tree.get("gradient_clipping", AUTO)}
    findings.compare("", clipping, {"gradient_clipping": ("train.clip", clip)})
    check_optimizer(findings, tree, config.train)
    check_schedule(findings, tree, config.train)
    precision = resolve_precision(findings, tree, config.train.precision, device)
    base_dtype = "auto" if config.model.lora is None else config.model.lora.base
    if precision != "fp32" and base_dtype not in ("auto", precision):
        what = f"is {base_dtype}, but DeepSpeed keeps all weights in {precision}"
        findings.problems.append(Problem("model.lora.base", what, "remove it"))
    if stage == 0 and precision != "fp32":
        # Without ZeRO, DeepSpeed's fp16 optimizer divides gradients by a loss scale that was never multiplied in.
        what = f"0 in {precision} runs as 1: the result is the same, but the optimizer's state is sharded"
        findings.note("zero_optimization.stage", what)
        stage = zero["stage"] = 1
    findings.raise_if_any()
    settings = {key: value for key, value in tree.items() if value != AUTO}
    settings |= {
        "zero_optimization": zero,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        # PyTorch's fused Adam is as fast on the host as DeepSpeed's own, which compiles for a minute first.
        "zero_force_ds_cpu_optimizer": False,
    }
    return ResolvedConfig(file, stage, precision, micro_batch, tuple(findings.notes), config, world, settings)


def _import_deepspeed(file: str, device: torch.device) -> None:
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed searches and warns that it finds none
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        raise missing_extra("deepspeed", "deepspeed", f"parallel.deepspeed: {file}") from None
    # Show errors only, on standard error: DeepSpeed logs a lot, to standard output, where results belong.
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    # DeepSpeed itself calls these functions in each step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def check_keys(findings: Findings, tree: dict[str, Any]) -> None:
    """Report keys that are unknown or refused, and remove keys without effect from `tree`."""
    findings.add_unknown_keys("", tree, TOP_LEVEL | HANDLED_BY_ARTEL.keys() | REFUSED.keys())
    for key, replacement in HANDLED_BY_ARTEL.items():
        if not is_off(tree.pop(key, None)):
            findings.note(key, f"has no effect: artel handles it ({replacement})")
    for key, fix in REFUSED.items():
        if not is_off(tree.pop(key, None)):
            findings.add_problem(key, "cannot be used with artel", fix)


def check_run(findings: Findings, config: RunConfig) -> None:
    """Report keys of the run file that cannot be combined with any DeepSpeed file."""
    parallel, train = config.parallel, config.train
    split_keys = [
        f"{name}: {getattr(parallel, name)}"
        for name in ("tensor", "pipeline", "context", "expert")
        if getattr(parallel, name) > 1
    ]
    if isinstance(parallel.data, str) and parallel.data not in ("auto", "ddp"):
        split_keys.append(f"data: {parallel.data}")
    if parallel.offload != "none":
        split_keys.append(f"offload: {parallel.offload}")
    if split_keys:
        fix = "remove one of the two"
        findings.problems.append(
            Problem("parallel", f"{', '.join(split_keys)} cannot be combined with parallel.deepspeed", fix)
        )
    if not OPTIMIZERS[train.optimizer].supports_flat_shards:
        names = " or ".join(name for name in OPTIMIZERS.names if OPTIMIZERS[name].supports_flat_shards)
        what = f"{train.optimizer} cannot be combined with parallel.deepspeed"
        findings.problems.append(Problem("train.optimizer", what, f"set {names}"))
    if train.ema is not None:
        findings.problems.append(Problem("train.ema", "DeepSpeed does not average weights", "remove it"))
    if train.weights != "fp32":
        what = f"is {train.weights}, but DeepSpeed keeps a float32 copy of the weights"
        findings.problems.append(Problem("train.weights", what, "set fp32"))


def hidden_size(config: Any) -> int | None:
    """Return the hidden size as transformers' integration does: the model's, the largest of several, or its text's."""
    for section in (config, getattr(config, "text_config", None)):
        size = getattr(section, "hidden_size", None) or max(getattr(section, "hidden_sizes", None) or [0])
        if size:
            return int(size)
    return None
