"""Transformers' TrainingArguments as sections of a run file.

The Trainer's defaults are written out where they differ from artel's, so that the run stays the same.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from artel.config.converters.keys import (
    Section,
    a_flag,
    a_share,
    a_text,
    above_zero,
    at_least_one,
    did_you_mean,
    from_zero,
    names,
    not_negative,
    one_of,
)
from artel.config.converters.optimizers import carry_optimizer
from artel.config.converters.sharding import carry_deepspeed, carry_fsdp
from artel.config.other_names import OTHER_NAMES
from artel.config.schema.quantities import read_count
from artel.errors import InputError, Problem
from artel.registry import SCHEDULES, TRACKERS

# Defaults of TrainingArguments that differ from artel's.
TRAINER_DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "weight_decay": 0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "lr_scheduler_type": "linear",
    "eval_strategy": "no",
}

OTHER_TRACKERS = [name for name in TRACKERS.names if name not in ("console", "jsonl")]
TRACKER_ADVICE = f"artel has {', '.join(OTHER_TRACKERS)}; write track: [console, jsonl, {OTHER_TRACKERS[0]}]"
_UNUSED = "every parameter that is trained takes part in each step here, so none is looked for"
STARTED = "processes are started by artel train --nproc, --nnodes and --node-rank, or by torchrun"


def carry_trainer(trainer: Section) -> None:
    """Carry over, or report, every key of the Trainer, except bf16 and fp16."""
    trainer.carry("seed", "seed", from_zero)
    _carry_batch(trainer)
    _carry_length(trainer)
    carry_optimizer(trainer)
    _carry_schedule(trainer)
    _carry_floor(trainer)
    _carry_memory(trainer)
    _carry_compile(trainer)
    _carry_intervals(trainer)
    _carry_best(trainer)
    _carry_tracking(trainer)
    carry_ddp(trainer)
    carry_deepspeed(trainer, "deepspeed")
    carry_fsdp(trainer)


def carry_ddp(section: Section) -> None:
    """Report `ddp_find_unused_parameters: true` of a section; false is what artel does."""
    if section.read("ddp_find_unused_parameters", a_flag):
        section.leave("ddp_find_unused_parameters", _UNUSED)
    else:
        section.agree("ddp_find_unused_parameters", _UNUSED)


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


def carry_trainer_precision(trainer: Section) -> None:
    """bf16 and fp16, of which bf16 goes first."""
    bf16, fp16 = trainer.read("bf16", a_flag), trainer.read("fp16", a_flag)
    if bf16 or fp16:
        trainer.put("train.precision", "bf16" if bf16 else "fp16", "bf16" if bf16 else "fp16")
    elif bf16 is False or fp16 is False:
        trainer.put("train.precision", "fp32", "bf16", "fp16")
    if bf16 and fp16:
        trainer.leave("fp16", "bf16 is true too, and is taken")
    elif fp16 is False:
        trainer.agree("fp16", "train.precision says in what is computed")
    elif bf16 is False:
        trainer.agree("bf16", "train.precision says in what is computed")


def _carry_batch(trainer: Section) -> None:
    key = "per_device_train_batch_size"
    micro, parts = trainer.read(key, at_least_one), trainer.read("gradient_accumulation_steps", at_least_one)
    if micro and parts:
        trainer.put("train.batch", micro * parts, key, "gradient_accumulation_steps")
        trainer.put("train.micro_batch", micro, key)
        trainer.leave(
            key,
            f"train.batch is {micro * parts}, this times gradient_accumulation_steps: the share of one "
            "process; multiply it by the number of processes that you used",
        )
    if trainer.read("per_device_eval_batch_size", at_least_one) == micro:
        trainer.agree("per_device_eval_batch_size", "validation takes as many at a time as training")
    else:
        trainer.leave(
            "per_device_eval_batch_size",
            "validation takes as many at a time as training; write train.micro_batch",
        )


def _carry_length(trainer: Section) -> None:
    """max_steps, above zero, takes precedence over num_train_epochs."""
    steps = trainer.read("max_steps", read_count)
    epochs = trainer.read("num_train_epochs", above_zero)
    if steps is not None and steps > 0:
        trainer.put("train.steps", steps, "max_steps")
        trainer.leave("num_train_epochs", f"max_steps is given, and the run ends after {steps} steps")
        return
    trainer.agree("max_steps", "is no limit")
    if epochs is not None:
        trainer.put("train.epochs", epochs, "num_train_epochs")


def _carry_schedule(trainer: Section) -> None:
    written = trainer.read("lr_scheduler_type", one_of({name: name for name in _SCHEDULES}))
    steps, share = _warmup(trainer)
    if written is None:
        return
    schedule, exact = _SCHEDULES[written]
    trainer.put("train.schedule", schedule, "lr_scheduler_type")
    if not exact:
        trainer.leave(
            "lr_scheduler_type",
            f"artel has no such schedule, and {schedule} is taken; write train.schedule: {', '.join(SCHEDULES.names)}",
        )
    if written == "constant":  # transformers warms up only for constant_with_warmup
        trainer.put("train.warmup", 0)
        for name, value in (("warmup_steps", steps), ("warmup_ratio", share)):
            if value:
                trainer.leave(name, "the schedule constant has no warmup; write train.warmup")
            else:
                trainer.agree(name, "there is no warmup")
        return
    decisive = "warmup_ratio" if share and not steps else "warmup_steps"
    trainer.put("train.warmup", steps or share or 0, decisive)
    if steps and share:
        trainer.leave("warmup_ratio", "warmup_steps is given, and decides")
    elif steps == 0 and share:
        trainer.agree("warmup_steps", "warmup_ratio decides")
    elif not share:
        trainer.agree("warmup_ratio", "there is no warmup by a share of the run")


def _warmup(trainer: Section) -> tuple[float | None, float | None]:
    """(steps, share of the run). Below 1, warmup_steps is a share, as transformers 5 takes it."""
    return trainer.read("warmup_steps", not_negative), trainer.read("warmup_ratio", a_share)


def _carry_floor(trainer: Section) -> None:
    """The minimum learning rate, which is all that run files have of lr_scheduler_kwargs."""
    key = "lr_scheduler_kwargs"
    options, rate = trainer.raw(key), trainer.read("learning_rate", above_zero)
    floors = {"min_lr_rate": 1, "min_lr": rate}
    if trainer.raw("lr_scheduler_type") == "cosine_with_min_lr" and isinstance(options, dict):
        name = next(iter(options), "")
        if len(options) == 1 and floors.get(name):
            try:
                trainer.put("train.minimum_learning_rate", not_negative(options[name]) / floors[name], key)
            except ValueError as error:
                trainer.refuse(key, str(error))
            return
    if options:
        trainer.leave(
            key, "write train.minimum_learning_rate, a share of learning_rate, or, for the schedule wsd, train.decay"
        )


def _carry_memory(trainer: Section) -> None:
    """Whether activations are recomputed: all of a layer, which is what transformers does."""
    for name in ("gradient_checkpointing", "activation_checkpointing"):
        recomputes = trainer.read(name, a_flag)
        if recomputes is not None:
            trainer.put("train.activation_checkpointing", "full" if recomputes else "none", name)
        options = trainer.raw(f"{name}_kwargs")
        if options in ({}, {"use_reentrant": False}):
            trainer.agree(f"{name}_kwargs", "artel recomputes without re-entrance")
        trainer.leave(f"{name}_kwargs", "artel recomputes without re-entrance; write train.activation_checkpointing")


def _carry_compile(trainer: Section) -> None:
    compiles = trainer.read("torch_compile", a_flag)
    if compiles is not None:
        trainer.put("train.compile", "on" if compiles else "off", "torch_compile")


def _carry_intervals(trainer: Section) -> None:
    """When the run validates, saves and logs."""
    logged = trainer.read("logging_steps", not_negative)
    evaluated = "eval_strategy"
    if not trainer.has(evaluated) and trainer.has("evaluation_strategy"):  # its name before transformers 4.46
        evaluated = "evaluation_strategy"
    carry_interval(trainer, evaluated, "eval_steps", "validate.every", logged or 500)
    if trainer.has("save_strategy") or trainer.has("save_steps"):  # else what artel does is as good
        carry_interval(trainer, "save_strategy", "save_steps", "checkpoint.every", 500)
    trainer.carry("save_total_limit", "checkpoint.keep", at_least_one)
    if logged is not None and logged >= 1:
        trainer.put("log.every", round(logged), "logging_steps")
    else:
        trainer.leave("logging_steps", "write log.every, a number of steps")


def carry_interval(trainer: Section, strategy_key: str, steps_key: str, dotted: str, usual: float) -> None:
    """A strategy (no, steps, epoch) and its number of steps, or share of the run when below 1, as an interval."""
    strategy = trainer.read(strategy_key, _strategy) or "steps"
    steps = trainer.read(steps_key, above_zero) or usual
    if strategy == "steps" and steps >= 1:
        trainer.put(dotted, round(steps), strategy_key, steps_key)
    elif strategy == "steps":
        trainer.leave(steps_key, f"a share of the run; write {dotted}: 0.5 epoch, or a number of steps")
        trainer.leave(strategy_key, f"goes by {steps_key}, a share of the run; write {dotted}")
    else:
        trainer.put(dotted, "never" if strategy == "no" else "1 epoch", strategy_key)
        trainer.leave(steps_key, f"{trainer.own_name(strategy_key)} is {strategy}; write {dotted}: STEPS")
        if strategy == "best":
            trainer.leave(strategy_key, f"the best checkpoint is always kept; {dotted} is 1 epoch")


def _strategy(value: object) -> str:
    if value is False:  # what YAML makes of `no`
        return "no"
    return str(one_of({name: name for name in ("no", "steps", "epoch", "best")})(value))


def _carry_best(trainer: Section) -> None:
    if trainer.raw("metric_for_best_model") in ("loss", "eval_loss"):
        trainer.put("checkpoint.best", "loss", "metric_for_best_model")
    else:
        trainer.read("metric_for_best_model", a_text)
        trainer.leave(
            "metric_for_best_model",
            "the best checkpoint goes by the loss; write checkpoint.best with the figure's name in artel",
        )
    if trainer.read("greater_is_better", a_flag):
        trainer.leave("greater_is_better", "each figure of artel knows which way it improves")
    else:
        trainer.agree("greater_is_better", "each figure of artel knows which way it improves")
    if trainer.read("load_best_model_at_end", a_flag):
        trainer.leave(
            "load_best_model_at_end",
            "RUN/model is the last, RUN/checkpoints/best the best; only a "
            "run that validate.patience ends has the best in RUN/model",
        )
    else:
        trainer.agree("load_best_model_at_end", "RUN/model is the last")


def _carry_tracking(trainer: Section) -> None:
    trackers = trainer.read("report_to", names) or []
    known = [name for name in trackers if name in TRACKERS]
    if known:
        trainer.put("track", ["console", "jsonl", *known], "report_to")
    if set(trackers) - {*known, "none"}:
        trainer.leave("report_to", TRACKER_ADVICE)
    elif not known:
        trainer.agree("report_to", "figures go to the console and metrics.jsonl")


def leave_trainer_rest(trainer: Section) -> None:
    """Report keys without a place in a run file, and note those that need none."""
    for name in trainer.unasked():
        if name in _LEFT:
            trainer.leave(name, _LEFT[name])
        elif name in _SAME:
            trainer.agree(name, _SAME[name])
        elif name in _LEFT_UNLESS:
            usual, reason, advice = _LEFT_UNLESS[name]
            if trainer.raw(name) in usual:
                trainer.agree(name, reason)
            else:
                trainer.leave(name, advice or reason)


def leave_unknown_arguments(trainer: Section, known: Collection[str] = ()) -> None:
    """Report the keys that nothing above knows: rare ones of TrainingArguments, and slips of the pen.

    `known` are the names that the tool has beside TrainingArguments.
    """
    for name in trainer.unasked():
        if name.startswith("dataloader_"):
            trainer.agree(name, _LOADING)
        elif name.startswith("ddp_"):
            trainer.leave(name, STARTED)
        elif name in OTHER_NAMES:  # another name of something that artel has
            trainer.leave(name, f"in a run file it is {OTHER_NAMES[name].replace('.0.', '.')}")
        else:
            trainer.leave(name, f"artel has nothing in its place{did_you_mean(name, {*KNOWN_ARGUMENTS, *known})}")


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
    "rex": ("cosine", False),  # axolotl's own
    "one_cycle": ("cosine", False),
}

TRAINER_CARRIED = {
    "per_device_train_batch_size": "train.micro_batch; times gradient_accumulation_steps: train.batch",
    "gradient_accumulation_steps": "train.batch",
    "learning_rate": "train.learning_rate",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "lr_scheduler_type": "train.schedule",
    "lr_scheduler_kwargs": "train.minimum_learning_rate",
    "warmup_steps": "train.warmup",
    "warmup_ratio": "train.warmup",
    "optim": "train.optimizer",
    "adam_beta1": "train.betas",
    "adam_beta2": "train.betas",
    "adam_epsilon": "train.epsilon",
    "weight_decay": "train.weight_decay",
    "max_grad_norm": "train.clip",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "gradient_checkpointing": "train.activation_checkpointing",
    "torch_compile": "train.compile",
    "seed": "seed",
    "eval_strategy": "validate.every",
    "eval_steps": "validate.every",
    "save_strategy": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "metric_for_best_model": "checkpoint.best",
    "logging_steps": "log.every",
    "report_to": "track",
    "deepspeed": "parallel.deepspeed",
    "fsdp": "parallel.data, parallel.offload",
}
"""Of each argument that is carried over, the keys of the run file that it decides."""

_COMPILE = "train.compile is on, off or auto"
_LOADING = "blocks are read from the token store, and need no workers"
_HUB = "nothing is sent anywhere by itself; RUN/model is in Hugging Face's format"

# Reported unless the value is one of the first, for the reason; where that does not fit other values, the last.
_NO, _OFF = (False, None), (0, 0.0, False, None)
_LEFT_UNLESS: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "remove_unused_columns": ((False, None), "there are no columns: data.sources says what is read", ""),
    "logging_strategy": (("steps",), "log.every is a number of steps", "write log.every, a number of steps"),
    "use_cpu": (_NO, "devices are found", "CUDA_VISIBLE_DEVICES= keeps a run on the CPU"),
    "no_cuda": (_NO, "devices are found", "CUDA_VISIBLE_DEVICES= keeps a run on the CPU"),
    "auto_find_batch_size": (_NO, "train.micro_batch is given", "train.micro_batch: auto is what fits"),
    "resume_from_checkpoint": (_NO, "the same command resumes a stopped run", ""),
    "overwrite_output_dir": (_NO, "a run is never overwritten by itself", "artel train --restart starts over"),
    "push_to_hub": (_NO, _HUB, ""),
    "save_only_model": (_NO, "a checkpoint has all that a run needs to resume", ""),
    "label_smoothing_factor": (_OFF, "targets are not smoothed", "artel smooths no labels of language models"),
    "neftune_noise_alpha": (_OFF, "no noise is added", "artel adds no noise to embeddings"),
    "group_by_length": (_NO, "order is by the seed", "artel's order is a function of the seed, never of lengths"),
    "dataloader_drop_last": (_NO, "every sample of an epoch is seen", ""),
    "tf32": (_NO, "train.precision says in what is computed", "train.precision says in what is computed: bf16, fp32"),
    "full_determinism": (_NO, "the order is fixed by seed", "seed fixes order and weights; kernels are torch's own"),
    "use_liger_kernel": (_NO, "artel chooses its kernels", "artel chooses its kernels; train.compile fuses layers"),
    "do_predict": (_NO, "training is all that is asked", "artel evaluate RUN, once it is trained"),
    "eval_on_start": (_NO, "validation is first done when it is due", ""),
    "accelerator_config": (({}, None), STARTED, ""),
    "logging_first_step": (_NO, "figures are written every log.every steps", "write log.every: 1 for a line a step"),
    "debug": (("", False, None, []), "nothing is asked", "artel train --help has what shows a run's inside"),
}
_LEFT = {
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "run_name": "the run is named after its folder",
    "data_seed": "seed fixes the order too",
    "output_dir": "output_dir outside of trainer is the run's folder",
    "local_rank": STARTED,
    "hub_model_id": _HUB,
    "class": "artel has one training loop",
    "min_lr": "write train.minimum_learning_rate, a share of learning_rate",
    "logging_dir": "figures go to metrics.jsonl in the run's folder",
    "ddp_timeout": "text is prepared before processes meet; train.hang_timeout ends those that get no further",
    "early_stopping_patience": "write validate.patience, with validate.every",
}
_SAME = {
    "do_train": "artel train trains",
    "do_eval": "artel train validates where validate.every says",
    "eval_accumulation_steps": "of validation only sums are kept",
    "dataloader_num_workers": _LOADING,
    "dataloader_pin_memory": _LOADING,
    "dataloader_prefetch_factor": _LOADING,
    "dataloader_persistent_workers": _LOADING,
    "hub_token": _HUB,
    "hub_strategy": _HUB,
    "hub_private_repo": _HUB,
    "bf16_full_eval": "validation computes as training does",
    "fp16_full_eval": "validation computes as training does",
    "average_tokens_across_devices": "the loss is the mean over all tokens of the global batch",
    "include_num_input_tokens_seen": "metrics.jsonl has the tokens",
    "logging_nan_inf_filter": "train.on_bad_step decides what becomes of such a step",
    "log_level": "the console shows what matters",
    "disable_tqdm": "the console shows what matters",
    "prediction_loss_only": "of validation only sums are kept",
    "save_safetensors": "weights are saved as safetensors",
}
KNOWN_ARGUMENTS = {*TRAINER_CARRIED, *_LEFT, *_LEFT_UNLESS, *_SAME}
