"""Length, batch, optimizer, schedule, intervals and processes of torchtune's YAML in a run file."""

from __future__ import annotations

from typing import Any

from artel.config.converters.keys import (
    YamlKeys,
    a_flag,
    a_share,
    a_text,
    above_zero,
    at_least_one,
    from_zero,
    not_negative,
    one_of,
)
from artel.config.converters.optimizers import optimizer_of
from artel.config.converters.training_arguments import TRACKER_ADVICE

_COSINE = "get_cosine_schedule_with_warmup"


def carry_training(old: YamlKeys) -> None:
    old.carry("seed", "seed", from_zero)
    _carry_batch(old)
    _carry_length(old)
    _carry_optimizer(old)
    _carry_schedule(old)
    _carry_memory(old)
    _carry_intervals(old)
    _carry_tracking(old)
    _carry_parallel(old)


def _carry_batch(old: YamlKeys) -> None:
    micro, parts = old.read("batch_size", at_least_one), old.read("gradient_accumulation_steps", at_least_one)
    if micro and parts:
        old.put("train.batch", micro * parts, "batch_size", "gradient_accumulation_steps")
        old.put("train.micro_batch", micro, "batch_size")
        old.leave(
            "batch_size",
            f"train.batch is {micro * parts}, this times gradient_accumulation_steps: the share of one process; "
            "multiply it by the number of processes that there were",
        )
    if old.read("batch_size_val", at_least_one) == micro:
        old.agree("batch_size_val", "validation takes as many at a time as training")
    old.leave("batch_size_val", "validation takes as many at a time as training; write train.micro_batch")


def _carry_length(old: YamlKeys) -> None:
    """max_steps_per_epoch cuts each epoch off."""
    epochs, steps = old.read("epochs", at_least_one), old.read("max_steps_per_epoch", at_least_one)
    if epochs and steps:
        old.put("train.steps", epochs * steps, "epochs", "max_steps_per_epoch")
    elif epochs:
        old.put("train.epochs", epochs, "epochs")


def _carry_optimizer(old: YamlKeys) -> None:
    name = (old.read("optimizer._component_", a_text) or "AdamW").rpartition(".")[2]
    optimizer, difference = optimizer_of(name)
    old.put("train.optimizer", optimizer, "optimizer._component_")
    if difference:
        old.leave("optimizer._component_", difference)
    old.carry("optimizer.lr", "train.learning_rate", above_zero)
    decay = old.read("optimizer.weight_decay", not_negative)
    old.put("train.weight_decay", _usual_decay(name) if decay is None else decay, "optimizer.weight_decay")
    old.carry("optimizer.eps", "train.epsilon", above_zero)
    old.carry("optimizer.momentum", "train.momentum", a_share)
    old.put("train.betas", old.read("optimizer.betas", _betas) or [0.9, 0.999], "optimizer.betas")
    old.agree("optimizer.fused", "AdamW is fused")
    for key in old.below("optimizer"):
        if key in old.unasked():
            old.leave(key, f"the optimizer {optimizer} has train.betas, epsilon, momentum and weight_decay")
    clip = old.raw("clip_grad_norm")
    old.put("train.clip", old.read("clip_grad_norm", above_zero) if clip else None, "clip_grad_norm")
    old.leave_if_on("optimizer_in_bwd", "gradients are kept until the step, and the step is the same")


def _usual_decay(optimizer: str) -> float:
    """The default of an optimizer of PyTorch, bitsandbytes or torchao, by its name."""
    if optimizer == "Muon":
        return 0.1
    return 0.0 if optimizer in ("SGD", "Adam", "Adam8bit", "PagedAdam8bit", "Adafactor") else 0.01


