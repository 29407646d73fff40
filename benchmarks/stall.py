"""How long a checkpoint keeps training waiting, written behind it or in front of it: prints a row of a table.

    python benchmarks/stall.py [--gigabytes 1] [--rounds 5] [--every 12] [--folder FOLDER]

One run trains a GPT-2 whose weights and AdamW's averages together take so many gigabytes (10^9 bytes), on one thread.
It saves in turn with `checkpoint.asynchronous` true and false; timed is artel's own callback `Save`, from its call
until it gives the loop back. A checkpoint that is still being written is waited for before the next one is timed. Shown
are medians, and how long steps take while a checkpoint is being written, against those in which nothing is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from artel.config import dump_run
from artel.config.load import run_from
from artel.parallel import join_world
from artel.preparing import prepare
from artel.training import loop
from artel.training.callbacks import Save
from artel.training.checkpoint.async_saver import Saver

WIDTH, VOCABULARY, POSITIONS = 1024, 500, 64
LAYER = 12 * WIDTH**2 + 13 * WIDTH
"""Parameters of a layer of GPT-2."""
STATE = 12
"""Bytes of a parameter: its weight and AdamW's two averages, in float32."""

saves: list[tuple[bool, float]] = []
"""Whether asynchronous, and the seconds that the loop was kept."""
steps: list[tuple[bool, float]] = []
"""Whether a checkpoint was being written all through the step, and its seconds."""
write_seconds: list[float] = []
"""From the call of an asynchronous save until the checkpoint had its name; known to a step."""


class TimedSave(Save):
    """artel's callback; every other checkpoint goes through a saver that is not asynchronous."""

    def __init__(self) -> None:
        super().__init__()
        self._savers: dict[bool, Saver] = {}
        self._returned: float | None = None
        self._begun: float | None = None
        self._was_writing = False

    def __call__(self, run: loop.Run) -> None:
        now, writing = time.monotonic(), is_writing(run)
        if self._returned is not None and writing == self._was_writing:  # not of a step in which it began or ended
            steps.append((writing, now - self._returned))
        if not writing:
            self._note_written(now)
        if run.step % run.config.checkpoint.every.steps or run.finished:
            super().__call__(run)
        else:
            self._save(run)
        self._returned, self._was_writing = time.monotonic(), is_writing(run)

    def _save(self, run: loop.Run) -> None:
        if not self._savers:
            wanted = run.config.checkpoint.model_copy(update={"asynchronous": False})
            other = Saver(run.folder.checkpoints, run.items, run.world, wanted, dump_run(run.config),
                          sharded=False, tell=run.tell)  # fmt: skip
            self._savers = {True: run.saver, False: other}
        asynchronous = len(saves) % 2 == 0
        self._savers[True].wait()
        self._note_written(time.monotonic())
        run.saver = self._savers[asynchronous]
        started = time.monotonic()
        super().__call__(run)
        saves.append((asynchronous, time.monotonic() - started))
        run.saver = self._savers[True]
        self._begun = started if asynchronous else None
        print(json.dumps({"step": run.step, "asynchronous": asynchronous, "seconds": saves[-1][1]}), flush=True)

    def _note_written(self, now: float) -> None:
        if self._begun is not None:
            write_seconds.append(now - self._begun)
            self._begun = None


def is_writing(run: loop.Run) -> bool:
    return any(run.folder.checkpoints.glob(".step-*"))


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--gigabytes", type=float, default=1.0)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--every", type=int, default=12, help="Steps between two checkpoints.")
    options.add_argument("--folder", type=Path, help="On the disk to be measured; else a temporary one.")
    given = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="artel-stall-", dir=given.folder))
    os.environ["ARTEL_CACHE"] = str(folder / "cache")
    layers = round((given.gigabytes * 1e9 / STATE - (VOCABULARY + POSITIONS) * WIDTH) / LAYER)
    try:
        run = run_from(tree(folder, layers, given), {}, {(): "stall.yaml"})
        loop.Save = TimedSave  # type: ignore[misc]
        with join_world(run.train.threads) as processes:
            loop.train(run, prepare(run), processes, lambda said: print(said, file=sys.stderr, flush=True))
        newest = folder / "run" / "checkpoints" / "latest"
        size = sum(file.stat().st_size for file in newest.iterdir()) / 1e9
    finally:
        shutil.rmtree(folder)
    behind, before = ([seconds for asynchronous, seconds in saves if asynchronous == kind] for kind in (True, False))
    calm, during = ([seconds for writing, seconds in steps if writing == kind] for kind in (False, True))
    median = statistics.median
    print("| checkpoint | asynchronous: loop waits | synchronous | share | on the disk after | step | while writing |")
    print("|---|---|---|---|---|---|---|")
    slower = f"{median(during):.2f} s, {median(during) / median(calm) - 1:+.0%}" if during else "-"
    print(f"| {size:.2f} GB | {spread(behind)} | {spread(before)} | {median(behind) / median(before):.1%} | "
          f"{median(write_seconds):.1f} s | {median(calm):.2f} s | {slower} |")  # fmt: skip


def spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


def tree(folder: Path, layers: int, given: argparse.Namespace) -> dict[str, Any]:
    config = {"model_type": "gpt2", "n_layer": layers, "n_embd": WIDTH, "n_head": 16, "n_positions": POSITIONS}
    return {
        "run": str(folder / "run"),
        "data": {"sources": [{"format": "dummy", "documents": 300}], "validation": 0, "block": POSITIONS,
                 "store": str(folder / "stores")},
        "tokenizer": {"train": {"vocab": VOCABULARY}},
        "model": {"config": config},
        "train": {"steps": 2 * given.rounds * given.every + 1, "batch": 1, "micro_batch": 1, "precision": "fp32",
                  "compile": "off", "threads": 1, "activation_checkpointing": "none"},
        "checkpoint": {"every": given.every, "keep": 1, "best": None},
        "track": ["jsonl"],
    }  # fmt: skip


if __name__ == "__main__":
    main()
