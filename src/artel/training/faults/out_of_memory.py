"""Repeats a step with smaller micro-batches if memory runs out.

The global batch stays the same, but is cut into more micro-batches. A single process simply continues, unless
DeepSpeed's engine holds the model. With several processes, the others wait in a collective for the one that failed, and
it cannot interrupt them: it writes the smaller size into the run's folder and ends, and the launcher starts all again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from artel.errors import ArtelError, OutOfMemory, WorkError
from artel.integers import ceil_div
from artel.messages import logger
from artel.models.activation_checkpointing import recompute
from artel.training.micro_batch import MicroBatchPlan, is_out_of_memory, next_smaller
from artel.training.run import Run

_SMALLER_MODEL = "train.optimizer: adamw8bit, train.weights: bf16 or model.lora"


@contextmanager
def optimizer_memory() -> Iterator[None]:
    """Raise WorkError if memory runs out inside the block. Smaller micro-batches would not help the optimizer."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        message = "out of memory in the optimizer's step, where a smaller micro-batch does not help"
        raise WorkError.at("train.optimizer", message, f"write {_SMALLER_MODEL}") from error


def use_less_memory(run: Run) -> None:
    """Choose smaller micro-batches, save the choice in the run's folder, and clean up after the failed attempt.

    Raise OutOfMemory if all processes must start again, WorkError if no smaller size is left.
    """
    step_name, old_plan = f"step {run.step + 1}", run.batch_plan
    smaller = next_smaller(old_plan, ceil_div(run.length.batch, run.strategy.dp_degree))
    if smaller is None:
        raise _out_of_memory_error(step_name, "even with full activation checkpointing")
    # DeepSpeed's engine cannot discard half a backward pass.
    if run.world.size > 1 or run.optimizer.saves_collectively:
        run.memory_limit.lower(smaller)
        message = f"out of memory on process {run.world.rank} with micro-batches of {old_plan.rows}"
        raise OutOfMemory.at(step_name, message, f"the same command resumes with {_describe(smaller)}")
    run.strategy.forget_failed_pass()
    if smaller.recompute != old_plan.recompute:
        if recompute(run.strategy.model, smaller.recompute).startswith("none"):
            raise _out_of_memory_error(step_name, "and this model cannot compute its layers twice")
        torch.compiler.reset()  # the compiled code is of the layers before this change
    gc.collect()
    if run.world.device.type == "cuda":
        torch.cuda.empty_cache()
    run.batch_plan = smaller
    logger.info(
        "%s: out of memory with micro-batches of %s; tried again with %s", step_name, old_plan.rows, _describe(smaller)
    )
    try:
        run.memory_limit.lower(smaller)
    except ArtelError as error:  # the next start will have to find the size again
        logger.info("%s: the smaller micro-batch cannot be saved: %s", step_name, error.one_line)


def _describe(plan: MicroBatchPlan) -> str:
    return f"micro-batches of {plan.rows}" + (" and all computed again" if plan.recompute == "full" else "")


def _out_of_memory_error(step_name: str, reason: str) -> WorkError:
    fix = f"use a smaller data.block, {_SMALLER_MODEL}; the same command resumes from the last checkpoint"
    return WorkError.at(step_name, f"out of memory with a single sample in a micro-batch, {reason}", fix)
