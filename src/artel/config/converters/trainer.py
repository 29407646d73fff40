"""Keys that tools built on transformers share: TrainingArguments, FSDP, peft's adapters, optimizers."""

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
MAIN_BRANCH = "artel reads the main branch; download that revision (hf download --revision) and give its folder"
STARTED = "start processes with artel train --nproc, --nnodes and --node-rank, or with torchrun"
SAMPLES_STAND_ALONE = (
    "objective {} does not pack samples, and train.batch counts samples, not packed sequences: multiply it by the "
    "number of samples that fit into {}"
)
UNUSED = "in artel every trained parameter takes part in each step"
_NO_REENTRANCE = "artel uses non-reentrant checkpointing; write train.activation_checkpointing"
_RECOMPUTES = ("train.activation_checkpointing", read.switch("full", "none"))
_FLOOR = "write train.minimum_learning_rate, a fraction of learning_rate, or train.decay for the schedule wsd"

# fmt: off
TABLE = KeyTable(
    carried={
        "seed": ("seed", read.from_zero),
        "learning_rate": ("train.learning_rate", read.above_zero),
        "weight_decay": ("train.weight_decay", read.not_negative),
        "adam_epsilon": ("train.epsilon", read.above_zero),
        "gradient_checkpointing": _RECOMPUTES,
        "activation_checkpointing": _RECOMPUTES,
        "torch_compile": ("train.compile", read.switch("on", "off")),
        "save_total_limit": ("checkpoint.keep", read.at_least_one),
    },
    same={
        "overwrite_cache": "texts are prepared again when they or their keys change",
        "streaming": "texts are prepared once, and training reads tokens from the store",
        "use_fast_tokenizer use_slow_tokenizer": "artel always uses the fast tokenizer",
        "low_cpu_mem_usage": "weights are loaded directly to where they stay",
        "attn_implementation flash_attn": "artel chooses the attention kernel by device and model",
        "token use_auth_token hf_use_auth_token hf_hub_token": "artel uses the token of hf auth login",
        "do_train": "artel train trains",
        "do_eval": "artel train validates as set by validate.every",
        "eval_accumulation_steps prediction_loss_only": "validation keeps only sums",
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
    left={
        "torch_compile_backend torch_compile_mode": "train.compile is on, off or auto",
        "run_name": "the run is named after its folder",
        "cache_dir": "HF_HOME sets where models and data sets of the hub are cached",
        "local_rank accelerator_config* ddp_*": STARTED,
        "ddp_find_unused_parameters": UNUSED,
        "ddp_timeout": "text is prepared before processes connect; train.hang_timeout ends hanging processes",
        "hub_model_id push_to_hub": "artel train does not upload; artel push RUN NAME does",
        "class": "artel has one training loop",
        "min_lr": "write train.minimum_learning_rate, a fraction of learning_rate",
        "lr_scheduler_kwargs": _FLOOR,
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs": _NO_REENTRANCE,
        "logging_dir": "metrics go to metrics.jsonl in the run's folder",
        "logging_steps logging_strategy": "write log.every, a number of steps",
        "logging_first_step": "write log.every: 1 for a line each step",
        "early_stopping_patience": "write validate.patience, with validate.every",
        "per_device_eval_batch_size": "validation uses the micro-batch of training; write train.micro_batch",
        "metric_for_best_model": "the best checkpoint has the lowest loss; for another metric write checkpoint.best",
        "greater_is_better": "artel knows for each metric whether higher is better",
        "load_best_model_at_end": "RUN/model is the last model, RUN/checkpoints/best the best; RUN/model is the "
            "best only if validate.patience ended the run",
        "remove_unused_columns": "data.sources names the fields to read",
        "use_cpu no_cuda": "set CUDA_VISIBLE_DEVICES= to run on the CPU",
        "auto_find_batch_size": "train.micro_batch: auto finds the largest that fits",
        "resume_from_checkpoint": "the same command resumes a stopped run",
        "overwrite_output_dir": "artel train --restart starts over",
        "save_only_model": "checkpoints always contain everything needed to resume",
        "label_smoothing_factor": "artel has no label smoothing for language models",
        "neftune_noise_alpha noisy_embedding_alpha": "artel has no noise on embeddings",
        "group_by_length curriculum_sampling": "the order of samples depends on the seed only, never on lengths",
        "dataloader_drop_last": "artel drops no samples",
        "tf32": "train.precision sets the precision: bf16, fp32",
        "full_determinism": "seed fixes order and initial weights; artel does not force deterministic kernels",
        "use_liger_kernel": "artel chooses kernels itself; train.compile fuses layers",
        "do_predict": "run artel evaluate RUN after training",
        "eval_on_start": "the first validation is after validate.every",
        "trust_remote_code":
            "artel does not run code that comes with a model; to allow it write model.trust_remote_code: NAME-OF-MODEL",
        "debug": "see the debugging options in artel train --help",
        "deepspeed deepspeed.*":
            "is a DeepSpeed configuration inside the file; save it as JSON and write parallel.deepspeed: FILE",
        "fsdp_config": "is not a section; write parallel: {data: fsdp}",
        "fsdp_config.*mixed_precision_policy": "train.precision sets the dtype of computation",
        "fsdp_config.*": "FSDP2 has no such option in artel",
    },
)
# fmt: on
_DECIDED = (
    "per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_grad_norm adam_beta1 adam_beta2 "
    "optim optim_args optim_target_modules lr_scheduler_type warmup_steps warmup_ratio eval_strategy "
    "evaluation_strategy eval_steps save_strategy save_steps report_to data_seed fsdp"
)
NAMES = {*TABLE.names(), *_DECIDED.split()}
"""The arguments that are known, spelled out."""


def carry_arguments(old: Conversion, processes: int | None = None) -> None:
    """Carry over what keys of the Trainer decide together. `processes`: how many the configuration starts, if it says.

    The caller carries over bf16 and fp16, whose rank beside other keys differs from tool to tool.
    """
    _carry_batch(old, processes)
    _carry_length(old)
    _carry_optimizer(old)
    _carry_schedule(old)
    _carry_intervals(old)
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        if old.raw(f"{key}_kwargs") in ({}, {"use_reentrant": False}):
            old.agree(f"{key}_kwargs", "artel uses non-reentrant checkpointing")
    if old.raw("metric_for_best_model") in ("loss", "eval_loss"):
        old.put("checkpoint.best", "loss", "metric_for_best_model")
    trackers = old.get("report_to", read.names) or []
    known = [name for name in trackers if name in TRACKERS]
    if known:
        old.put("track", ["console", "jsonl", *known], "report_to")
    if set(trackers) - {*known, "none"}:
        old.leave("report_to", TRACKER_ADVICE)
    old.agree("report_to", "metrics go to the console and metrics.jsonl")
    if old.raw("logging_strategy") == "steps":
        old.agree("logging_strategy", "log.every is a number of steps")
    old.leave("data_seed", "seed fixes the order too")
    if isinstance(old.raw("deepspeed"), str):
        old.carry("deepspeed", "parallel.deepspeed", read.text)
    _carry_fsdp(old)


def _carry_batch(old: Conversion, processes: int | None) -> None:
    key, accumulated = "per_device_train_batch_size", "gradient_accumulation_steps"
    micro, parts = old.get(key, read.at_least_one), old.get(accumulated, read.at_least_one)
    if micro and parts:
        old.put("train.batch", micro * parts * (processes or 1), key, accumulated)
        old.put("train.micro_batch", micro, key)
        if processes is None:
            fix = "the batch of one process; multiply it by your number of processes"
            old.leave(key, f"train.batch is {micro * parts}, this times {accumulated}: {fix}")
    if old.get("per_device_eval_batch_size", read.at_least_one) == micro:
        old.agree("per_device_eval_batch_size", "validation uses the micro-batch of training")


def _carry_length(old: Conversion) -> None:
    """`max_steps`, if above zero, takes precedence over `num_train_epochs`."""
    steps, epochs = old.get("max_steps", read_count), old.get("num_train_epochs", read.above_zero)
    if steps is not None and steps > 0:
        old.put("train.steps", steps, "max_steps")
        old.leave("num_train_epochs", f"max_steps is set: the run ends after {steps} steps")
    elif epochs is not None:
        old.put("train.epochs", epochs, "num_train_epochs")


def optimizer_of(name: str) -> tuple[str, str]:
    """(artel's optimizer, how it differs) for another tool's name. adamw, with advice, if there is none like it."""
    for optimizer in OPTIMIZERS.names:
        for pattern, difference in (*OPTIMIZERS[optimizer].other_names, (re.escape(optimizer), "")):
            if re.fullmatch(pattern, name):
                return optimizer, difference
    missing = f"artel has no such optimizer and uses adamw; write train.optimizer: {', '.join(OPTIMIZERS.names)}"
    return "adamw", missing


def _carry_optimizer(old: Conversion) -> None:
    name = old.get("optim", read.text)
    optimizer, difference = optimizer_of(name or "adamw")
    betas = [old.get(f"adam_beta{number}", read.share) for number in (1, 2)]
    if None not in betas:
        own = f"train.{optimizer}.betas"
        old.put(own if is_key(own) else "train.betas", betas, "adam_beta1", "adam_beta2")
    clip = old.get("max_grad_norm", read.not_negative)
    if clip is not None:
        old.put("train.clip", clip or None, "max_grad_norm")  # 0 is for no clipping
    if name is None:
        return
    old.put("train.optimizer", optimizer, "optim")
    if optimizer == "muon":
        old.carry("learning_rate", "train.muon_learning_rate", read.above_zero)
    if difference:
        old.leave("optim", difference)
    for key in ("optim_args", "optim_target_modules"):
        old.leave(key, f"the optimizer {optimizer} has train.betas, epsilon, momentum and weight_decay")


# Transformers' schedules that have another name here, and the nearest of artel's for those that it lacks.
_SCHEDULES = {
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "warmup_stable_decay": "wsd",
}
_NEAREST_SCHEDULES = {
    **dict.fromkeys(("cosine_warmup_with_min_lr", "rex", "one_cycle"), "cosine"),
    "polynomial": "linear",
    **dict.fromkeys(("reduce_lr_on_plateau", "greedy"), "constant"),
}


def _carry_schedule(old: Conversion) -> None:
    names = {name: name for name in (*SCHEDULES.names, *_SCHEDULES, *_NEAREST_SCHEDULES)}
    written = old.get("lr_scheduler_type", read.one_of(names))
    _carry_floor(old, written)
    # Below 1, warmup_steps is a share of the run, as transformers 5 takes it.
    steps, share = old.get("warmup_steps", read.not_negative), old.get("warmup_ratio", read.share)
    if written is None:
        return
    options, kind = old.raw("lr_scheduler_kwargs"), SCHEDULES.settings_of(written)
    if kind is not None and isinstance(options, dict) and options.keys() <= kind.model_fields.keys():
        old.put(f"train.{written}", dict(options), "lr_scheduler_kwargs")
    is_known = written in SCHEDULES or written in _SCHEDULES
    schedule = _SCHEDULES.get(written, written) if is_known else _NEAREST_SCHEDULES[written]
    old.put("train.schedule", schedule, "lr_scheduler_type")
    if not is_known:
        fix = f"{schedule} is used; write train.schedule: {', '.join(SCHEDULES.names)}"
        old.leave("lr_scheduler_type", f"artel has no such schedule; {fix}")
    if written == "constant":  # transformers warms up only for constant_with_warmup
        old.put("train.warmup", 0)
        for key in ("warmup_steps", "warmup_ratio"):
            old.leave_if_on(key, "the schedule constant has no warmup; write train.warmup")
        return
    decisive = "warmup_ratio" if share and not steps else "warmup_steps"
    old.put("train.warmup", steps or share or 0, decisive)
    other = "warmup_steps" if decisive == "warmup_ratio" else "warmup_ratio"
    old.leave_if_on(other, f"{decisive} is set and takes precedence")


def _carry_floor(old: Conversion, schedule: str | None) -> None:
    """The minimum learning rate, the only one of lr_scheduler_kwargs that a run file has."""
    key = "lr_scheduler_kwargs"
    options, floors = old.raw(key), {"min_lr_rate": 1, "min_lr": old.get("learning_rate", read.above_zero)}
    if schedule == "cosine_with_min_lr" and isinstance(options, dict) and len(options) == 1:
        ((name, floor),) = options.items()
        if floors.get(name):
            old.replace(key, floor)
            old.carry(key, "train.minimum_learning_rate", lambda rate: read.not_negative(rate) / floors[name])


def _carry_intervals(old: Conversion) -> None:
    """When the run validates, saves and logs."""
    logged = old.get("logging_steps", read.not_negative)
    if logged is not None and logged >= 1:
        old.put("log.every", round(logged), "logging_steps")
    evaluated = "eval_strategy"
    if not old.has(evaluated) and old.has("evaluation_strategy"):  # its name before transformers 4.46
        evaluated = "evaluation_strategy"
    _carry_interval(old, evaluated, "eval_steps", "validate.every", logged or 500)
    if old.has("save_strategy") or old.has("save_steps"):  # else artel's own interval is as good
        _carry_interval(old, "save_strategy", "save_steps", "checkpoint.every", 500)


def _carry_interval(old: Conversion, strategy_key: str, steps_key: str, dotted: str, default: float) -> None:
    """A strategy (no, steps, epoch) and its number of steps, or share of the run if below 1, as an interval."""
    strategy = old.get(strategy_key, _strategy) or "steps"
    steps = old.get(steps_key, read.above_zero) or default
    if strategy == "steps" and steps >= 1:
        old.put(dotted, round(steps), strategy_key, steps_key)
    elif strategy == "steps":
        old.leave(steps_key, f"a fraction of the run; write {dotted}: 0.5 epoch, or a number of steps")
        old.leave(strategy_key, f"uses {steps_key}, a fraction of the run; write {dotted}")
    else:
        old.put(dotted, "never" if strategy == "no" else "1 epoch", strategy_key)
        old.leave(steps_key, f"{old.own_name(strategy_key)} is {strategy}; write {dotted}: STEPS")
        if strategy == "best":
            old.leave(strategy_key, f"the best checkpoint is always kept; {dotted} is 1 epoch")


def _strategy(value: object) -> Any:
    return read.one_of("no steps epoch best")("no" if value is False else value)  # YAML reads `no` as false


# FSDP: its strategies by name and number, and artel's modes of data parallelism.
_SHARDING = {
    "FULL_SHARD": "fsdp",
    "SHARD_GRAD_OP": "zero2",
    "NO_SHARD": "ddp",
    "HYBRID_SHARD": "hsdp",
    "HYBRID_SHARD_ZERO2": "hsdp",
}
_NUMBERED_SHARDING = {str(number): name for number, name in enumerate(_SHARDING, 1)}


def _carry_fsdp(old: Conversion) -> None:
    """`fsdp` (full_shard auto_wrap offload) and `fsdp_config`, whose keys may begin with fsdp_."""
    value = old.raw("fsdp")
    words = value if isinstance(value, list) else re.split(r"[\s,]+", value) if isinstance(value, str) else []
    options = ["FULL_SHARD"] if value is True else [str(word).upper() for word in words if word]
    within = (key for key in old.within("fsdp_config") if key.count(".") == 1)
    config = {key.partition(".")[2].removeprefix("fsdp_"): key for key in within}
    values = {name: old.raw(key) for name, key in config.items()}
    resharded, written = values.get("reshard_after_forward"), str(values.get("sharding_strategy") or "").upper()
    strategy = _SHARDING.get(_NUMBERED_SHARDING.get(written, written), "")
    if not strategy and resharded is not False:
        strategy = next((_SHARDING[option] for option in options if option in _SHARDING), "fsdp")
    is_sharded = bool(options or (values and old.has("fsdp_version")) or "version" in values)
    deciding = [config[name] for name in ("sharding_strategy", "reshard_after_forward") if name in config]
    if is_sharded:
        old.put("parallel.data", strategy or "zero2", "fsdp", *deciding)
    for key in deciding if not is_sharded else ():
        old.leave(key, "fsdp is not given; write parallel.data: fsdp, zero2 or hsdp")
    if values.get("sharding_strategy") is not None and _NUMBERED_SHARDING.get(written, written) not in _SHARDING:
        old.leave(config["sharding_strategy"], f"artel knows {', '.join(_SHARDING)}; write parallel.data")
    elif values.get("sharding_strategy") is not None and "reshard_after_forward" in config:
        old.leave(config["reshard_after_forward"], "sharding_strategy is set and takes precedence")
    unknown = [option.lower() for option in options if option not in {*_SHARDING, "AUTO_WRAP", "OFFLOAD"}]
    if unknown:
        old.leave("fsdp", f"artel has no equivalent of {', '.join(unknown)}")
    if "OFFLOAD" in options or values.get("offload_params") is True:
        old.put("parallel.offload", "cpu", "fsdp", *(config[name] for name in ("offload_params",) if name in config))
    if "activation_checkpointing" in config:
        key = config["activation_checkpointing"]
        recomputes = old.get(key, read.flag)
        old.put("train.activation_checkpointing", "full" if recomputes else "none", key)
        if old.raw("gradient_checkpointing") not in (None, recomputes):
            old.leave("gradient_checkpointing", f"{key} decides: {'full' if recomputes else 'none'}")


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
            problems.append(Problem(f"{place}: ddp.{name}", f"does not belong in a run file: {STARTED}", "take it out"))
        elif value is not False:
            problems.append(Problem(f"{place}: ddp.{name}", UNUSED, "write false, or take it out"))
    if problems:
        raise InputError(problems)


def carry_share(old: Conversion, key: str) -> None:
    """Carry over the share of the texts that is held out for validation."""
    share = old.get(key, read.not_negative) or 0
    old.put("data.validation", share if share < 1 else 0.05, key)
    if share >= 1:
        old.leave(key, "is a number of rows, but data.validation is a fraction: artel uses 0.05")


def carry_precision(old: Conversion, keys: dict[str, str]) -> str:
    """Carry over the first of `keys` (key → precision) that is true; report the others. Return the precision or ''."""
    chosen = ""
    for key, precision in keys.items():
        if old.get(key, read.flag) and chosen not in ("", precision):
            old.leave(key, f"train.precision is {chosen}")
        elif old.raw(key) is True:
            chosen = precision
            old.put("train.precision", precision, key)
    return chosen


def carry_lora(old: Conversion, keys: str) -> None:
    """Carry over peft's LoraConfig.

    `keys`: the tool's names of r, lora_alpha, lora_dropout, use_rslora, use_dora, modules_to_save and target_modules.
    """
    rank, alpha, dropout, rslora, dora, saved, target = keys.split()
    old.carry(rank, "model.lora.rank", read.at_least_one)
    old.carry(alpha, "model.lora.alpha", read.above_zero)
    old.carry(dropout, "model.lora.dropout", read.share)
    old.carry(rslora, "model.lora.rslora", read.flag)
    old.carry(dora, "model.lora.dora", read.flag)
    old.carry(saved, "model.lora.save", read.names)
    layers = old.get(target, read.names)
    if layers in (["all-linear"], ["all"], ["all_linear"]):
        old.put("model.lora.target", ["auto"], target)
    elif layers and all(re.fullmatch(r"[\w.]+", name) for name in layers):
        old.put("model.lora.target", layers, target)
    elif layers:
        what = "artel supports only names of layers, and uses all linear layers except the head"
        old.leave(target, f"{what}; write model.lora.target")
    else:
        what = "peft chooses a few layers for each model type, artel uses all linear layers except the head"
        old.note(f"{target} is not given: {what}; write model.lora.target")


def fit_together(old: Conversion) -> None:
    """Change, and report, what the other tool combines and a run file may not."""
    is_split = any((old.written(f"parallel.{axis}") or 1) > 1 for axis in ("tensor", "context", "expert", "pipeline"))
    is_sharded = old.written("parallel.data") in ("zero1", "zero2", "fsdp", "hsdp")
    optimizer, kind = old.written("train.optimizer") or "adamw", old.written("model.quantize")
    if not OPTIMIZERS[optimizer].steps_shards and (is_split or is_sharded):
        old.change("train.optimizer", "adamw", f"{optimizer} cannot update sharded matrices: artel uses adamw")
    elif not OPTIMIZERS[optimizer].steps_flat_shards and old.written("parallel.deepspeed") is not None:
        old.change("train.optimizer", "adamw", f"{optimizer} does not work with DeepSpeed: artel uses adamw")
    if kind in ("int8", "nf4") and (old.written("parallel.tensor") or 1) > 1:
        old.change("parallel.tensor", 1, "quantized matrices cannot be split: parallel.tensor is 1")
        is_split = any((old.written(f"parallel.{axis}") or 1) > 1 for axis in ("context", "expert", "pipeline"))
    if kind == "int8" and old.written("model.lora.dora") and is_split:
        old.change("model.quantize", "nf4", "DoRA cannot use sharded int8 weights: artel uses nf4")
    elif kind == "int8" and old.written("model.lora.dora") and is_sharded:
        reason = "DoRA cannot use sharded int8 weights: parallel.data is auto; write model.quantize: nf4 to shard them"
        old.change("parallel.data", "auto", reason)
    if old.written("train.weights") == "bf16" and not OPTIMIZERS[optimizer].rounds_to_bf16:
        old.change("train.weights", "fp32", "only adamw supports bf16 weights: train.weights is fp32")
