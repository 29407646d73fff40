"""Convert keys that tools built on transformers share: TrainingArguments, FSDP, peft's adapters, optimizers."""

from __future__ import annotations

import re
from typing import Any

from artel.config.converters import readers as read
from artel.config.converters.conversion import Conversion, KeyTable
from artel.config.schema.quantities import read_count
from artel.config.suggest import is_key
from artel.errors import InputError, Problem
from artel.registry import OPTIMIZERS, SCHEDULES, TRACKERS

# Defaults of TrainingArguments that differ from artel's.
DEFAULTS = {
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
MAIN_BRANCH_ADVICE = "artel reads the main branch; download that revision (hf download --revision) and use its folder"
LAUNCH_ADVICE = "start processes with artel train --nproc, --nnodes and --node-rank, or with torchrun"
PACKING_ADVICE = (
    "objective {} does not pack samples, and train.batch counts samples, not packed sequences: multiply it by the "
    "number of samples that fit into {}"
)
UNUSED_PARAMETERS_NOTE = "not needed: artel uses every trained parameter in each step"
_CHECKPOINTING_ADVICE = "artel uses non-reentrant checkpointing; write train.activation_checkpointing"
_ACTIVATION_CHECKPOINTING = ("train.activation_checkpointing", read.switch("full", "none"))
_MIN_LR_ADVICE = "write train.minimum_learning_rate, a fraction of learning_rate, or train.decay for the schedule wsd"

# fmt: off
TABLE = KeyTable(
    converted={
        "seed": ("seed", read.non_negative_int),
        "learning_rate": ("train.learning_rate", read.positive_number),
        "weight_decay": ("train.weight_decay", read.non_negative_number),
        "adam_epsilon": ("train.epsilon", read.positive_number),
        "gradient_checkpointing": _ACTIVATION_CHECKPOINTING,
        "activation_checkpointing": _ACTIVATION_CHECKPOINTING,
        "torch_compile": ("train.compile", read.switch("on", "off")),
        "save_total_limit": ("checkpoint.keep", read.positive_int),
    },
    implied={
        "overwrite_cache": "texts are prepared again when they or their keys change",
        "streaming": "texts are prepared once, and training reads tokens from the store",
        "use_fast_tokenizer use_slow_tokenizer": "artel always uses the fast tokenizer",
        "low_cpu_mem_usage": "weights are loaded straight onto their target device",
        "attn_implementation flash_attn": "artel chooses the attention kernel by device and model",
        "token use_auth_token hf_use_auth_token hf_hub_token": "artel uses the token of hf auth login",
        "do_train": "artel train trains",
        "do_eval": "artel train validates as set by validate.every",
        "eval_accumulation_steps prediction_loss_only": "validation keeps only running sums, never predictions",
        "dataloader_*": "blocks are read from the token store without workers",
        "hub_token hub_strategy hub_private_repo": "nothing is uploaded",
        "bf16_full_eval fp16_full_eval": "validation uses the precision of training",
        "bf16 fp16": "train.precision sets the precision",
        "average_tokens_across_devices": "the loss is the mean over all tokens of the global batch",
        "include_num_input_tokens_seen": "metrics.jsonl counts the tokens",
        "logging_nan_inf_filter": "train.on_bad_step handles such steps",
        "log_level disable_tqdm": "the console output is already short",
        "save_safetensors": "weights are saved as safetensors",
        "max_steps": "sets no limit",
        "fsdp_version fsdp_config.version fsdp_config.fsdp_version": "sharding always uses FSDP2",
        "fsdp_config.*use_orig_params": "FSDP2 keeps the parameters",
        "fsdp_transformer_layer_cls_to_wrap fsdp_config.*transformer_layer_cls_to_wrap fsdp_config.*auto_wrap_policy "
        "fsdp_config.*min_num_params": "artel shards every layer, whatever its class",
        "fsdp_config.*state_dict_type": "checkpoints are sharded, and RUN/model is one full model",
        "fsdp_config.*cpu_ram_efficient_loading fsdp_config.*sync_module_states":
            "each process reads its own shards of the weights",
        "fsdp_config.*limit_all_gathers fsdp_config.*ward_prefetch": "FSDP2 schedules the transfers",
        "fsdp_config.*offload_params": "nothing is offloaded",
    },
    unsupported={
        "torch_compile_backend torch_compile_mode": "not supported: train.compile is on, off or auto",
        "run_name": "ignored: the run is named after its folder",
        "cache_dir": "HF_HOME sets where models and data sets of the hub are cached",
        "local_rank accelerator_config* ddp_*": LAUNCH_ADVICE,
        "ddp_find_unused_parameters": UNUSED_PARAMETERS_NOTE,
        "ddp_timeout":
            "not needed: text is prepared before processes connect, and train.hang_timeout ends hanging processes",
        "hub_model_id push_to_hub": "artel train does not upload; artel push RUN NAME does",
        "class": "ignored: artel has only one training loop; remove it",
        "min_lr": "write train.minimum_learning_rate, a fraction of learning_rate",
        "lr_scheduler_kwargs": _MIN_LR_ADVICE,
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs": _CHECKPOINTING_ADVICE,
        "logging_dir": "metrics go to metrics.jsonl in the run's folder",
        "logging_steps logging_strategy": "write log.every, a number of steps",
        "logging_first_step": "write log.every: 1 for a line each step",
        "early_stopping_patience": "write validate.patience, with validate.every",
        "per_device_eval_batch_size": "validation uses the micro-batch of training; write train.micro_batch",
        "metric_for_best_model": "the best checkpoint has the lowest loss; for another metric write checkpoint.best",
        "greater_is_better": "ignored: artel knows for each metric whether higher is better",
        "load_best_model_at_end":
            "not converted: RUN/model is the last model, RUN/checkpoints/best the best; RUN/model is the "
            "best only if validate.patience ended the run",
        "remove_unused_columns": "not needed: data.sources names the fields to read",
        "use_cpu no_cuda": "set CUDA_VISIBLE_DEVICES= to run on the CPU",
        "auto_find_batch_size": "not needed: train.micro_batch: auto finds the largest that fits",
        "resume_from_checkpoint": "not needed: the same command resumes a stopped run",
        "overwrite_output_dir": "artel train --restart starts over",
        "save_only_model": "not needed: checkpoints always contain everything needed to resume",
        "label_smoothing_factor": "not supported: artel has no label smoothing for language models",
        "neftune_noise_alpha noisy_embedding_alpha": "artel does not support NEFTune",
        "group_by_length curriculum_sampling":
            "not supported: the order of samples depends on the seed only, never on lengths",
        "dataloader_drop_last": "not needed: artel drops no samples",
        "tf32": "train.precision sets the precision: bf16, fp32",
        "full_determinism":
            "not supported: seed fixes order and initial weights, but artel does not force deterministic kernels",
        "use_liger_kernel": "not needed: artel chooses kernels itself, and train.compile fuses layers",
        "do_predict": "run artel evaluate RUN after training",
        "eval_on_start": "not supported: the first validation comes after validate.every",
        "trust_remote_code":
            "artel does not run code that comes with a model; to allow it write model.trust_remote_code: NAME-OF-MODEL",
        "debug": "see the debugging options in artel train --help",
        "deepspeed deepspeed.*":
            "is a DeepSpeed configuration inside the file; save it as JSON and write parallel.deepspeed: FILE",
        "fsdp_config": "is not a section; write parallel: {data: fsdp}",
        "fsdp_config.*mixed_precision_policy": "train.precision sets the dtype of computation",
        "fsdp_config.*": "not supported: FSDP2 has no such option in artel",
    },
)
# fmt: on
_CONVERTED_BY_CODE = (
    "per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_grad_norm adam_beta1 adam_beta2 "
    "optim optim_args optim_target_modules lr_scheduler_type warmup_steps warmup_ratio eval_strategy "
    "evaluation_strategy eval_steps save_strategy save_steps report_to data_seed fsdp"
)
NAMES = {*TABLE.names(), *_CONVERTED_BY_CODE.split()}
"""All known arguments, without patterns."""


def convert_arguments(conversion: Conversion, processes: int | None = None, *, converts_batch: bool = True) -> None:
    """Convert the Trainer's keys that depend on one another. `processes`: number that the configuration starts.

    The caller converts bf16 and fp16, whose precedence over other keys differs between tools, and without
    `converts_batch` the batch.
    """
    if converts_batch:
        _convert_batch(conversion, processes)
    _convert_length(conversion)
    _convert_optimizer(conversion)
    _convert_schedule(conversion)
    _convert_intervals(conversion)
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        if conversion.raw_value(f"{key}_kwargs") in ({}, {"use_reentrant": False}):
            conversion.mark_implied(f"{key}_kwargs", "artel uses non-reentrant checkpointing")
    if conversion.raw_value("metric_for_best_model") in ("loss", "eval_loss"):
        conversion.put("checkpoint.best", "loss", "metric_for_best_model")
    trackers = conversion.get("report_to", read.names) or []
    supported = [name for name in trackers if name in TRACKERS]
    if supported:
        conversion.put("track", ["console", "jsonl", *supported], "report_to")
    if set(trackers) - {*supported, "none"}:
        conversion.report("report_to", TRACKER_ADVICE)
    conversion.mark_implied("report_to", "metrics go to the console and metrics.jsonl")
    if conversion.raw_value("logging_strategy") == "steps":
        conversion.mark_implied("logging_strategy", "log.every is a number of steps")
    conversion.report("data_seed", "ignored: seed fixes the order too")
    if isinstance(conversion.raw_value("deepspeed"), str):
        conversion.convert("deepspeed", "parallel.deepspeed", read.text)
    _convert_fsdp(conversion)


def _convert_batch(conversion: Conversion, processes: int | None) -> None:
    key, accumulation_key = "per_device_train_batch_size", "gradient_accumulation_steps"
    micro_batch = conversion.get(key, read.positive_int)
    accumulation_steps = conversion.get(accumulation_key, read.positive_int)
    if micro_batch and accumulation_steps:
        process_batch = micro_batch * accumulation_steps
        conversion.put("train.batch", process_batch * (processes or 1), key, accumulation_key)
        conversion.put("train.micro_batch", micro_batch, key)
        if processes is None:
            product = f"train.batch is {process_batch}, this times {accumulation_key}: the batch of one process"
            conversion.report(key, f"{product}; multiply it by the number of processes")
    if conversion.get("per_device_eval_batch_size", read.positive_int) == micro_batch:
        conversion.mark_implied("per_device_eval_batch_size", "validation uses the micro-batch of training")


def _convert_length(conversion: Conversion) -> None:
    """Convert the length. `max_steps`, if above zero, takes precedence over `num_train_epochs`."""
    steps = conversion.get("max_steps", read_count)
    epochs = conversion.get("num_train_epochs", read.positive_number)
    if steps is not None and steps > 0:
        conversion.put("train.steps", steps, "max_steps")
        conversion.report("num_train_epochs", f"max_steps is set: the run ends after {steps} steps")
    elif epochs is not None:
        conversion.put("train.epochs", epochs, "num_train_epochs")


def find_optimizer(name: str) -> tuple[str, str]:
    """Return (artel's optimizer, how it differs) for another tool's name, or adamw with advice if artel has none."""
    for optimizer in OPTIMIZERS.names:
        for pattern, difference in (*OPTIMIZERS[optimizer].other_names, (re.escape(optimizer), "")):
            if re.fullmatch(pattern, name):
                return optimizer, difference
    advice = f"artel has no such optimizer and uses adamw; write train.optimizer: {', '.join(OPTIMIZERS.names)}"
    return "adamw", advice


def _convert_optimizer(conversion: Conversion) -> None:
    name = conversion.get("optim", read.text)
    optimizer, difference = find_optimizer(name or "adamw")
    betas = [conversion.get(f"adam_beta{index}", read.fraction_below_one) for index in (1, 2)]
    if None not in betas:
        target_key = f"train.{optimizer}.betas"
        conversion.put(target_key if is_key(target_key) else "train.betas", betas, "adam_beta1", "adam_beta2")
    clip = conversion.get("max_grad_norm", read.non_negative_number)
    if clip is not None:
        conversion.put("train.clip", clip or None, "max_grad_norm")  # 0 disables clipping
    if name is None:
        return
    conversion.put("train.optimizer", optimizer, "optim")
    if optimizer == "muon":
        conversion.convert("learning_rate", "train.muon_learning_rate", read.positive_number)
    if difference:
        conversion.report("optim", difference)
    for key in ("optim_args", "optim_target_modules"):
        conversion.report(key, f"the optimizer {optimizer} has train.betas, epsilon, momentum and weight_decay")


# transformers' schedules with another name in artel, and the nearest schedule for those that artel lacks.
_SCHEDULES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}
_NEAREST_SCHEDULES = {
    **dict.fromkeys(("cosine_warmup_with_min_lr", "rex", "one_cycle"), "cosine"),
    "polynomial": "linear",
    **dict.fromkeys(("reduce_lr_on_plateau", "greedy"), "constant"),
}


