"""Runs of adapters over a pretrained folder, by one process or several."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from support import WORKERS
from support.ranks import run_ranks
from support.runs import write_run


def adapter_run(path: Path, model: dict[str, Any], train: dict[str, Any], parallel: dict[str, Any] | None) -> Path:
    """The run file, at `path`. `parallel` is its section, or a block of ZeRO."""
    if parallel is not None and "stage" in parallel:
        file = path.with_suffix(".json")
        file.write_text(json.dumps({"zero_optimization": parallel, "bf16": {"enabled": "auto"}}))
        parallel = {"deepspeed": str(file)}
    train = {"learning_rate": 3e-3, "batch": 16, "schedule": "constant"} | train
    return write_run(path, model={"config": None} | model, tokenizer={"train": None}, train=train,
                     parallel=parallel or {}, checkpoint={"every": 2})  # fmt: skip


def train_in(world: int, files: list[Path]) -> None:
    """Train the run files, one after another, in so many processes."""
    cases = os.pathsep.join(map(str, files))
    results = run_ranks(world, WORKERS / "layout_cases.py", "run_files", 900, CASES=cases)
    assert results == [[None] * len(files)] * world
