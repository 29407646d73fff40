"""Transformers' TrainingArguments, in a section `trainer`, as sections of a run file.

The Trainer's defaults are written out where they differ from artel's, so that the run stays the same.
"""

from __future__ import annotations

import re
from typing import Any

from artel.config.converters.keys import (
    OldKeys,
    a_flag,
    a_name,
    a_share,
    above_zero,
    at_least_one,
    did_you_mean,
    from_zero,
    names,
    not_negative,
    one_of,
)
from artel.config.schema.quantities import read_count
from artel.errors import InputError, Problem

# Defaults of TrainingArguments that differ from artel's.
TRAINER_DEFAULTS = {
    "trainer.per_device_train_batch_size": 8,
    "trainer.gradient_accumulation_steps": 1,
    "trainer.num_train_epochs": 3,
    "trainer.learning_rate": 5e-5,
    "trainer.weight_decay": 0,
    "trainer.adam_beta1": 0.9,
    "trainer.adam_beta2": 0.999,
    "trainer.lr_scheduler_type": "linear",
    "trainer.eval_strategy": "no",
}

_UNUSED = "every parameter that is trained takes part in each step here, so none is looked for"
STARTED = "processes are started by artel train --nproc, --nnodes and --node-rank, or by torchrun"


def carry_trainer(old: OldKeys) -> None:
    """Carry over, or report, every key under `trainer`, except bf16 and fp16."""
    old.carry("trainer.seed", "seed", from_zero)
    _carry_batch(old)
    _carry_length(old)
    _carry_optimizer(old)
    _carry_schedule(old)
    _carry_floor(old)
    _carry_compile(old)
    _carry_intervals(old)
    _carry_best(old)
    _carry_tracking(old)
    carry_ddp(old, "trainer")
    _leave(old)


def carry_ddp(old: OldKeys, section: str) -> None:
    """Report `ddp_find_unused_parameters: true` of a section; false is what artel does."""
    key = f"{section}.ddp_find_unused_parameters"
    if old.read(key, a_flag):
        old.leave(key, _UNUSED)


def drop_ddp(tree: dict[str, Any], place: str) -> None:
    """Remove the section `ddp` of accelerate from a run file. Raises InputError.

    `{ddp_find_unused_parameters: false}` is what artel does; anything else is refused with what to write.
    """
    section = tree.pop("ddp", None) or {}
    if not isinstance(section, dict):
        raise InputError.at(f"{place}: ddp", "is not a section", "take it out")
    problems = []
    for name, value in section.items():
        if name not in ("ddp_find_unused_parameters", "find_unused_parameters"):
            problems.append(Problem(f"{place}: ddp.{name}", f"has no place in a run file: {STARTED}", "take it out"))
        elif value is not False:
            problems.append(Problem(f"{place}: ddp.{name}", _UNUSED, "write false, or take it out"))
    if problems:
        raise InputError(problems)


def _carry_batch(old: OldKeys) -> None:
    key = "trainer.per_device_train_batch_size"
    micro, parts = old.read(key, at_least_one), old.read("trainer.gradient_accumulation_steps", at_least_one)
    if micro and parts:
        old.put("train.batch", micro * parts)
        old.put("train.micro_batch", micro)
        old.leave(
            key,
            f"train.batch is {micro * parts}, this times gradient_accumulation_steps: the share of one "
            "process; multiply it by the number of processes that there were",
        )
    if old.read("trainer.per_device_eval_batch_size", at_least_one) != micro:
        old.leave(
            "trainer.per_device_eval_batch_size",
            "validation takes as many at a time as training; write train.micro_batch",
        )


def _carry_length(old: OldKeys) -> None:
    """max_steps, above zero, takes precedence over num_train_epochs."""
    steps = old.read("trainer.max_steps", read_count)
    epochs = old.read("trainer.num_train_epochs", above_zero)
    if steps is not None and steps > 0:
        old.put("train.steps", steps)
        old.leave("trainer.num_train_epochs", f"max_steps is given, and the run ends after {steps} steps")
    elif epochs is not None:
        old.put("train.epochs", epochs)


def _carry_optimizer(old: OldKeys) -> None:
    old.carry("trainer.learning_rate", "train.learning_rate", above_zero)
    old.carry("trainer.weight_decay", "train.weight_decay", not_negative)
    old.carry("trainer.adam_epsilon", "train.epsilon", above_zero)
    betas = [old.read(f"trainer.adam_beta{number}", a_share) for number in (1, 2)]
    if None not in betas:
        old.put("train.betas", betas)
    clip = old.read("trainer.max_grad_norm", not_negative)
    if clip is not None:
        old.put("train.clip", clip or None)  # 0 is for no clipping
    name = old.read("trainer.optim", a_name)
    if name is None:
        return
    old.put("train.optimizer", "sgd" if name == "sgd" else "adamw")
    if re.fullmatch(r"(paged_)?adamw\w*_(8|4|32)bit", name):
        old.leave("trainer.optim", "artel keeps adamw's averages in fp32, on the device")
    elif name != "sgd" and not name.startswith("adamw_"):
        old.leave(
            "trainer.optim",
            "artel has no such optimizer, and adamw is taken; write train.optimizer: adamw, muon or sgd",
        )