def _convert_schedule(conversion: Conversion) -> None:
    names = {name: name for name in (*SCHEDULES.names, *_SCHEDULES, *_NEAREST_SCHEDULES)}
    name = conversion.get("lr_scheduler_type", read.one_of(names))
    _convert_min_lr(conversion, name)
    # Below 1, warmup_steps is a fraction of the run, as in transformers 5.
    steps = conversion.get("warmup_steps", read.non_negative_number)
    ratio = conversion.get("warmup_ratio", read.fraction_below_one)
    if name is None:
        return
    options = conversion.raw_value("lr_scheduler_kwargs")
    settings = SCHEDULES.get_settings(name)
    if settings is not None and isinstance(options, dict) and options.keys() <= settings.model_fields.keys():
        conversion.put(f"train.{name}", dict(options), "lr_scheduler_kwargs")
    is_known = name in SCHEDULES or name in _SCHEDULES
    schedule = _SCHEDULES.get(name, name) if is_known else _NEAREST_SCHEDULES[name]
    conversion.put("train.schedule", schedule, "lr_scheduler_type")
    if not is_known:
        fix = f"write train.schedule: {', '.join(SCHEDULES.names)}"
        conversion.report("lr_scheduler_type", f"artel has no such schedule and uses {schedule}; {fix}")
    if name == "constant":  # transformers warms up only for constant_with_warmup
        conversion.put("train.warmup", 0)
        for key in ("warmup_steps", "warmup_ratio"):
            conversion.report_if_on(key, "the schedule constant has no warmup; write train.warmup")
        return
    used_key = "warmup_ratio" if ratio and not steps else "warmup_steps"
    conversion.put("train.warmup", steps or ratio or 0, used_key)
    ignored_key = "warmup_steps" if used_key == "warmup_ratio" else "warmup_ratio"
    conversion.report_if_on(ignored_key, f"{used_key} is set and takes precedence")


