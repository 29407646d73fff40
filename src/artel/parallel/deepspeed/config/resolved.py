"""A DeepSpeed file that goes with a run, and what DeepSpeed is given of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from artel.config import RunConfig
from artel.parallel.deepspeed.config.keys import AUTO, Findings


@dataclass(frozen=True, slots=True)
class Resolved:
    """A DeepSpeed file that goes with a run."""

    file: str
    stage: int
    """Of ZeRO: what processes share; 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also weights."""
    precision: Literal["fp32", "bf16", "fp16"]
    """What weights are held in while layers compute; the optimizer's are float32."""
    micro_batch: int | None
    """Rows that one process runs at a time; None where both files leave it open."""
    notes: tuple[str, ...]
    """What was chosen or changed, a line each, for the log."""
    run: RunConfig
    world: int
    settings: dict[str, Any]
    """What DeepSpeed is given, but for what waits for the model and the length of the run."""

    def complete(self, model_config: Any, steps: int, micro_batch: int) -> dict[str, Any]:
        """The whole of what DeepSpeed is given, for a model, a run of `steps` and micro-batches of that many rows.

        Raises InputError where the file's schedule has another length than the run, or the model has no hidden size
        and the file asks for it.
        """
        findings = Findings(self.file)
        zero = dict(self.settings["zero_optimization"])
        width = _hidden_size(model_config)
        of_width = {
            "reduce_bucket_size": lambda size: size * size,
            "stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
            "stage3_param_persistence_threshold": lambda size: 10 * size,
        }
        for key, rule in of_width.items():
            if zero.get(key) != AUTO:
                continue
            if width is None:
                what = '"auto" follows the hidden size, and this model names none'
                findings.problem(f"zero_optimization.{key}", what, "write a number")
            else:
                zero[key] = rule(width)
        share = math.ceil(self.run.train.batch / self.world)
        accumulation = math.ceil(share / micro_batch)
        schedule = self.settings.get("scheduler", {}).get("params", {})
        lengths = {"total_num_steps": steps, "warmup_num_steps": max(1, self.run.train.warmup.of(steps))}
        for key, length in lengths.items():
            if schedule.get(key, length) != length:
                what = f"is {schedule[key]:,}, and of this run's {steps:,} steps it would be {length:,}"
                findings.problem(f"scheduler.params.{key}", what, 'write "auto"')
        findings.refuse()
        settings = {key: value for key, value in self.settings.items() if key != "scheduler"}
        return settings | {
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "train_batch_size": micro_batch * accumulation * self.world,  # with the padding of the last micro-batch
        }


def _hidden_size(config: Any) -> int | None:
    """As transformers' integration finds it: the model's, the largest of several, or its text part's."""
    for part in (config, getattr(config, "text_config", None)):
        size = getattr(part, "hidden_size", None) or max(getattr(part, "hidden_sizes", None) or [0])
        if size:
            return int(size)
    return None
