"""Length, batch, optimizer, schedule, intervals and processes of axolotl's YAML in a run file."""

from __future__ import annotations

from artel.config.converters.keys import Section, YamlKeys, at_least_one, from_zero, not_negative, up_to_one
from artel.config.converters.training_arguments import carry_trainer, leave_trainer_rest

# TrainingArguments by axolotl's names.
NAMES = {
    "per_device_train_batch_size": "micro_batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "num_train_epochs": "num_epochs",
    "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer",
}


def carry_training(old: YamlKeys) -> None:
    """axolotl trains with transformers' Trainer, and has most of its arguments under their own names."""
    _carry_batch(old)
    _carry_checkpointing(old)
    _carry_floor(old)
    _carry_tracking(old)
    for strategy, steps in (("eval_strategy", "eval_steps"), ("save_strategy", "save_steps")):
        if old.has(steps) and not old.has(strategy):
            old.give_value(strategy, "steps")
    if old.raw("adam_eps") is not None and not old.has("adam_epsilon"):
        old.carry("adam_eps", "train.epsilon", not_negative)
    old.carry("early_stopping_patience", "validate.patience", at_least_one)
    trainer = Section(old, names=NAMES)
    carry_trainer(trainer)
    leave_trainer_rest(trainer)
    _carry_per_epoch(old)
    _tell_of_validation(old)
    has_warmup = old.raw("lr_scheduler") != "constant"
    if has_warmup and not old.has("warmup_steps") and not old.has("warmup_ratio"):
        old.put("train.warmup", 0.03)
        old.tell("warmup is not given: axolotl takes 3 % of the run and at most 100 steps, train.warmup is 0.03")
    if not old.has("save_strategy") and not old.has("save_steps") and not old.has("saves_per_epoch"):
        old.put("checkpoint.every", "1 epoch")


def _carry_batch(old: YamlKeys) -> None:
    """batch_size, where it is given, is that of one process, and decides how often gradients are accumulated."""
    batch = old.read("batch_size", at_least_one)
    micro = old.read("micro_batch_size", at_least_one)
    if batch and micro and not old.has("gradient_accumulation_steps"):
        old.give_value("gradient_accumulation_steps", max(1, batch // micro))
        old.decided("train.batch", "batch_size")
    else:
        old.leave("batch_size", "gradient_accumulation_steps and micro_batch_size are given, and decide")


def _carry_checkpointing(old: YamlKeys) -> None:
    """`gradient_checkpointing: offload` recomputes too, and moves what it keeps to host memory."""
    key = "gradient_checkpointing"
    if isinstance(old.raw(key), str):
        old.leave(key, "activations are recomputed, and what is kept of them stays on the device")
        old.give_value(key, True)


def _carry_floor(old: YamlKeys) -> None:
    if old.raw("lr_scheduler") in (None, "cosine"):
        old.carry("cosine_min_lr_ratio", "train.minimum_learning_rate", up_to_one)
    old.leave("cosine_min_lr_ratio", "only lr_scheduler: cosine has it; write train.minimum_learning_rate")


def _carry_per_epoch(old: YamlKeys) -> None:
    """evals_per_epoch and saves_per_epoch, in place of a strategy."""
    for key, dotted in (("evals_per_epoch", "validate.every"), ("saves_per_epoch", "checkpoint.every")):
        times = old.read(key, from_zero)
        if times is not None:
            interval = f"{1 / times:.4g} epoch" if times else "never"
            old.put(dotted, interval, key)


def _tell_of_validation(old: YamlKeys) -> None:
    """Without an interval axolotl holds texts out and never looks at them."""
    if old.raw("val_set_size") and not any(map(old.has, ("eval_strategy", "eval_steps", "evals_per_epoch"))):
        old.tell(
            "val_set_size is given without evals_per_epoch or eval_steps: axolotl never validates then, artel once, at "
            "the end; for more write validate.every"
        )


def _carry_tracking(old: YamlKeys) -> None:
    """Weights & Biases where a project is named, the others where they are asked for."""
    switches = ("use_tensorboard", "use_mlflow", "use_trackio")
    tracked = [(key.removeprefix("use_"), key) for key in switches if old.raw(key) is True]
    if old.raw("use_wandb") is not False and (old.raw("use_wandb") is True or old.has("wandb_project")):
        tracked.append(("wandb", "use_wandb" if old.has("use_wandb") else "wandb_project"))
    if tracked:
        old.put("track", ["console", "jsonl", *(name for name, _ in tracked)], *(key for _, key in tracked))
    for key in (*switches, "use_wandb"):
        old.agree(key, "is off")
    for key in ("wandb_project", "wandb_name", "wandb_run_id"):
        old.leave(key, f"Weights & Biases takes it from the environment: {key.upper()}")


def carry_parallel(old: YamlKeys) -> None:
    """Sizes of the mesh of processes."""
    old.carry("tensor_parallel_size", "parallel.tensor", at_least_one)
    for key in ("context_parallel_size", "sequence_parallel_degree"):
        old.carry(key, "parallel.context", at_least_one)
    old.carry("expert_parallel_size", "parallel.expert", at_least_one)
    shard, replicate = old.read("dp_shard_size", at_least_one), old.read("dp_replicate_size", at_least_one)
    if shard and shard > 1 and replicate and replicate > 1:
        old.put("parallel.data", "hsdp", "dp_shard_size", "dp_replicate_size")
        old.put("parallel.shard", shard, "dp_shard_size")
        old.leave("dp_replicate_size", "there are as many copies as the processes that are started over parallel.shard")
    elif shard and shard > 1:
        old.put("parallel.data", "fsdp", "dp_shard_size")
    elif replicate and replicate > 1:
        old.put("parallel.data", "ddp", "dp_replicate_size")
    for key in ("dp_shard_size", "dp_replicate_size"):
        old.agree(key, "is one process")