def _convert_min_lr(conversion: Conversion, schedule: str | None) -> None:
    """Convert the minimum learning rate, the only key of lr_scheduler_kwargs that artel has."""
    key = "lr_scheduler_kwargs"
    options = conversion.raw_value(key)
    units = {"min_lr_rate": 1, "min_lr": conversion.get("learning_rate", read.positive_number)}
    if schedule == "cosine_with_min_lr" and isinstance(options, dict) and len(options) == 1:
        ((name, min_lr),) = options.items()
        if units.get(name):
            conversion.replace(key, min_lr)
            conversion.convert(
                key, "train.minimum_learning_rate", lambda rate: read.non_negative_number(rate) / units[name]
            )


def _convert_intervals(conversion: Conversion) -> None:
    """Convert the validation, checkpoint and log intervals."""
    log_steps = conversion.get("logging_steps", read.non_negative_number)
    if log_steps is not None and log_steps >= 1:
        conversion.put("log.every", round(log_steps), "logging_steps")
    strategy_key = "eval_strategy"
    if not conversion.has(strategy_key) and conversion.has("evaluation_strategy"):  # its name before transformers 4.46
        strategy_key = "evaluation_strategy"
    _convert_interval(conversion, strategy_key, "eval_steps", "validate.every", log_steps or 500)
    if conversion.has("save_strategy") or conversion.has("save_steps"):  # otherwise artel's default interval is fine
        _convert_interval(conversion, "save_strategy", "save_steps", "checkpoint.every", 500)


