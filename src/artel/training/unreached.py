"""Settings that cannot act, because the run ends first: a warmup as long as the run, a validation that never falls due.

A run that would reach less than half of its learning rate is refused. The rest does no harm and is only noted. Defaults
are not looked at: what nobody wrote, nobody expects to act.
"""

from __future__ import annotations

from collections.abc import Iterator

from artel.config import RunConfig, is_override
from artel.config.schema.base import Section
from artel.config.schema.quantities import Interval
from artel.errors import InputError
from artel.training.schedule import Length, rate

_LONG = 1000  # steps in which every schedule shows its whole course
_SAMPLED = 200  # steps of a run that are compared, and as many at its end


def unreached_settings(run: RunConfig, length: Length | None = None) -> list[str]:
    """Sentences about settings that cannot act. `length` is known once the text is prepared.

    Raises InputError for a warmup that ends the run below half of its learning rate, unless the command line made the
    run shorter: somebody tries a few steps.
    """
    steps = run.train.steps if length is None else length.steps
    notes = list(_without_validation(run))
    if steps is not None:
        if run.parallel.deepspeed is None:  # whose file may have a schedule of its own
            _refuse_warmup(run, steps)
            notes += _of_schedule(run, steps)
        notes += _of_intervals(run, steps, length)
    return notes


def _refuse_warmup(run: RunConfig, steps: int) -> None:
    warmup = run.train.warmup.of(steps)
    is_trial = any(is_override(run, "train", key) for key in ("steps", "tokens", "epochs"))
    if warmup > 2 * steps and not is_trial:
        raise InputError.at(
            "train.warmup", _too_long(warmup, steps), f"write {max(1, steps // 10)}, or 0.1 for a tenth of the run"
        )


def _too_long(warmup: int, steps: int) -> str:
    reached = f"at most {steps / warmup:.2g} of the learning rate is reached"
    return f"{warmup:,} steps of warmup in a run of {steps:,}: {reached}"


def _of_schedule(run: RunConfig, steps: int) -> Iterator[str]:
    train = run.train
    warmup = train.warmup.of(steps)
    if warmup > steps:
        yield f"train.warmup: {_too_long(warmup, steps)}"
        return
    falls = rate(train, _LONG - 1, _LONG, 0) < 1
    last = rate(train, steps - 1, steps)
    if falls and last >= 1 and steps > 1:
        what = "warmup takes the whole run" if warmup >= steps - 1 else "the run is too short for its decay"
        yield f"train.schedule: {train.schedule} never lowers the learning rate: {what} of {steps:,} steps"
    elif not falls and _is_set(train, "minimum_learning_rate"):
        yield f"train.minimum_learning_rate has no effect: train.schedule: {train.schedule} stays at the peak"
    if _is_set(train, "decay"):
        other = train.model_copy(update={"decay": 0.5 if train.decay == 1 else 1.0})
        compared = {*range(0, steps, max(1, steps // _SAMPLED)), *range(max(0, steps - _SAMPLED), steps)}
        if all(rate(train, step, steps) == rate(other, step, steps) for step in compared):
            yield f"train.decay has no effect with train.schedule: {train.schedule}"


def _of_intervals(run: RunConfig, steps: int, length: Length | None) -> Iterator[str]:
    """`length` is None where the steps of an epoch are not known."""
    validate, checkpoint = run.validate_, run.checkpoint
    has_validation = _has_validation(run)
    for section, key, only in (
        (validate, "every", "it is validated once, at the end" if has_validation else ""),
        (validate, "tasks_every", "tasks are asked once, at the end" if validate.tasks else ""),
        (checkpoint, "every", "the only checkpoint is written at the end"),
    ):
        interval: Interval = getattr(section, key)
        if only and _is_set(section, key) and _times_due(interval, steps, length) == 0:
            name = "checkpoint" if section is checkpoint else "validate"
            yield f"{name}.{key}: {interval} is longer than the run of {steps:,} steps: {only}"
    if checkpoint.keep_every is not None and checkpoint.keep_every > steps:
        yield f"checkpoint.keep_every: {checkpoint.keep_every:,} never comes in a run of {steps:,} steps"
    if _is_set(run.log, "every") and run.log.every > steps:
        yield f"log.every: {run.log.every:,} is longer than the run of {steps:,} steps: metrics.jsonl gets one line"
    times = _times_due(validate.every, steps - 1, length)
    if validate.patience is not None and not validate.tasks and times is not None and times <= validate.patience:
        yield (
            f"validate.patience: {validate.patience:,} cannot end the run early: only {times:,} validations come "
            f"before its last step (validate.every: {validate.every}), and the first sets the mark"
        )


def _without_validation(run: RunConfig) -> Iterator[str]:
    if not _has_validation(run):
        if run.validate_.prompts:
            yield "validate.prompts are continued only before the first step: nothing is validated (data.validation: 0)"
        elif _is_set(run.validate_, "every") and run.validate_.every != Interval():
            yield "validate.every has no effect: nothing is kept for validation (data.validation: 0)"
        judges = [("checkpoint.best", run.checkpoint), ("validate.patience", run.validate_)]
        for name, section in judges if not run.validate_.tasks else []:
            key = name.partition(".")[2]
            if key in section.model_fields_set and getattr(section, key) is not None:
                yield f"{name} has no effect: nothing is kept for validation (data.validation: 0)"


def _has_validation(run: RunConfig) -> bool:
    return bool(run.data.from_store or run.data.validation)


def _times_due(interval: Interval, steps: int, length: Length | None) -> int | None:
    """Count the ends of the interval within the first `steps`; None if unknown (a time), or if it never ends."""
    if interval.steps is not None:
        return steps // interval.steps
    if interval.epochs is not None and length is not None:
        return int(round(length.epoch(steps) / interval.epochs, 9))
    return None


def _is_set(section: Section, key: str) -> bool:
    """True if the value is not the default."""
    return bool(getattr(section, key) != type(section).model_fields[key].get_default(call_default_factory=True))