def _carry_schedule(old: OldKeys) -> None:
    written = old.read("trainer.lr_scheduler_type", one_of({name: name for name in _SCHEDULES}))
    steps, share = old.read("trainer.warmup_steps", not_negative), old.read("trainer.warmup_ratio", a_share)
    if written is None:
        return
    schedule, exact = _SCHEDULES[written]
    old.put("train.schedule", schedule)
    if not exact:
        old.leave(
            "trainer.lr_scheduler_type",
            f"artel has no such schedule, and {schedule} is taken; write "
            "train.schedule: linear, cosine, constant or wsd",
        )
    if written == "constant":  # transformers warms up only for constant_with_warmup
        old.put("train.warmup", 0)
        for key, value in (("trainer.warmup_steps", steps), ("trainer.warmup_ratio", share)):
            if value:
                old.leave(key, "the schedule constant has no warmup; write train.warmup")
        return
    old.put("train.warmup", steps or share or 0)
    if steps and share:
        old.leave("trainer.warmup_ratio", "warmup_steps is given, and decides")


def _carry_floor(old: OldKeys) -> None:
    """The minimum learning rate, which is all that run files have of lr_scheduler_kwargs."""
    key = "trainer.lr_scheduler_kwargs"
    options, rate = old.raw(key), old.read("trainer.learning_rate", above_zero)
    floors = {"min_lr_rate": 1, "min_lr": rate}
    if old.raw("trainer.lr_scheduler_type") == "cosine_with_min_lr" and isinstance(options, dict):
        name = next(iter(options), "")
        if len(options) == 1 and floors.get(name):
            try:
                old.put("train.minimum_learning_rate", not_negative(options[name]) / floors[name])
            except ValueError as error:
                old.refuse(key, str(error))
            return
    if options:
        old.leave(
            key, "write train.minimum_learning_rate, a share of learning_rate, or, for the schedule wsd, train.decay"
        )


def _carry_compile(old: OldKeys) -> None:
    compiles = old.read("trainer.torch_compile", a_flag)
    if compiles is not None:
        old.put("train.compile", "on" if compiles else "off")


def _carry_intervals(old: OldKeys) -> None:
    """When the run validates, saves and logs."""
    logged = old.read("trainer.logging_steps", not_negative)
    evaluated = "trainer.eval_strategy"
    if not old.has(evaluated) and old.has("trainer.evaluation_strategy"):  # its name before transformers 4.46
        evaluated = "trainer.evaluation_strategy"
    _carry_interval(old, evaluated, "trainer.eval_steps", "validate.every", logged or 500)
    if old.has("trainer.save_strategy") or old.has("trainer.save_steps"):  # else what artel does is as good
        _carry_interval(old, "trainer.save_strategy", "trainer.save_steps", "checkpoint.every", 500)
    old.carry("trainer.save_total_limit", "checkpoint.keep", at_least_one)
    if logged is not None and logged >= 1:
        old.put("log.every", round(logged))
    else:
        old.leave("trainer.logging_steps", "write log.every, a number of steps")


def _carry_interval(old: OldKeys, strategy_key: str, steps_key: str, dotted: str, usual: float) -> None:
    """A strategy (no, steps, epoch) and its number of steps, or share of the run when below 1, as an interval."""
    strategy = old.read(strategy_key, _strategy) or "steps"
    steps = old.read(steps_key, above_zero) or usual
    if strategy == "steps" and steps >= 1:
        old.put(dotted, round(steps))
    elif strategy == "steps":
        old.leave(steps_key, f"a share of the run; write {dotted}: 0.5 epoch, or a number of steps")
    else:
        old.put(dotted, "never" if strategy == "no" else "1 epoch")
        old.leave(steps_key, f"{strategy_key.removeprefix('trainer.')} is {strategy}; write {dotted}: STEPS")
        if strategy == "best":
            old.leave(strategy_key, f"the best checkpoint is always kept; {dotted} is 1 epoch")


def _strategy(value: object) -> str:
    if value is False:  # what YAML makes of `no`
        return "no"
    return str(one_of({name: name for name in ("no", "steps", "epoch", "best")})(value))


