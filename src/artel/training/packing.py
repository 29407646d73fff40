"""`data.packing: auto`: decides if samples share blocks: a pure function of the run, its store and its model.

Packing changes the meaning of a step: `train.batch` then counts blocks, as in other tools. So samples are packed only
if the run keeps enough steps to learn in. The choice is written to RUN/config.yaml, and a started run keeps it.
"""

from __future__ import annotations

import numpy as np

from artel.config import RunConfig
from artel.models import Choice
from artel.objectives import objective_type
from artel.objectives.collate import packed_problems
from artel.tokens import StoreSplit
from artel.tokens.packing import best_fit, sample_sizes
from artel.training.schedule import Length

AUTO, UNPACKED, PACKED = "auto", "concatenate", "best_fit"
_MIN_SAMPLES_PER_BLOCK = 2  # on average; with fewer, packing gains little
_MIN_STEPS = 50  # of a packed run; with fewer, neither schedule nor model gets far


def with_packing(config: RunConfig, packing: str) -> RunConfig:
    """Return the run with `data.packing` set to `packing`, still marked as not set by the user."""
    data = config.data.model_copy(update={"packing": packing})
    data.model_fields_set.discard("packing")
    return config.model_copy(update={"data": data})


def may_unpack(config: RunConfig) -> bool:
    """True if packing was chosen automatically."""
    return config.data.packing == PACKED and "packing" not in config.data.model_fields_set


def choose_packing(config: RunConfig, split: StoreSplit) -> Choice:
    """Return `best_fit` or `concatenate` for the training `split` of a run's store, with the reason."""
    return choose_by_lengths(config, np.diff(split.ends().astype(np.int64), prepend=0))


def choose_by_lengths(config: RunConfig, tokens: np.ndarray, fraction: float = 1.0) -> Choice:
    """Choose like `choose_packing`, from the lengths of a `fraction` of all samples: `tokens`, int (samples,)."""
    block = config.data.block
    objective_class = objective_type(config)
    if not objective_class.packs_samples or not len(tokens):
        return Choice(UNPACKED, "")
    problems = packed_problems(config, objective_class.auto_class)
    if problems:
        return Choice(UNPACKED, problems[0].what)
    blocks = best_fit(np.minimum(sample_sizes(tokens, 1), block), block)[1]
    mean = f"{tokens.mean():,.0f} tokens on average"
    if len(tokens) < _MIN_SAMPLES_PER_BLOCK * blocks:
        return Choice(UNPACKED, f"samples of {mean} leave little of a block of {block:,} empty")
    all_blocks = max(1, round(blocks / fraction))
    length = Length.from_config(config.train, all_blocks, float(tokens.sum()) / blocks)
    steps = all_blocks // config.train.batch if length.steps is None else length.steps
    if steps < _MIN_STEPS:
        reason = f"packing would leave only {steps:,} steps of {config.train.batch} blocks"
        return Choice(UNPACKED, f"{reason}. Force it with data.packing={PACKED}")
    return Choice(PACKED, f"samples of {mean} share blocks of {block:,} tokens and do not see each other")