def _convert_interval(
    conversion: Conversion, strategy_key: str, steps_key: str, target_key: str, default: float
) -> None:
    """Convert a strategy (no, steps, epoch) and its steps, a fraction of the run if below 1, to an interval."""
    strategy = conversion.get(strategy_key, _read_strategy) or "steps"
    steps = conversion.get(steps_key, read.positive_number) or default
    if strategy == "steps" and steps >= 1:
        conversion.put(target_key, round(steps), strategy_key, steps_key)
    elif strategy == "steps":
        conversion.report(steps_key, f"a fraction of the run; write {target_key}: 0.5 epoch, or a number of steps")
        conversion.report(strategy_key, f"uses {steps_key}, a fraction of the run; write {target_key}")
    else:
        conversion.put(target_key, "never" if strategy == "no" else "1 epoch", strategy_key)
        conversion.report(steps_key, f"{conversion.tool_name(strategy_key)} is {strategy}; write {target_key}: STEPS")
        if strategy == "best":
            conversion.report(strategy_key, f"the best checkpoint is always kept; {target_key} is 1 epoch")


def _read_strategy(value: object) -> Any:
    return read.one_of("no steps epoch best")("no" if value is False else value)  # YAML reads `no` as false


# FSDP's strategies → artel's modes of data parallelism.
_SHARDING = {
    "FULL_SHARD": "fsdp",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hsdp",
    "HYBRID_SHARD_ZERO2": "hsdp",
}
_NUMBERED_SHARDING = {str(index): name for index, name in enumerate(_SHARDING, 1)}


