"""Settings without effect because the run ends first: a warmup as long as the run, a validation that is never due.

A run that would reach less than half of its learning rate is refused. The other cases are harmless and only reported.
Defaults are ignored, since the user did not write them.
"""

from __future__ import annotations

from collections.abc import Iterator

from artel.config import RunConfig, is_override
from artel.config.schema.base import Section
from artel.config.schema.quantities import Interval
from artel.errors import InputError
from artel.registry import FORMATS, OPTIMIZERS
from artel.training.schedule import Length, rate

_MANY_STEPS = 1000  # steps that show the full course of every schedule
_COMPARED_STEPS = 200  # compared steps spread over a run, plus as many at its end


def find_unused_settings(config: RunConfig, length: Length | None = None) -> list[str]:
    """Return a note for each setting without effect. `length` is known once the text is prepared.

    Raise InputError for a warmup that ends the run below half of its learning rate, unless the command line shortened
    the run, for a trial of a few steps.
    """
    steps = config.train.steps if length is None else length.steps
    notes = [*_idle_settings(config), *_validation_notes(config)]
    if steps is not None:
        if config.parallel.deepspeed is None:  # its file may have another schedule
            _refuse_warmup(config, steps)
            notes += _schedule_notes(config, steps)
        notes += _interval_notes(config, steps, length)
    return notes


def _idle_settings(config: RunConfig) -> Iterator[str]:
    sections = [("", config), ("train.", config.train), ("parallel.", config.parallel)]
    sections += [(f"data.sources.{index}.", source) for index, source in enumerate(config.data.sources)]
    for prefix, section in sections:
        for name, key in section.unused_settings():
            if not (key == "format" and FORMATS[getattr(section, key)].goes_by_suffix and FORMATS[name].is_detected):
                yield f"{prefix}{name} has no effect: {prefix}{key} is {getattr(section, key)}"
    optimizer = config.train.optimizer
    keys = {key for name in OPTIMIZERS.names for key in _optimizer_keys(name)} - {*_optimizer_keys(optimizer)}
    for key in sorted(keys):
        if getattr(config.train, key) != type(config.train).model_fields[key].default:
            yield f"train.{key} has no effect: train.optimizer is {optimizer}"


def _optimizer_keys(name: str) -> tuple[str, ...]:
    return getattr(OPTIMIZERS[name], "keys", ())


def _refuse_warmup(config: RunConfig, steps: int) -> None:
    warmup = config.train.warmup.of(steps)
    is_trial = any(is_override(config, "train", key) for key in ("steps", "tokens", "epochs"))
    if warmup > 2 * steps and not is_trial:
        raise InputError.at(
            "train.warmup",
            _warmup_problem(warmup, steps),
            f"write {max(1, steps // 10)}, or 0.1 for a tenth of the run",
        )


def _warmup_problem(warmup: int, steps: int) -> str:
    reached = f"at most {steps / warmup:.2g} of the peak learning rate is reached"
    return f"{warmup:,} steps of warmup in a run of {steps:,}: {reached}"


def _schedule_notes(config: RunConfig, steps: int) -> Iterator[str]:
    train = config.train
    warmup = train.warmup.of(steps)
    if warmup > steps:
        yield f"train.warmup: {_warmup_problem(warmup, steps)}"
        return
    has_decay = rate(train, _MANY_STEPS - 1, _MANY_STEPS, 0) < 1
    last_rate = rate(train, steps - 1, steps)
    if has_decay and last_rate >= 1 and steps > 1:
        cause = "the warmup takes the entire run" if warmup >= steps - 1 else "the run is too short for its decay"
        yield f"train.schedule: {train.schedule} never lowers the learning rate: {cause} of {steps:,} steps"
    elif not has_decay and _is_set(train, "minimum_learning_rate"):
        yield f"train.minimum_learning_rate has no effect: train.schedule: {train.schedule} stays at the peak"
    if _is_set(train, "decay"):
        other_decay = train.model_copy(update={"decay": 0.5 if train.decay == 1 else 1.0})
        compared_steps = {
            *range(0, steps, max(1, steps // _COMPARED_STEPS)),
            *range(max(0, steps - _COMPARED_STEPS), steps),
        }
        if all(rate(train, step, steps) == rate(other_decay, step, steps) for step in compared_steps):
            yield f"train.decay has no effect with train.schedule: {train.schedule}"


def _interval_notes(config: RunConfig, steps: int, length: Length | None) -> Iterator[str]:
    """Yield notes about intervals. `length` is None if the steps of an epoch are unknown."""
    validate, checkpoint = config.validate_, config.checkpoint
    has_validation = _has_validation(config)
    for section, key, consequence in (
        (validate, "every", "it is validated once, at the end" if has_validation else ""),
        (validate, "tasks_every", "tasks are evaluated once, at the end" if validate.tasks else ""),
        (checkpoint, "every", "the only checkpoint is written at the end"),
    ):
        interval: Interval = getattr(section, key)
        if consequence and _is_set(section, key) and _count_due(interval, steps, length) == 0:
            name = "checkpoint" if section is checkpoint else "validate"
            yield f"{name}.{key}: {interval} is longer than the run of {steps:,} steps: {consequence}"
    if _is_set(config.log, "every") and config.log.every > steps:
        yield f"log.every: {config.log.every:,} is longer than the run of {steps:,} steps: metrics.jsonl gets one line"
    count = _count_due(validate.every, steps - 1, length)
    if validate.patience is not None and not validate.tasks and count is not None and count <= validate.patience:
        yield (
            f"validate.patience: {validate.patience:,} cannot end the run early: only {count:,} validations come "
            f"before its last step (validate.every: {validate.every}), and the first one is the baseline"
        )


def _validation_notes(config: RunConfig) -> Iterator[str]:
    if _is_set(config.validate_, "answers") and not config.validate_.rewards:
        yield "validate.answers has no effect without validate.rewards"
    if not _has_validation(config):
        if config.validate_.prompts:
            yield "validate.prompts are continued only before the first step, since there is no validation"
        if config.validate_.rewards:
            yield "validate.rewards have no effect: no text is held out for validation (data.validation: 0)"
        if not config.validate_.prompts and _is_set(config.validate_, "every") and config.validate_.every != Interval():
            yield "validate.every has no effect: no text is held out for validation (data.validation: 0)"
        needs_validation = [("checkpoint.best", config.checkpoint), ("validate.patience", config.validate_)]
        for name, section in needs_validation if not config.validate_.tasks else []:
            key = name.partition(".")[2]
            if key in section.model_fields_set and getattr(section, key) is not None:
                yield f"{name} has no effect: no text is held out for validation (data.validation: 0)"


def _has_validation(config: RunConfig) -> bool:
    return bool(config.data.from_store or config.data.validation)


def _count_due(interval: Interval, steps: int, length: Length | None) -> int | None:
    """Count how often the interval ends within `steps` steps. None if unknown (a time), or if it never ends."""
    if interval.steps is not None:
        return steps // interval.steps
    if interval.epochs is not None and length is not None:
        return int(round(length.epoch(steps) / interval.epochs, 9))
    return None


def _is_set(section: Section, key: str) -> bool:
    """True if the value is not the default."""
    return bool(getattr(section, key) != type(section).model_fields[key].get_default(call_default_factory=True))
