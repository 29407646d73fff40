"""What must hold before the first step, and is known only when store, model and processes are there."""

from __future__ import annotations

from artel.config import RunConfig
from artel.errors import InputError, Problem
from artel.parallel import ParallelStrategy, World
from artel.tokens import Samples, StoreSplit
from artel.training.checkpoint.format import Progress
from artel.training.evaluation import Validation


def check_same_store(progress: Progress, digest: str) -> None:
    """Raise InputError where a run resumes with another text than it began with."""
    if progress.step and progress.store != digest:
        raise InputError.at(
            "data",
            "the text is not what this run began with (the token store's digest differs)",
            "restore the text, choose another folder (run=…), or begin anew with --restart",
        )


def check_same_step(progress: Progress, strategy: ParallelStrategy, world: World) -> None:
    """Raise InputError where processes found different checkpoints: the run's folder is one, seen by every host."""
    if strategy.all_reduce_sum([float(progress.step)]) != [float(progress.step * world.size)]:
        raise InputError.at(
            "run",
            f"process {world.rank} found step {progress.step}, others found another",
            "put the run's folder on a disk that all hosts share",
        )


def check_blocks(samples: Samples, part: StoreSplit, validation: Validation, config: RunConfig) -> None:
    """Raise InputError where the text is too short for a block, or nothing is held out where that is needed."""
    problems = []
    block = config.data.block
    if len(samples) == 0:
        what = f"the training text has {part.tokens:,} tokens, less than a block of {block:,} needs"
        fix = f"write data.block: {max(2, part.tokens - 1)} or less, or give more text"
        problems.append(Problem("data.block", what, fix))
    if validation.part.samples and len(validation.samples) == 0:
        what = f"the validation text has {validation.part.tokens:,} tokens, less than a block of {block:,} needs"
        fix = "write a larger data.validation, a smaller data.block, or data.validation: 0"
        problems.append(Problem("data.validation", what, fix))
    if config.validate_.patience is not None and not validation.part.samples:
        problems.append(Problem("validate.patience", "there is no validation part to go by", "give data.validation"))
    if problems:
        raise InputError(problems)