def _betas(value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{value!r} is not two numbers; write [0.9, 0.999]")
    return [a_share(number) for number in value]


def _carry_schedule(old: YamlKeys) -> None:
    component = old.read("lr_scheduler._component_", a_text)
    steps = old.read("lr_scheduler.num_warmup_steps", from_zero) or 0
    schedule = "cosine" if component else "constant"
    old.put("train.schedule", schedule, "lr_scheduler._component_")
    old.put("train.warmup", steps, "lr_scheduler.num_warmup_steps")
    if component and not component.endswith(_COSINE):
        old.leave("lr_scheduler._component_", "artel does not know this schedule, and cosine is taken; train.schedule")
    if old.read("lr_scheduler.num_cycles", not_negative) == 0.5:
        old.agree("lr_scheduler.num_cycles", "half a wave is what artel's cosine is")
    for key in old.below("lr_scheduler"):
        if key not in ("lr_scheduler._component_", "lr_scheduler.num_warmup_steps"):
            old.leave(key, "artel's schedules have train.warmup, train.decay and train.minimum_learning_rate")


def _carry_memory(old: YamlKeys) -> None:
    key = "enable_activation_checkpointing"
    recomputes = old.read(key, a_flag)
    mode = old.read("ac_mode", one_of({"full": "full", "selective": "selective"}))
    if recomputes is not None:
        old.put("train.activation_checkpointing", (mode or "full") if recomputes else "none", key, "ac_mode")
    elif mode:
        old.put("train.activation_checkpointing", mode, "ac_mode")
    old.leave("ac_option", "artel's selective keeps matrix products and attention, and recomputes the rest")
    old.leave_if_on("enable_activation_offloading", "activations that are kept stay on the device")
    compiled = old.raw("compile")
    if old.below("compile"):
        compiled = any(old.raw(part) is True for part in old.below("compile"))
    if isinstance(compiled, bool):
        old.put("train.compile", "on" if compiled else "off", "compile", *old.below("compile"))
    if old.read("enable_fp8_training", a_flag):
        old.put("train.precision", "fp8", "enable_fp8_training")


def _carry_intervals(old: YamlKeys) -> None:
    """When the run validates, saves and logs; of itself torchtune saves after each epoch and does not validate."""
    old.put("validate.every", old.read("run_val_every_n_steps", at_least_one) or "never", "run_val_every_n_steps")
    steps, epochs = old.read("save_every_n_steps", at_least_one), old.read("save_every_n_epochs", at_least_one)
    every = steps or f"{epochs or 1} epoch"
    old.put("checkpoint.every", every, "save_every_n_steps" if steps else "save_every_n_epochs")
    old.leave("save_every_n_epochs", "save_every_n_steps is given, and decides")
    old.carry("log_every_n_steps", "log.every", at_least_one)
    profiles = old.read("profiler.enabled", a_flag)
    if profiles:
        old.put("profile", True, "profiler.enabled")
    for key in old.below("profiler"):
        old.agree(key, "profile: true writes the time of a few steps to RUN/profile")


_TRACKERS = {"WandBLogger": "wandb", "TensorBoardLogger": "tensorboard", "MLFlowLogger": "mlflow"}


def _carry_tracking(old: YamlKeys) -> None:
    name = (old.read("metric_logger._component_", a_text) or "").rpartition(".")[2]
    if name in _TRACKERS:
        old.put("track", ["console", "jsonl", _TRACKERS[name]], "metric_logger._component_")
    elif name in ("DiskLogger", "StdoutLogger"):
        old.agree("metric_logger._component_", "figures go to the console and metrics.jsonl")
    else:
        old.leave("metric_logger._component_", TRACKER_ADVICE)
    for key in old.below("metric_logger"):
        if key.endswith((".log_dir", ".output_dir", ".dir")):
            old.agree(key, "figures go to metrics.jsonl in the run's folder")
        elif not key.endswith("._component_"):
            old.leave(key, "trackers take it from the environment, as WANDB_PROJECT, WANDB_NAME")


def _carry_parallel(old: YamlKeys) -> None:
    old.carry("tensor_parallel_dim", "parallel.tensor", at_least_one)
    old.carry("context_parallel_dim", "parallel.context", at_least_one)
    shard, replicate = old.raw("data_parallel_shard_dim"), old.raw("data_parallel_replicate_dim")
    if isinstance(replicate, int) and replicate > 1:
        old.put("parallel.data", "hsdp", "data_parallel_replicate_dim")
        copies = "there are as many copies as the processes that are started over parallel.shard"
        old.leave("data_parallel_replicate_dim", copies)
        if isinstance(shard, int) and shard > 0:
            old.put("parallel.shard", shard, "data_parallel_shard_dim")
    elif isinstance(shard, int) and (shard > 1 or shard == -1):
        old.put("parallel.data", "fsdp", "data_parallel_shard_dim")
    if old.read("fsdp_cpu_offload", a_flag):
        old.put("parallel.data", "fsdp", "fsdp_cpu_offload")
        old.put("parallel.offload", "cpu", "fsdp_cpu_offload")
    reshards = old.read("fsdp_reshard_after_forward", a_flag)
    if reshards is False:
        old.put("parallel.data", "zero2", "fsdp_reshard_after_forward")
    for key in ("data_parallel_shard_dim", "data_parallel_replicate_dim", "fsdp_cpu_offload"):
        old.agree(key, "one process, or as many as are started, share each batch")
    old.agree("fsdp_reshard_after_forward", "fsdp frees what it gathered")
