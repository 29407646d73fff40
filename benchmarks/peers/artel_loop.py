"""artel as a contestant of train_speed.py and gpu_table.py: its own training loop on a run file, choices left to artel.

It is loaded by its path, so that it imports what `artel train` imports and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from artel.config import RunConfig, parse_run
from artel.parallel import join_world
from artel.preparing import prepare
from artel.training import loop
from artel.training.run import Run

if TYPE_CHECKING:
    from contestant import AfterStep, Work

_STEPS = 1_000_000
"""A long run, because the length decides whether to compile; its end is never reached."""
_TEXTS = {"chat": ("chat.jsonl", "chat"), "preference": ("preferences.jsonl", "preference"),
          "policy": ("prompts.jsonl", "prompts")}  # fmt: skip
"""File and format of an objective that learns from texts."""


def train(work: Work, after_step: AfterStep) -> None:
    """Train until killed; see contestant.py."""
    run = run_of(work)
    with join_world(run.train.threads) as world:
        loop.train(run, prepare(run), world, callbacks=[_AfterStep(after_step)])


def run_of(work: Work) -> RunConfig:
    """Return the run that trains `work` on the token store or the texts in its folder. Raises InputError."""
    folder, never = Path(work.folder), {"every": "never"}
    texts = _TEXTS.get(work.objective)
    source = {"sources": [{"path": str(folder / texts[0]), "format": texts[1]}], "validation": 0} if texts else {}
    tree = {
        "run": str(folder / "artel"),
        "data": {**(source or {"from_store": str(folder / "store")}), "block": work.length},
        "model": {"from": work.model, **({"lora": {"rank": work.lora, "alpha": 2 * work.lora}} if work.lora else {})},
        "objective": work.objective,
        "train": {
            "steps": _STEPS,
            "batch": work.batch,
            "precision": work.precision,
            "threads": work.threads,
            "optimizer": work.optimizer,
            "learning_rate": work.learning_rate,
            "betas": list(work.betas),
            "epsilon": work.epsilon,
            "weight_decay": work.weight_decay,
            "clip": work.clip,
            "schedule": "constant",
            "warmup": 0,
        },
        "validate": never,
        "checkpoint": never,
        "log": {"every": _STEPS},
        "track": ["jsonl"],
    }
    if work.answers:
        rewards = [f"{folder / 'rewards.py'}:score"]
        tree["policy"] = {"answers": work.answers, "new_tokens": work.new_tokens, "rewards": rewards}
    return parse_run(tree, {}, {(): "train_speed.py"})


class _AfterStep:
    """A callback of the loop: passes on the loss of each step, and sleeps there while others have their turns."""

    def __init__(self, after_step: AfterStep) -> None:
        self._after_step = after_step

    def __call__(self, run: Run) -> None:
        # No line is ever logged here, so the sums since the last one are ours to read and reset.
        sums, tokens = run.window.clone(), run.window_tokens
        run.window.zero_()
        run.window_tokens = 0
        self._after_step(sums[0] / sums[1], tokens)
