"""A user's own DeepSpeed file, checked against the run file and completed from it.

A value of `"auto"` is taken from the run file, as in transformers' integration. Where the two files disagree, all
differences are reported together. The order, optimizer, schedule, checkpoints and logs remain artel's.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

import torch

from artel.config import RunConfig
from artel.errors import Problem, missing_extra
from artel.parallel.deepspeed.config.batch import micro_batch
from artel.parallel.deepspeed.config.keys import ARTELS_OWN, AUTO, REFUSED, TOP_LEVEL, Findings, is_off, read_tree
from artel.parallel.deepspeed.config.optimizer import check_optimizer, check_schedule
from artel.parallel.deepspeed.config.precision import resolve_precision
from artel.parallel.deepspeed.config.resolved import Resolved
from artel.parallel.deepspeed.config.zero import zero_settings
from artel.registry import OPTIMIZERS


def read_deepspeed(file: str, run: RunConfig, world: int, device: torch.device) -> Resolved:
    """A DeepSpeed file for a run on `world` processes.

    Raises InputError with all that is wrong in the file or differs from the run file; where DeepSpeed is not installed.
    """
    _import_deepspeed(file, device)
    tree, findings = read_tree(file), Findings(file)
    _check_keys(findings, tree)
    _check_run(findings, run)
    zero = zero_settings(findings, tree, device)
    stage = int(zero["stage"])
    rows = micro_batch(findings, tree, run.train, world, stage)
    clip = run.train.clip or 0.0
    clipping = {"gradient_clipping": tree.get("gradient_clipping", AUTO)}
    findings.compare("", clipping, {"gradient_clipping": ("train.clip", clip)})
    check_optimizer(findings, tree, run.train)
    check_schedule(findings, tree, run.train)
    precision = resolve_precision(findings, tree, run.train.precision, device)
    base = "auto" if run.model.lora is None else run.model.lora.base
    if precision != "fp32" and base not in ("auto", precision):
        what = f"{base} beside {precision}, in which DeepSpeed holds all weights"
        findings.problems.append(Problem("model.lora.base", what, "leave it out"))
    if stage == 0 and precision != "fp32":
        # DeepSpeed's fp16 optimizer without ZeRO divides gradients by a loss scale that nothing multiplied in.
        what = f"0 in {precision} is run as 1: the same numbers, and the optimizer's state is shared"
        findings.note("zero_optimization.stage", what)
        stage = zero["stage"] = 1
    findings.refuse()
    settings = {key: value for key, value in tree.items() if value != AUTO}
    settings |= {
        "zero_optimization": zero,
        "gradient_clipping": clip,
        "zero_allow_untested_optimizer": True,
        # PyTorch's fused Adam steps on the host as fast as DeepSpeed's own, which compiles for a minute first.
        "zero_force_ds_cpu_optimizer": False,
    }
    return Resolved(file, stage, precision, rows, tuple(findings.notes), run, world, settings)


def _import_deepspeed(file: str, device: torch.device) -> None:
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without it DeepSpeed searches, and warns that it finds none
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        raise missing_extra("deepspeed", "deepspeed", f"parallel.deepspeed: {file}") from None
    # It logs much that its users need not read, on standard output, where results are.
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(logging.ERROR)
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    # DeepSpeed itself calls these at each step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def _check_keys(findings: Findings, tree: dict[str, Any]) -> None:
    """Report the keys that no run has, and take out of `tree` those that have no effect."""
    findings.unknown("", tree, TOP_LEVEL | ARTELS_OWN.keys() | REFUSED.keys())
    for key, instead in ARTELS_OWN.items():
        if not is_off(tree.pop(key, None)):
            findings.note(key, f"has no effect, artel sees to it: {instead}")
    for key, fix in REFUSED.items():
        if not is_off(tree.pop(key, None)):
            findings.problem(key, "is not for a run of artel's", fix)


def _check_run(findings: Findings, run: RunConfig) -> None:
    """Report the keys of the run file that do not go with any DeepSpeed file."""
    parallel, train = run.parallel, run.train
    split = [
        f"{name}: {getattr(parallel, name)}"
        for name in ("tensor", "pipeline", "context", "expert")
        if getattr(parallel, name) > 1
    ]
    if isinstance(parallel.data, str) and parallel.data not in ("auto", "ddp"):
        split.append(f"data: {parallel.data}")
    if parallel.offload != "none":
        split.append(f"offload: {parallel.offload}")
    if split:
        fix = "leave it out, or leave parallel.deepspeed out"
        findings.problems.append(Problem("parallel", f"{', '.join(split)} beside deepspeed, which splits", fix))
    if not OPTIMIZERS[train.optimizer].steps_flat_shards:
        what = f"{train.optimizer} looks at whole matrices, and DeepSpeed hands out flat pieces"
        findings.problems.append(Problem("train.optimizer", what, "write adamw or sgd"))
    if train.weights != "fp32":
        what = f"{train.weights}: DeepSpeed keeps float32 weights beside those it computes with"
        findings.problems.append(Problem("train.weights", what, "write fp32"))
