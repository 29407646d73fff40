"""A run made longer or shorter than it began: it goes on where all that it has done would have been done just so.

The order of samples does not depend on the length of a run (law 1), the learning rate of most schedules does. A run
whose steps so far had the rates that they have in a run of the new length is, with what follows, that run. `constant`
always is, `wsd` until its decay begins; warmup keeps the steps that it had as the run began, also where it is a
fraction. So it is with a budget, whose rates go by the time; while its warmup, a fraction of the time, goes on, any
budget may take its place.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from artel.config import RunConfig
from artel.config.schema.quantities import duration
from artel.errors import InputError
from artel.objectives import objective_of
from artel.preparing import Prepared
from artel.training.checkpoint.format import Progress, list_checkpoints, read_progress
from artel.training.schedule import Length, rate, rate_by_time, run_length


def change_length(file: Path, before: RunConfig, now: RunConfig, prepared: Prepared, model: Path) -> bool:
    """Whether the run that began as `before` (its `file`) has steps to do as `now`, which differs in its length alone.

    Raises InputError, with the command that does what is wanted, where it cannot go on as `now`.
    """
    old, new = _length(before, prepared), _length(now, prepared)
    checkpoints = list_checkpoints(file.parent / "checkpoints")
    if not checkpoints:
        raise _refused(file, before, now, old.steps or 0, new, "its checkpoints are not there any more", model)
    try:
        progress = read_progress(checkpoints[-1])
    except (OSError, ValueError, TypeError):  # damaged: loading it says so, and takes the one before it
        progress = Progress(step=int(checkpoints[-1].name.removeprefix("step-")))
    reason = _why_not(before, now, old, new, progress)
    if reason is not None:
        raise _refused(file, before, now, progress.step, new, reason, model)
    return new.steps is None or new.steps > progress.step


def _length(config: RunConfig, prepared: Prepared) -> Length:
    part = prepared.open().train
    return run_length(config, objective_of(config, prepared.tokenizer()).dataset(part), part)


def _why_not(before: RunConfig, now: RunConfig, old: Length, new: Length, progress: Progress) -> str | None:
    """Why the steps that are done are not those of a run of the new length."""
    done = progress.step
    if old.steps is None or new.steps is None or old.total is None or new.total is None:
        return _why_no_budget(before, now, progress)
    if before.parallel.deepspeed is not None:
        return "DeepSpeed's engine has a schedule of its own (parallel.deepspeed)"
    if progress.stopped_early:
        return f"it stopped at step {done:,}, since validations did not get better (validate.patience)"
    if new.steps < done:
        return f"it has done {done:,} steps"
    warmups = [progress.warmup, progress.warmup]
    if progress.warmup is None:
        warmups = [before.train.warmup.of(old.steps), now.train.warmup.of(new.steps)]
    if any(
        rate(before.train, step, old.steps, warmups[0]) != rate(now.train, step, new.steps, warmups[1])
        for step in range(done)
    ):
        schedule = before.train.schedule
        return f"its learning rate went the way of a run of {old.steps:,} steps (train.schedule: {schedule})"
    if done * old.batch > new.total:
        return f"step {done:,}, which is done, would be of fewer samples in it"
    if done * old.batch > old.total:
        return f"the last of its steps, {done:,}, was of fewer samples than the others"
    return None


def _why_no_budget(before: RunConfig, now: RunConfig, progress: Progress) -> str | None:
    """Why what is done within one budget is not what would have been done within the other."""
    old, new = before.train.budget, now.train.budget
    if old is None or new is None:
        return "one of the two lengths is a time (train.budget), the other is not"
    if progress.stopped_early:
        return f"it stopped at step {progress.step:,}, since validations did not get better (validate.patience)"
    if progress.seconds >= new:
        return f"it has taken {duration(progress.seconds)}"
    if progress.warmup is None:
        return None
    shares = [progress.share * part / 100 for part in range(101)]
    pairs = [(share, min(1.0, share * old / new)) for share in shares]
    if any(
        rate_by_time(before.train, progress.step, mine, 0) != rate_by_time(now.train, progress.step, other, 0)
        for mine, other in pairs
    ):
        return f"its learning rate went the way of a run of {duration(old)} (train.schedule: {before.train.schedule})"
    return None


def _refused(
    file: Path, before: RunConfig, now: RunConfig, done: int, new: Length, reason: str, model: Path
) -> InputError:
    """`done`: steps that are done."""
    if new.steps is None:
        length, rest = duration(now.train.budget or 0.0), f"train.budget={duration(now.train.budget or 0.0)}"
    else:
        length, rest = f"{new.steps:,} steps", f"train.steps={max(1, new.steps - done)}"
    what = f"the run cannot become one of {length}: {reason}"
    if not model.is_dir():
        return InputError.at(str(file), what, "set its length back, or begin anew with --restart")
    name = str(file.parent)
    begin, place = [], str(model)
    if before.model.lora is not None:
        place = f"{name}-merged"
        begin = [["artel", "export", name, place, "--merge"]]
    values = [f"run={name}-longer", f"model.from={place}"]
    values += [] if before.model.trust_remote_code is None else [f"model.trust_remote_code={place}"]
    values += [] if before.tokenizer.train is None else ["tokenizer.train=null"]
    values += [] if before.tokenizer.from_ is None else ["tokenizer.from=null"]
    values += ["tokenizer.replace=false"] if before.tokenizer.replace else []
    values.append(rest)
    commands = [*begin, ["artel", "train", name, *values]]
    line = " && ".join(shlex.join(command) for command in commands)
    fix = f"to train its model further, by a schedule of its own: {line}"
    return InputError.at(str(file), what, fix)