def _convert_fsdp(conversion: Conversion) -> None:
    """Convert `fsdp` (full_shard auto_wrap offload) and `fsdp_config`, whose keys may begin with fsdp_."""
    value = conversion.raw_value("fsdp")
    words = value if isinstance(value, list) else re.split(r"[\s,]+", value) if isinstance(value, str) else []
    options = ["FULL_SHARD"] if value is True else [str(word).upper() for word in words if word]
    config_keys = (key for key in conversion.keys_in("fsdp_config") if key.count(".") == 1)
    config = {key.partition(".")[2].removeprefix("fsdp_"): key for key in config_keys}
    values = {name: conversion.raw_value(key) for name, key in config.items()}
    reshard = values.get("reshard_after_forward")
    sharding = str(values.get("sharding_strategy") or "").upper()
    sharding = _NUMBERED_SHARDING.get(sharding, sharding)
    strategy = _SHARDING.get(sharding, "")
    if not strategy and reshard is not False:
        strategy = next((_SHARDING[option] for option in options if option in _SHARDING), "fsdp")
    is_sharded = bool(options or (values and conversion.has("fsdp_version")) or "version" in values)
    strategy_keys = [config[name] for name in ("sharding_strategy", "reshard_after_forward") if name in config]
    if is_sharded:
        conversion.put("parallel.data", strategy or "zero2", "fsdp", *strategy_keys)
    for key in strategy_keys if not is_sharded else ():
        conversion.report(key, "fsdp is not given; write parallel.data: fsdp, zero2 or hsdp")
    if values.get("sharding_strategy") is not None and sharding not in _SHARDING:
        conversion.report(config["sharding_strategy"], f"artel knows {', '.join(_SHARDING)}; write parallel.data")
    elif values.get("sharding_strategy") is not None and "reshard_after_forward" in config:
        conversion.report(config["reshard_after_forward"], "sharding_strategy is set and takes precedence")
    unknown = [option.lower() for option in options if option not in {*_SHARDING, "AUTO_WRAP", "OFFLOAD"}]
    if unknown:
        conversion.report("fsdp", f"artel has no equivalent of {', '.join(unknown)}")
    if "OFFLOAD" in options or values.get("offload_params") is True:
        offload_keys = [config["offload_params"]] if "offload_params" in config else []
        conversion.put("parallel.offload", "cpu", "fsdp", *offload_keys)
    if "activation_checkpointing" in config:
        key = config["activation_checkpointing"]
        recomputes = conversion.get(key, read.flag)
        conversion.put("train.activation_checkpointing", "full" if recomputes else "none", key)
        if conversion.raw_value("gradient_checkpointing") not in (None, recomputes):
            conversion.report("gradient_checkpointing", f"{key} decides: {'full' if recomputes else 'none'}")


def drop_ddp(tree: dict[str, Any], location: str) -> None:
    """Remove the section `ddp` of accelerate from a run file.

    Raise InputError unless it is `{ddp_find_unused_parameters: false}`, which is what artel does.
    """
    section = tree.pop("ddp", None) or {}
    if not isinstance(section, dict):
        raise InputError.at(f"{location}: ddp", "is not a section", "remove it")
    problems = []
    for name, value in section.items():
        if name not in ("ddp_find_unused_parameters", "find_unused_parameters"):
            problems.append(
                Problem(f"{location}: ddp.{name}", "is not a key of a run file", f"remove it; {LAUNCH_ADVICE}")
            )
        elif value is not False:
            problems.append(Problem(f"{location}: ddp.{name}", UNUSED_PARAMETERS_NOTE, "write false, or remove it"))
    if problems:
        raise InputError(problems)