def _carry_best(old: OldKeys) -> None:
    if old.read("trainer.metric_for_best_model", a_name) in ("loss", "eval_loss"):
        old.put("checkpoint.best", "loss")
    else:
        old.leave(
            "trainer.metric_for_best_model",
            "artel has no such figure, and goes by the loss; write checkpoint.best: loss or accuracy",
        )
    if old.read("trainer.greater_is_better", a_flag):
        old.leave("trainer.greater_is_better", "each figure of artel knows which way it improves")
    if old.read("trainer.load_best_model_at_end", a_flag):
        old.leave(
            "trainer.load_best_model_at_end",
            "RUN/model is the last, RUN/checkpoints/best the best; only a "
            "run that validate.patience ends has the best in RUN/model",
        )


def _carry_tracking(old: OldKeys) -> None:
    trackers = old.read("trainer.report_to", names) or []
    known = [name for name in trackers if name in ("tensorboard", "wandb")]
    if known:
        old.put("track", ["console", "jsonl", *known])
    if set(trackers) - {"tensorboard", "wandb", "none"}:
        old.leave("trainer.report_to", "artel has tensorboard and wandb; write track: [console, jsonl, wandb]")


def _leave(old: OldKeys) -> None:
    """Report keys without a place in a run file, and unknown keys."""
    for name, (usual, reason) in _LEFT_UNLESS.items():
        if old.raw(f"trainer.{name}") not in (None, usual):
            old.leave(f"trainer.{name}", reason)
    for name, reason in _LEFT.items():
        old.leave(f"trainer.{name}", reason)
    for key in old.unasked():
        section, _, name = key.partition(".")
        if section == "trainer":
            reason = f"artel has nothing in its place{did_you_mean(name, _CARRIED)}"
            old.leave(key, STARTED if name.startswith("ddp_") else reason)


# Transformers' schedules: the nearest of artel's, and whether it is the same.
_SCHEDULES = {
    "linear": ("linear", True),
    "cosine": ("cosine", True),
    "constant": ("constant", True),
    "constant_with_warmup": ("constant", True),
    "cosine_with_min_lr": ("cosine", True),
    "warmup_stable_decay": ("wsd", True),
    "cosine_with_restarts": ("cosine", False),
    "cosine_warmup_with_min_lr": ("cosine", False),
    "polynomial": ("linear", False),
    "inverse_sqrt": ("linear", False),
    "reduce_lr_on_plateau": ("constant", False),
    "greedy": ("constant", False),
}

_CARRIED = set(
    (
        "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps learning_rate "
        "num_train_epochs max_steps lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio optim adam_beta1 "
        "adam_beta2 adam_epsilon weight_decay max_grad_norm seed eval_strategy eval_steps save_strategy save_steps "
        "save_total_limit metric_for_best_model greater_is_better load_best_model_at_end logging_steps report_to "
        "torch_compile bf16 fp16"
    ).split()
)

# Reported unless the value is the default.
_MEMORY = "activations are kept; a smaller train.micro_batch takes less memory"
_LEFT_UNLESS: dict[str, tuple[Any, str]] = {
    "remove_unused_columns": (False, "there are no columns: data.sources says what is read"),
    "logging_strategy": ("steps", "write log.every, a number of steps"),
    "gradient_checkpointing": (False, _MEMORY),
    "activation_checkpointing": (False, _MEMORY),
    "use_cpu": (False, "CUDA_VISIBLE_DEVICES= keeps a run on the CPU"),
}

_COMPILE = "train.compile is on, off or auto"
_LOADING = "blocks are read from the token store, and need no workers"
_HUB = "nothing is sent anywhere; RUN/model is in Hugging Face's format"
_LEFT = {
    "auto_find_batch_size": "train.micro_batch: auto is what fits",
    "gradient_checkpointing_kwargs": _MEMORY,
    "activation_checkpointing_kwargs": _MEMORY,
    "eval_accumulation_steps": "of validation only sums are kept",
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "logging_dir": "figures go to metrics.jsonl in the run's folder",
    "run_name": "the run is named after its folder",
    "data_seed": "seed fixes the order too",
    "resume_from_checkpoint": "the same command resumes a stopped run",
    "overwrite_output_dir": "artel train --restart starts over",
    "output_dir": "output_dir outside of trainer is the run's folder",
    "deepspeed": STARTED,
    "fsdp": STARTED,
    "fsdp_config": STARTED,
    "local_rank": STARTED,
    "dataloader_num_workers": _LOADING,
    "dataloader_pin_memory": _LOADING,
    "dataloader_prefetch_factor": _LOADING,
    "dataloader_persistent_workers": _LOADING,
    "push_to_hub": _HUB,
    "hub_model_id": _HUB,
    "hub_token": _HUB,
    "class": "artel has one training loop",
    "min_lr": "write train.minimum_learning_rate, a share of learning_rate",
}
