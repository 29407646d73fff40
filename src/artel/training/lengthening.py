"""Changing the length of a run that has already started.

A longer or shorter run may continue only if its finished steps would have been identical under the new length. The
order of samples does not depend on the length, but the learning rate usually does. So the length can change

- at any time with a constant schedule;
- before the decay begins with `wsd`;
- never with `linear` or `cosine`, once warmup is over.

Warmup keeps the number of steps it started with, even if it was given as a fraction. A run with a time budget follows
the same rule, measured in time.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from artel.config import RunConfig
from artel.config.schema.quantities import format_duration
from artel.errors import InputError
from artel.objectives import build_objective
from artel.preparing import PreparedText
from artel.training.checkpoint.format import Progress, list_checkpoints, read_progress
from artel.training.schedule import Length, rate, rate_by_time, run_length


def change_length(
    file: Path, old_config: RunConfig, new_config: RunConfig, prepared: PreparedText, model: Path
) -> bool:
    """Return True if a run that started as `old_config` (its `file`) has steps left with the length of `new_config`.

    Raise InputError if the run cannot continue with the new length. The error gives a command that trains its model
    further.
    """
    old, new = prepared_length(old_config, prepared), prepared_length(new_config, prepared)
    checkpoints = list_checkpoints(file.parent / "checkpoints")
    if not checkpoints:
        raise _length_error(file, old_config, new_config, old.steps or 0, new, "its checkpoints are gone", model)
    try:
        progress = read_progress(checkpoints[-1])
    except (OSError, ValueError, TypeError, InputError):  # damaged: loading it will report this
        progress = Progress(step=int(checkpoints[-1].name.removeprefix("step-")))
    reason = _reason_to_refuse(old_config, new_config, old, new, progress)
    if reason is not None:
        raise _length_error(file, old_config, new_config, progress.step, new, reason, model)
    return new.steps is None or new.steps > progress.step


def prepared_length(config: RunConfig, prepared: PreparedText) -> Length:
    """Return the length of a run on its prepared text."""
    split = prepared.open().train
    return run_length(config, build_objective(config, prepared.tokenizer()).dataset(split), split)


def _reason_to_refuse(
    old_config: RunConfig, new_config: RunConfig, old: Length, new: Length, progress: Progress
) -> str | None:
    """Return the reason if the finished steps would differ under the new length, or None."""
    finished_steps = progress.step
    if old.steps is None or new.steps is None or old.total_samples is None or new.total_samples is None:
        return _reason_to_refuse_budget(old_config, new_config, progress)
    if old_config.parallel.deepspeed is not None:
        return "DeepSpeed's engine has its own schedule (parallel.deepspeed)"
    if progress.stopped_early:
        return f"it stopped at step {finished_steps:,} because validation did not improve (validate.patience)"
    if new.steps < finished_steps:
        return f"it has already taken {finished_steps:,} steps"
    warmups = [progress.warmup, progress.warmup]
    if progress.warmup is None:
        warmups = [old_config.train.warmup.of(old.steps), new_config.train.warmup.of(new.steps)]
    if any(
        rate(old_config.train, step, old.steps, warmups[0]) != rate(new_config.train, step, new.steps, warmups[1])
        for step in range(finished_steps)
    ):
        schedule = old_config.train.schedule
        return f"the learning rate has already followed a {old.steps:,}-step schedule (train.schedule: {schedule})"
    if finished_steps * old.batch > new.total_samples:
        return f"its finished step {finished_steps:,} would have fewer samples"
    if finished_steps * old.batch > old.total_samples:
        return f"its last step, {finished_steps:,}, had fewer samples than the others"
    return None


def _reason_to_refuse_budget(old_config: RunConfig, new_config: RunConfig, progress: Progress) -> str | None:
    """Return the reason if the finished steps would differ under the new time budget, or None."""
    old, new = old_config.train.budget, new_config.train.budget
    if old is None or new is None:
        return "only one of the two lengths is a time (train.budget)"
    if progress.stopped_early:
        return f"it stopped at step {progress.step:,} because validation did not improve (validate.patience)"
    if progress.seconds >= new:
        return f"it has already run for {format_duration(progress.seconds)}"
    if progress.warmup is None:
        return None
    used_fractions = [progress.share * percent / 100 for percent in range(101)]
    pairs = [(fraction, min(1.0, fraction * old / new)) for fraction in used_fractions]
    step = progress.step
    if any(
        rate_by_time(old_config.train, step, old_fraction, 0) != rate_by_time(new_config.train, step, new_fraction, 0)
        for old_fraction, new_fraction in pairs
    ):
        schedule = old_config.train.schedule
        return (
            f"the learning rate has already followed a schedule of {format_duration(old)} (train.schedule: {schedule})"
        )
    return None


def _length_error(
    file: Path, old_config: RunConfig, new_config: RunConfig, finished_steps: int, new: Length, reason: str, model: Path
) -> InputError:
    """Return the error, with a command that trains the model further if it can."""
    if new.steps is None:
        length = format_duration(new_config.train.budget or 0.0)
        override = f"train.budget={length}"
    else:
        length = f"{new.steps:,} steps"
        override = f"train.steps={max(1, new.steps - finished_steps)}"
    message = f"the length cannot change to {length}: {reason}"
    if not model.is_dir() or (new.steps is not None and new.steps <= finished_steps):
        return InputError.at(str(file), message, "restore the former length, or start over with --restart")
    name = str(file.parent)
    first_commands = []
    base_model = str(model)
    if old_config.model.lora is not None:
        base_model = f"{name}-merged"
        first_commands = [["artel", "export", name, base_model, "--merge"]]
    values = [f"run={name}-longer", f"model.from={base_model}"]
    values += [] if old_config.model.trust_remote_code is None else [f"model.trust_remote_code={base_model}"]
    values += [] if old_config.tokenizer.train is None else ["tokenizer.train=null"]
    values += [] if old_config.tokenizer.from_ is None else ["tokenizer.from=null"]
    values += ["tokenizer.replace=false"] if old_config.tokenizer.replace else []
    values.append(override)
    commands = [*first_commands, ["artel", "train", name, *values]]
    line = " && ".join(shlex.join(command) for command in commands)
    fix = f"to train its model further with a new schedule: {line}"
    return InputError.at(str(file), message, fix)
