"""The batch of a DeepSpeed file, beside the run file's."""

from __future__ import annotations

import math
from typing import Any

from artel.config import TrainConfig
from artel.parallel.deepspeed.config.keys import AUTO, Findings


def micro_batch(findings: Findings, tree: dict[str, Any], train: TrainConfig, world: int, stage: int) -> int | None:
    """Of the three numbers of a batch the file may give any; artel's batch is the run file's."""
    numbers: dict[str, int | None] = {}
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        value = tree.pop(key, AUTO)
        if value in (AUTO, None):
            numbers[key] = None
        elif isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
            findings.problem(key, f"is {value!r}", 'write a whole number above 0, or "auto"')
            return None
        else:
            numbers[key] = int(value)
    batch, rows, accumulation = numbers.values()
    if batch is not None and batch != train.batch:
        what = f"is {batch:,}, and train.batch is {train.batch:,}"
        findings.problem("train_batch_size", what, f'write "auto", or train.batch: {batch}')
    if isinstance(train.micro_batch, int):
        if rows not in (None, train.micro_batch):
            what = f"is {rows}, and train.micro_batch is {train.micro_batch}"
            fix = f'write "auto", or train.micro_batch: {rows}'
            findings.problem("train_micro_batch_size_per_gpu", what, fix)
        rows = train.micro_batch
    share = math.ceil(train.batch / world)
    if accumulation is not None:
        if rows is None:
            rows = math.ceil(share / accumulation)
        if math.ceil(share / rows) != accumulation:
            what = (
                f"is {accumulation}, and a process's {share} rows of a batch of {train.batch} on {world} "
                f"process(es) are {math.ceil(share / rows)} micro-batches of {rows}"
            )
            findings.problem("gradient_accumulation_steps", what, 'write "auto"')
    if rows is None and stage == 3:
        findings.note("train_micro_batch_size_per_gpu", "is 1: under stage 3 none can be tried; write a number")
        rows = 1
    return rows