def convert_validation_split(conversion: Conversion, key: str) -> None:
    """Convert the fraction of the texts to hold out for validation."""
    fraction = conversion.get(key, read.non_negative_number) or 0
    conversion.put("data.validation", fraction if fraction < 1 else 0.05, key)
    if fraction >= 1:
        conversion.report(key, "is a number of rows, but data.validation is a fraction: artel uses 0.05")


def convert_precision(conversion: Conversion, keys: dict[str, str]) -> str:
    """Convert the first of `keys` (key → precision) that is true; report the others. Return the precision, or ""."""
    chosen = ""
    for key, precision in keys.items():
        if conversion.get(key, read.flag) and chosen not in ("", precision):
            conversion.report(key, f"train.precision is {chosen}")
        elif conversion.raw_value(key) is True:
            chosen = precision
            conversion.put("train.precision", precision, key)
    return chosen


def convert_lora(conversion: Conversion, keys: str) -> None:
    """Convert peft's LoraConfig.

    `keys`: the tool's names of r, lora_alpha, lora_dropout, use_rslora, use_dora, modules_to_save and target_modules.
    """
    rank, alpha, dropout, rslora, dora, saved, target = keys.split()
    conversion.convert(rank, "model.lora.rank", read.positive_int)
    conversion.convert(alpha, "model.lora.alpha", read.positive_number)
    conversion.convert(dropout, "model.lora.dropout", read.fraction_below_one)
    conversion.convert(rslora, "model.lora.rslora", read.flag)
    conversion.convert(dora, "model.lora.dora", read.flag)
    conversion.convert(saved, "model.lora.save", read.names)
    layers = conversion.get(target, read.names)
    if layers in (["all-linear"], ["all"], ["all_linear"]):
        conversion.put("model.lora.target", ["auto"], target)
    elif layers and all(re.fullmatch(r"[\w.]+", name) for name in layers):
        conversion.put("model.lora.target", layers, target)
    elif layers:
        reason = "artel supports only names of layers and uses all linear layers except the head"
        conversion.report(target, f"{reason}; write model.lora.target")
    else:
        reason = "peft chooses a few layers for each model type, artel uses all linear layers except the head"
        conversion.note(f"{target} is not given: {reason}; write model.lora.target")


def resolve_conflicts(conversion: Conversion) -> None:
    """Change, and report, combinations that the other tool allows but artel does not."""
    is_split = _is_split(conversion)
    is_sharded = conversion.output_value("parallel.data") in ("zero1", "zero2", "fsdp", "hsdp")
    optimizer = conversion.output_value("train.optimizer") or "adamw"
    kind = conversion.output_value("model.quantize")
    if not OPTIMIZERS[optimizer].supports_sharding and (is_split or is_sharded):
        conversion.change("train.optimizer", "adamw", f"{optimizer} cannot update sharded matrices: artel uses adamw")
    elif not OPTIMIZERS[optimizer].supports_flat_shards and conversion.output_value("parallel.deepspeed") is not None:
        conversion.change("train.optimizer", "adamw", f"{optimizer} does not work with DeepSpeed: artel uses adamw")
    if kind in ("int8", "nf4") and (conversion.output_value("parallel.tensor") or 1) > 1:
        conversion.change("parallel.tensor", 1, "quantized matrices cannot be split: parallel.tensor is 1")
        is_split = _is_split(conversion)
    if kind == "int8" and conversion.output_value("model.lora.dora") and is_split:
        conversion.change("model.quantize", "nf4", "DoRA cannot use sharded int8 weights: artel uses nf4")
    elif kind == "int8" and conversion.output_value("model.lora.dora") and is_sharded:
        reason = "DoRA cannot use sharded int8 weights: parallel.data is auto; write model.quantize: nf4 to shard them"
        conversion.change("parallel.data", "auto", reason)
    if conversion.output_value("train.weights") == "bf16" and not OPTIMIZERS[optimizer].stochastic_rounding:
        conversion.change("train.weights", "fp32", "only adamw supports bf16 weights: train.weights is fp32")


def _is_split(conversion: Conversion) -> bool:
    """True if the run file splits the model or its sequences over several processes."""
    axes = ("tensor", "context", "expert", "pipeline")
    return any((conversion.output_value(f"parallel.{axis}") or 1) > 1 for axis in axes)
