"""`data.packing: auto`: whether the samples of a run share blocks. A pure function of the run, its store and its model.

Packing changes what a step is: `train.batch` then counts blocks, as in other tools, and a step holds the samples of so
many. So it is chosen only where a run keeps steps enough to learn in. What was chosen stands in RUN/config.yaml, and
a run that has begun keeps it.
"""

from __future__ import annotations

import numpy as np

from artel.config import RunConfig
from artel.models.choice import Choice
from artel.objectives import objective_type
from artel.objectives.packed import packed_problems
from artel.tokens import StoreSplit
from artel.tokens.sampling.packing import best_fit, sample_sizes
from artel.training.schedule import Length

AUTO, ALONE, PACKED = "auto", "concatenate", "best_fit"
_SHARE = 2  # samples to a block on average, below which packing gains little
_STEPS = 50  # of a run: fewer are too few for a schedule, and for a model to learn in


def with_packing(run: RunConfig, packing: str) -> RunConfig:
    """The run with this in place of `data.packing: auto`: still not a key that its user has set."""
    data = run.data.model_copy(update={"packing": packing})
    data.model_fields_set.discard("packing")
    return run.model_copy(update={"data": data})


def may_unpack(run: RunConfig) -> bool:
    """Whether the run packs because that was chosen for it."""
    return run.data.packing == PACKED and "packing" not in run.data.model_fields_set


def choose_packing(run: RunConfig, part: StoreSplit) -> Choice:
    """`best_fit` or `concatenate` for the training `part` of a run's store, and why."""
    return choose_by_lengths(run, np.diff(part.ends().astype(np.int64), prepend=0))


def choose_by_lengths(run: RunConfig, tokens: np.ndarray, share: float = 1.0) -> Choice:
    """The same by the `tokens` of its samples, int (samples,), or of a `share` of them."""
    kind, block = objective_type(run), run.data.block
    if not kind.packs_samples or not len(tokens):
        return Choice(ALONE, "")
    problems = packed_problems(run, kind.auto_class)
    if problems:
        return Choice(ALONE, problems[0].what)
    blocks = best_fit(np.minimum(sample_sizes(tokens, 1), block), block)[1]
    mean = f"of {tokens.mean():,.0f} tokens on average"
    if len(tokens) < _SHARE * blocks:
        return Choice(ALONE, f"samples {mean} nearly fill blocks of {block:,} by themselves")
    in_all = max(1, round(blocks / share))
    length = Length.of(run.train, in_all, float(tokens.sum()) / blocks)
    steps = in_all // run.train.batch if length.steps is None else length.steps
    if steps < _STEPS:
        what = f"{steps:,} steps of {run.train.batch} blocks would be left; data.packing: best_fit packs all the same"
        return Choice(ALONE, f"samples {mean} would share blocks, and {what}")
    return Choice(PACKED, f"samples {mean} share blocks of {block:,} tokens, and see only themselves")
