"""Convert the YAML of axolotl (axolotl-ai-cloud/axolotl)."""

from __future__ import annotations

import re

from artel.config.converters import grpo, trainer
from artel.config.converters import readers as read
from artel.config.converters.axolotl_data import SAMPLE_ORDER_NOTE, convert_data, is_text
from artel.config.converters.conversion import Conversion, ConvertedConfig, KeyTable
from artel.config.converters.tools import Tool
from artel.config.converters.yaml_text import top_level_keys
from artel.errors import Problem
from artel.registry import OBJECTIVES

# TrainingArguments by axolotl's names.
_NAMES = {
    "micro_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "optimizer": "optim",
}
_LORA_KEYS = "lora_r lora_alpha lora_dropout peft_use_rslora peft_use_dora lora_modules_to_save"
_MODEL_FILES_NOTE = "set by the files of the model and tokenizer"
_SPECIAL_TOKENS_NOTE = "ignored: the tokenizer's own files define the special tokens; change them there"
_KERNEL_NOTE = "artel chooses kernels by device and model; the results are the same"
_DEVICE_LOADING_NOTE = "weights are loaded straight onto their target device"
_SPEED_ONLY_NOTE = "affects only the speed"
_LOSS_NOTE = "the loss is the mean cross-entropy of the target tokens"
_QUANTIZATION_ADVICE = (
    "not supported: artel quantizes only base weights under an adapter; write model.quantize: nf4 or int8"
)
_NO_RL_NOTE = "applies only with rl: grpo; remove it"
_MEMORY_ADVICE = "not needed: train.micro_batch: auto and train.activation_checkpointing: auto fit a run into memory"
_TEMPLATE_ADVICE = "ignored: the chat template formats conversations; to change it write chat.template"
_TASKS_ADVICE = "write validate.tasks: [mmlu], with tasks of lm-evaluation-harness"
_LEARNING_RATE_ADVICE = "not supported: artel has one learning rate; train.layer_decay lowers it layer by layer"
_RAY_ADVICE = "processes start with artel launch; for preparing texts with Ray write prepare.engine: ray"
_PREPARE_WORKERS = ("prepare.workers", read.positive_int)
_CONTEXT_PARALLEL = ("parallel.context", read.positive_int)

# fmt: off
TABLE = KeyTable(
    defaults={
        "sequence_len": 512, "val_set_size": 0, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
        "num_train_epochs": 1, "optim": "adamw_torch_fused", "lr_scheduler_type": "cosine", "weight_decay": 0,
        "adam_beta1": 0.9, "adam_beta2": 0.999, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0,
        "save_total_limit": 4, "eval_strategy": "no", "dataset_exact_deduplication": False,
    },
    converted={
        "output_dir": ("run", read.text),
        "base_model": ("model.from", read.text),
        "sequence_len": ("data.block", read.positive_int),
        "dataset_prepared_path": ("data.store", read.text),
        "dataset_exact_deduplication": ("data.dedup.exact", read.flag),
        "dataset_processes": _PREPARE_WORKERS,
        "dataset_num_proc": _PREPARE_WORKERS,
        "early_stopping_patience": ("validate.patience", read.positive_int),
        "tensor_parallel_size": ("parallel.tensor", read.positive_int),
        "context_parallel_size": _CONTEXT_PARALLEL,
        "sequence_parallel_degree": _CONTEXT_PARALLEL,
        "expert_parallel_size": ("parallel.expert", read.positive_int),
    },
    implied={
        "shuffle_merged_datasets shuffle_before_merging_datasets": SAMPLE_ORDER_NOTE,
        "sample_packing": "samples are not packed",
        "eval_sample_packing pad_to_sequence_len pad_to_multiple_of streaming sample_packing_* multipack_real_batches":
            _SPEED_ONLY_NOTE,
        "train_on_inputs": "applies to conversations",
        "chat_template datasets.*.chat_template": "does not apply to plain text (objective: causal)",
        "bfloat16 float16 float32 fp8": "train.precision sets the precision",
        "use_tensorboard use_mlflow use_trackio use_wandb": "no effect: it is off",
        "dp_shard_size dp_replicate_size": "no effect: it is 1",
        "lm_eval_post_train": "validate.tasks run at the end",
        "lora_target_linear": "lora_target_modules names the layers",
        "datasets.*.roles.*": "artel knows these roles",
        "*.ds_type": "the suffix of a file sets its format",
        "*.template_thinking_key": "the chat template receives the reasoning",
        "*.preprocess_shards": "prepare.part prepares a part of a data set",
        "datasets.*.trust_remote_code": "artel runs no code of data sets",
        "*.split_thinking": "artel recognizes <think>",
        "*.split": "artel uses all records",
        "*.type": "the texts are used as they are",
        "*.message_field_training *.field_thinking": "artel reads this field by default",
        "strict": "artel checks every key",
        "model_type type_of_model cls_model_config tokenizer_type tokenizer_use_fast tokenizer_legacy "
        "tokenizer_save_jinja_files is_*_derived_model lora_fan_in_fan_out": _MODEL_FILES_NOTE,
        "base_model_config tokenizer_config": "artel uses the model's own config.json and tokenizer",
        "torch_dtype": "train.weights sets the dtype of weights",
        "eot_tokens": "the chat template ends each turn",
        "skip_prepare_dataset": "prepared texts are reused if nothing changed",
        "dataset_keep_in_memory": "tokens are read from the store on demand",
        "base_model_ignore_patterns": "artel reads only safetensors",
        "ddp device_map device world_size": "artel finds processes and devices",
        "include_tkps include_tokens_per_second": "metrics.jsonl has tokens_per_second",
        "pretrain_multipack_buffer_size streaming_multipack_buffer_size": "all texts are packed together",
        "pretrain_multipack_attn": "packed documents cannot attend to one another",
        "total_num_tokens": "tokens are counted when texts are prepared",
        "auto_resume_from_checkpoints": "not needed: the same command resumes a stopped run",
        "gc_steps": "artel runs Python's garbage collector between steps",
        "ring_attn_func* heads_k_stride*": "parallel.exchange sets how processes exchange parts of a sequence",
        "attn_implementation* *_attention flash_* flex_attn_* sdpa_varlen* large_head_attention* "
        "gemma4_hybrid_attn_impl*": "artel chooses the attention kernel by device and model",
        "experts_implementation liger_* use_kernels* fused_* tiled_mlp* chunked_cross_entropy* cut_cross_entropy* "
        "use_scattermoe* use_sonicmoe* use_dsv4_kernels* use_glm_dsa_kernels* dsv4_fp4_grouped_mode* "
        "*_kernel": _KERNEL_NOTE,
    },
    unsupported={
        "adapter": "not supported: LoRA is the only adapter type; write adapter: lora",
        "load_in_4bit load_in_8bit": "4 and 8 bits need an adapter; write adapter: qlora",
        "lora_model_dir":
            "to continue training it, merge it (artel export FOLDER merged --merge) and write model.from: merged",
        "revision_of_model":
            "artel reads the main branch; download another (hf download --revision) and give its folder",
        "reinit_weights":
            "training starts from pretrained weights; for new ones write model: {config: {model_type: …}}",
        "processor_type image_size image_resize_algorithm":
            "ignored: artel trains on text only and does not read images or audio",
        "freeze_mm_modules": "write model.freeze with patterns of the frozen layers: ['*vision*']",
        "unfrozen_parameters": "not converted: list the frozen layers in model.freeze instead",
        "tokens tokens.* special_tokens* added_tokens_overrides*": _SPECIAL_TOKENS_NOTE,
        "resize_token_embeddings_to_32x": "not needed: artel sizes embeddings for tokenizer and model",
        "tokenizer_use_mistral_common": "ignored: artel loads tokenizers with transformers",
        "default_system_message": "add it to the conversations, or to a template: chat.template: FILE",
        "*chat_template_jinja": "save it as a file and write chat.template: FILE",
        "max_prompt_len": "not supported: data.block limits prompt and answer together",
        "excess_length_strategy": "chat.too_long is skip; write split or truncate_left",
        "sample_packing_sequentially": "ignored: the order of samples depends on the seed only",
        "min_sample_len": "write data.clean.minimum, a number of characters",
        "eval_sequence_len": "ignored: validation uses the length of training: data.block",
        "max_packed_sequence_len": "ignored: data.block is the length of a packed sequence",
        "push_dataset_to_hub": "ignored: prepared data stays in data.store",
        "val_set_size": "ignored: test_datasets is set and used for validation",
        "datasets.*.type.*format": _TEMPLATE_ADVICE,
        "*.message_property_mappings.* *.type.*": "ignored: the chat template receives role and content",
        "*.train_on_eos *.train_on_eot":
            "ignored: the end of each trained turn is always trained, as with train_on_eos: turn",
        "*.revision": "ignored: the hub's parquet files are of the main branch",
        "*.shards *.shards_idx": "write data.sources.rows: '[:10%]' for a part",
        "*.drop_system_message": "not supported: artel keeps system messages; remove them from the file",
        "*.conversation": "not needed: artel knows roles by their names",
        "*.field_human": "write data.sources.mapping: {instruction: NAME}",
        "*.field_model": "write data.sources.mapping: {output: NAME}",
        "*.message_field_training_detail": "not supported: artel trains on a full turn or not at all: its field train",
        "*.input_format": _TEMPLATE_ADVICE,
        "*.input_transform": "write converter: module:function",
        "datasets.* pretraining_dataset.*":
            "artel has no equivalent; write converter: module:function for what rows need",
        "orpo_alpha": "applies only with rl: orpo; remove it",
        "rl_beta": "applies only with rl: dpo, ipo, kto, orpo or simpo; remove it",
        "cpo_alpha": "not supported: artel does not have CPO; it has dpo, ipo, kto, orpo and simpo",
        "rpo_alpha dpo_use_weighting": "not supported: artel's preference losses do not have this term",
        "dpo_*": "not supported: artel's preference loss has beta and smoothing",
        "precompute_ref_log_probs": "not needed: artel computes them once, before training",
        "use_eaft eaft_* use_dynamic_finetuning": _LOSS_NOTE,
        "center_rewards_coefficient": "applies only to reward models; remove it",
        "num_labels": "ignored: a language model has no labels",
        "use_onebitllms": "not supported: artel trains 32-bit or 16-bit weights",
        "gptq gptq_* nvfp4_* quantize_moe_experts": _QUANTIZATION_ADVICE,
        "model_quantization_config*": "ignored: the model's own files define its quantization",
        "bnb_config_kwargs*": "ignored: artel's 4 bits are nf4 with double quantization",
        "qat.* quantization.*":
            "artel has no quantization-aware training; artel export RUN DIR --gguf q4_k_m quantizes a trained model",
        "llmcompressor*": "not supported: artel does not prune",
        "overrides_of_model* model_config.*": "edit the model's config.json and give its folder as model.from",
        "peft*": "not supported: artel's adapters have rank, alpha, dropout, target, rslora, dora and save",
        "lora_target_parameters": "for experts stored in one tensor write model.lora.target: [auto, experts]",
        "loraplus_lr_ratio": "not supported: both matrices of an adapter use the same learning rate",
        "relora relora_*": "not supported: artel does not merge adapters during a run",
        "plugins": "ignored: artel does not run axolotl's plugins",
        "trainer_cls": "ignored: artel has only one training loop; remove it",
        "full_finetune": "not needed: without adapter, all weights are trained",
        "lisa_*": "not supported: every step trains all weights, except those in model.freeze",
        "lr_quadratic_warmup": "not supported: warmup is linear",
        "cosine_min_lr_ratio": "only applies to lr_scheduler: cosine; write train.minimum_learning_rate",
        "cosine_constant_lr_ratio": "for a constant rate at first write train.schedule: wsd and train.decay",
        "lr_div_factor": "ignored: warmup starts at 1 / train.warmup of the peak",
        "jagged_*": "ReLoRA's restarts are not supported; train.schedule: cosine_with_restarts has plain ones",
        "eta_min": "write train.minimum_learning_rate, a fraction of learning_rate",
        "embedding_lr embedding_lr_scale lr_groups": _LEARNING_RATE_ADVICE,
        "loss_watchdog_threshold loss_watchdog_patience":
            "write train.spike (limit on loss / mean loss) and train.on_bad_step",
        "dion_* qgalore_*": "not supported: it belongs to an optimizer that artel does not have; remove it",
        "torchdistx_path": "not needed: artel uses PyTorch's optimizer",
        "batch_size": "ignored: gradient_accumulation_steps and micro_batch_size are set and take precedence",
        "save_first_step": "write checkpoint.every",
        "dynamic_checkpoint*": "not needed: Ctrl-C saves a checkpoint",
        "eval_table_size generate_samples eval_max_new_tokens generation_*":
            "write validate.prompts for samples, and validate.new_tokens",
        "lm_eval_tasks": "are not run after training; use artel evaluate RUN --tasks NAME",
        "lm_eval_batch_size": "artel evaluates 8 examples per batch",
        "lm_eval_model": "to evaluate a trained model use artel evaluate FOLDER --tasks NAME",
        "do_bench_eval bench_dataset": _TASKS_ADVICE,
        "bench_*": "validate.tasks_limit is the number of examples of each task of validate.tasks",
        "use_swanlab swanlab_* use_comet comet_* use_otel_metrics otel_*": trainer.TRACKER_ADVICE,
        "mlflow_tracking_uri mlflow_experiment_name":
            "set it in the environment: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME",
        "trackio_project_name trackio_space_id":
            "set it in the environment: TRACKIO_PROJECT, TRACKIO_SPACE_ID",
        "mlflow_* trackio_*": "ignored: the run is named after its folder",
        "wandb_watch": "ignored: artel logs only the gradient norm",
        "wandb_log_model": "ignored: artel does not upload the model",
        "gradio_*": "use artel chat RUN",
        "use_ray ray_* resources_per_worker*": _RAY_ADVICE,
        "profiler_steps": "write profile: true",
        "deepcompile torch_compile_options": "not supported: train.compile is on, off or auto, for each layer",
        "activation_offloading": "not supported: saved activations stay on the device",
        "layer_offloading": "to offload layers write parallel.offload: cpu",
        "selective_checkpointing": "write train.activation_checkpointing: selective",
        "max_memory gpu_memory_limit": _MEMORY_ADVICE,
        "lora_on_cpu experimental_skip_move_to_device": _DEVICE_LOADING_NOTE,
        "llama4_linearized_experts scaling_softmax*": "ignored: artel uses the model code of transformers",
        "use_pose* pose_*": "artel does not support PoSE",
        "fp8_enable_fsdp_float8_all_gather": "not needed: the all-gather of FSDP2 is set automatically",
        "fp32_norms": "not needed: trained weights are in fp32; train.precision sets the dtype of computation",
        "expert_parallel_*": "not supported: artel has no such options for experts",
        "diffusion*": "not supported: applies only to text diffusion models",
        "trl.* vllm* ebft*": _NO_RL_NOTE,
    },
)
_GRPO_TABLE = KeyTable(  # applies only with rl: grpo
    implied={
        "trl.vllm_* vllm vllm.*": "artel writes answers with its own engine",
        "trl.max_prompt_length": "max_prompt_len is set and takes precedence",
    },
    unsupported={"sequence_len": "data.block is the length of prompt and answer together"},
)
# fmt: on
_GRPO = re.compile(r"^rl:\s*[\"']?grpo\b", re.MULTILINE)
_OTHER_OBJECTIVES = {
    "reward_model": "a reward model, which is not converted: write objective: reward yourself",
    "process_reward_model": "a process reward model, which artel does not support",
    "diffusion": "a text diffusion model, which artel does not support",
}


def is_axolotl(text: str) -> bool:
    """True for axolotl's YAML, even if it is invalid."""
    keys = top_level_keys(text)
    tool_keys = {"datasets", "pretraining_dataset", "sequence_len", "adapter", "micro_batch_size", "rl", "num_epochs"}
    return "base_model" in keys and bool(keys & tool_keys) and "data" not in keys


def convert_axolotl(text: str, location: str) -> ConvertedConfig:
    """Convert axolotl's configuration. Raise InputError with all problems.

    Relative paths are relative to the working folder, as in axolotl.
    """
    is_grpo = _GRPO.search(text) is not None
    tables = (_GRPO_TABLE, grpo.build_table("trl."), TABLE, trainer.TABLE) if is_grpo else (TABLE, trainer.TABLE)
    conversion = Conversion.from_yaml(text, location, *tables, names=_NAMES)
    _rename_arguments(conversion)
    section, objective = _convert_objective(conversion)
    conversion.put("objective", objective)
    conversion.convert_table()
    if is_grpo:
        _convert_grpo(conversion)
    convert_data(conversion, section, objective)
    _convert_model(conversion)
    _convert_precision(conversion)
    _convert_trackers(conversion)
    trainer.convert_arguments(conversion, converts_batch=not is_grpo)
    if is_grpo:
        grpo.convert_rounds(conversion, "trl.")
    _convert_intervals(conversion)
    _convert_tasks(conversion)
    _convert_parallel(conversion)
    trainer.resolve_conflicts(conversion)
    return conversion.finish()


def _rename_arguments(conversion: Conversion) -> None:
    """Rewrite axolotl's keys as the TrainingArguments that `trainer` converts."""
    batch = conversion.get("batch_size", read.positive_int)  # of one process
    micro_batch = conversion.get("per_device_train_batch_size", read.positive_int)
    if batch and micro_batch and not conversion.has("gradient_accumulation_steps"):
        conversion.replace("gradient_accumulation_steps", max(1, batch // micro_batch))
        conversion.mark_converted("train.batch", "batch_size")
    checkpointing = conversion.raw_value("gradient_checkpointing")
    if isinstance(checkpointing, str):  # `offload` recomputes too, and moves kept activations to the host
        conversion.report("gradient_checkpointing", "activations are recomputed; the kept ones stay on the device")
        conversion.replace("gradient_checkpointing", True)
    for strategy, steps in (("eval_strategy", "eval_steps"), ("save_strategy", "save_steps")):
        if conversion.has(steps) and not conversion.has(strategy):
            conversion.replace(strategy, "steps")
    if not conversion.has("adam_epsilon"):
        conversion.convert("adam_eps", "train.epsilon", read.non_negative_number)
    if conversion.raw_value("lr_scheduler_type") in (None, "cosine"):
        conversion.convert("cosine_min_lr_ratio", "train.minimum_learning_rate", read.fraction_up_to_one)


def _convert_objective(conversion: Conversion) -> tuple[str, str]:
    """Return (section of the data sets, objective). Add a problem for objectives that artel does not support."""
    rl = conversion.get("rl", read.text)
    if rl in ("dpo", "ipo", "kto", "orpo", "simpo"):
        conversion.put("preference.loss", rl, "rl")
        if rl == "simpo":
            conversion.put("preference.beta", 0.1)  # the default of trl's CPOConfig, which axolotl uses
            # trl's loss has beta * (difference - gamma / beta), artel's beta * difference - margin: the same number.
            conversion.convert("simpo_gamma", "preference.margin", read.non_negative_number)
        betas = ["rl_beta", "dpo_beta", *(["orpo_alpha"] if rl == "orpo" else [])]
        for key in betas if not conversion.has("trl.beta") else ["trl.beta"]:
            conversion.convert(key, "preference.beta", read.non_negative_number)
        for key in betas if conversion.has("trl.beta") else ():
            conversion.report(key, "trl.beta is set and takes precedence in axolotl")
        conversion.convert("kto_desirable_weight", "preference.desirable", read.non_negative_number)
        conversion.convert("kto_undesirable_weight", "preference.undesirable", read.non_negative_number)
        conversion.convert("dpo_label_smoothing", "preference.smoothing", read.non_negative_number)
        return "datasets", "preference"
    if rl == "grpo":
        conversion.mark_converted("objective", "rl")
        return "datasets", "policy"
    if rl:
        conversion.add_problem("rl", f"{rl!r} is not supported by artel", "write dpo, ipo, kto, orpo, simpo or grpo")
    for key, model_description in _OTHER_OBJECTIVES.items():
        if conversion.raw_value(key) is True or conversion.keys_in(key):
            first_key = key if conversion.has(key) else conversion.keys_in(key)[0]
            conversion.add_problem(
                first_key, f"trains {model_description}", f"artel's objectives are {', '.join(OBJECTIVES.names)}"
            )
    if conversion.has("pretraining_dataset") or conversion.keys_in("pretraining_dataset"):
        for key in conversion.keys_in("datasets"):
            conversion.report(key, "pretraining_dataset is set and takes precedence in axolotl")
        return "pretraining_dataset", "causal"
    indices = range(conversion.list_length("datasets"))
    types = [conversion.raw_value(f"datasets.{index}.type") for index in indices]
    return "datasets", "causal" if types and all(map(is_text, types)) else "chat"


def _convert_grpo(conversion: Conversion) -> None:
    """Convert the section `trl` and the length of prompts."""
    grpo.convert_grpo(conversion, "trl.")
    prompt_key = "max_prompt_len" if conversion.has("max_prompt_len") else "trl.max_prompt_length"
    grpo.convert_block(conversion, prompt_key)
    conversion.report("sequence_len", "data.block is the length of prompt and answer together")
    grpo.convert_rewards(conversion, "trl.reward_funcs", "trl.reward_weights", {}, [])


def _convert_model(conversion: Conversion) -> None:
    """Convert the model, the tokenizer, the adapter (lora, qlora) and the quantization of base weights."""
    if not conversion.has("base_model"):
        conversion.problems.append(
            Problem(conversion.location, "has no base_model", "write base_model: FOLDER-OR-HUB-ID")
        )
    tokenizer = conversion.get("tokenizer_config", read.text)
    if tokenizer and tokenizer != conversion.raw_value("base_model"):
        conversion.put("tokenizer.from", tokenizer, "tokenizer_config")
    if conversion.raw_value("base_model_config") != conversion.raw_value("base_model"):
        conversion.report("base_model_config", "artel uses the model's own config.json")
    adapter = conversion.get("adapter", read.one_of("lora qlora"))
    load_in_4bit = conversion.get("load_in_4bit", read.flag)
    load_in_8bit = conversion.get("load_in_8bit", read.flag)
    if adapter is None:
        for key in filter(re.compile(r"(lora|peft|qlora)_|peft\.").match, conversion.source_keys()):
            conversion.mark_implied(key, "there is no adapter; all weights are trained")
        return
    target = "lora_target_modules"
    if conversion.get("lora_target_linear", read.flag):
        conversion.mark_implied(target, "lora_target_linear selects all linear layers")
        target = "lora_target_linear"
        conversion.replace(target, "all-linear")
    trainer.convert_lora(conversion, f"{_LORA_KEYS} {target}")
    conversion.mark_converted("model.lora", "adapter")
    uses_8bit = load_in_8bit and not load_in_4bit
    kind, deciding_key = ("int8", "load_in_8bit") if uses_8bit else ("nf4", "load_in_4bit")
    if load_in_4bit or load_in_8bit or adapter == "qlora":
        conversion.put(
            "model.quantize", kind, "adapter", *([deciding_key] if conversion.raw_value(deciding_key) else [])
        )
    for key in ("load_in_4bit", "load_in_8bit"):
        if key != deciding_key or not conversion.raw_value(key):
            conversion.report_if_on(key, f"{deciding_key} is also true and takes precedence")


def _convert_precision(conversion: Conversion) -> None:
    """Convert bf16 (auto, true, full), fp16, fp8 and their other names. fp8 and bf16 take precedence in axolotl."""
    keys = {"fp8": "fp8", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "float32": "fp32"}
    chosen = ""
    for key, precision in keys.items():
        value = conversion.raw_value(key)
        if value not in (None, False, True, "auto", "full"):
            conversion.add_problem(key, f"{value!r} is neither true, false, auto nor full", "write auto")
        elif value and chosen:
            conversion.report(key, f"train.precision is {chosen}")
        elif value:
            chosen = "auto" if value == "auto" else precision
            conversion.put("train.precision", chosen, key)
    if not chosen:
        conversion.put("train.precision", "fp32" if conversion.raw_value("bf16") is False else "auto", "bf16")
    elif chosen in ("bf16", "auto") and not conversion.has("adapter"):
        conversion.note("axolotl trains weights in bf16, artel in fp32; train.weights: bf16 halves their memory")


def _convert_intervals(conversion: Conversion) -> None:
    """Convert evals_per_epoch and saves_per_epoch, which replace a strategy, and axolotl's own defaults."""
    for key, target_key in (("evals_per_epoch", "validate.every"), ("saves_per_epoch", "checkpoint.every")):
        times = conversion.get(key, read.non_negative_int)
        if times is not None:
            conversion.put(target_key, f"{1 / times:.4g} epoch" if times else "never", key)
    has_interval = any(map(conversion.has, ("eval_strategy", "eval_steps", "evals_per_epoch")))
    if conversion.raw_value("val_set_size") and not has_interval:
        advice = (
            "axolotl would never validate, artel does once at the end; to validate more often, write validate.every"
        )
        conversion.note(f"val_set_size is given without evals_per_epoch or eval_steps: {advice}")
    has_warmup = conversion.has("warmup_steps") or conversion.has("warmup_ratio")
    if conversion.raw_value("lr_scheduler_type") != "constant" and not has_warmup:
        conversion.put("train.warmup", 0.03)
        conversion.note("warmup is not set: axolotl uses 3 % of the run, at most 100 steps; train.warmup is 0.03")
    if not any(map(conversion.has, ("save_strategy", "save_steps", "saves_per_epoch"))):
        conversion.put("checkpoint.every", "1 epoch")


def _convert_trackers(conversion: Conversion) -> None:
    """Convert trackers: Weights & Biases if a project is set, others if they are switched on."""
    switches = ("use_tensorboard", "use_mlflow", "use_trackio")
    tracked = {key: key.removeprefix("use_") for key in switches if conversion.raw_value(key) is True}
    use_wandb = conversion.raw_value("use_wandb")
    if use_wandb is True or (use_wandb is not False and conversion.has("wandb_project")):
        tracked["use_wandb" if conversion.has("use_wandb") else "wandb_project"] = "wandb"
    if tracked:
        conversion.put("track", ["console", "jsonl", *tracked.values()], *tracked)
    for key in ("wandb_project", "wandb_name", "wandb_run_id", "wandb_entity", "wandb_mode"):
        conversion.report(key, f"set it in the environment: {key.upper()}")


def _convert_tasks(conversion: Conversion) -> None:
    """Convert `lm_eval_tasks`, which run after training. Report `do_causal_lm_eval`, which scores generated text."""
    tasks = conversion.get("lm_eval_tasks", read.names)
    if tasks and conversion.raw_value("lm_eval_post_train") is not False:
        conversion.put("validate.tasks", list(dict.fromkeys(task.partition(":")[0] for task in tasks)), "lm_eval_tasks")
        conversion.put("validate.tasks_every", "never", "lm_eval_tasks")
        if any(":" in task for task in tasks):
            advice = "for another number write your own task file with num_fewshot"
            conversion.report("lm_eval_tasks", f"each task uses the harness's number of few-shot examples; {advice}")
    if conversion.raw_value("lm_eval_batch_size") == 8:
        conversion.mark_implied("lm_eval_batch_size", "artel evaluates 8 examples per batch")
    if conversion.raw_value("plugins") == ["axolotl.integrations.lm_eval.LMEvalPlugin"]:
        conversion.mark_implied("plugins", "validate.tasks runs lm-evaluation-harness")
    metrics = conversion.get("eval_causal_lm_metrics", read.names) or ("sacrebleu", "comet", "ter", "chrf")
    missing = ", ".join(name for name in metrics if name != "perplexity")
    limitation = f"validation computes loss, perplexity and accuracy, but not {missing} of generated text"
    for key in ("do_causal_lm_eval", "eval_causal_lm_metrics"):
        if not missing or not conversion.raw_value("do_causal_lm_eval"):
            conversion.mark_implied(
                key, "each validation computes perplexity" if not missing else "no effect: it is off"
            )
        else:
            conversion.report(
                key, f"{limitation}; write validate.tasks: [FILE.yaml], a task of your own with these metrics"
            )


def _convert_parallel(conversion: Conversion) -> None:
    """Convert the sizes of data parallelism. The other sizes are in the table."""
    shards = conversion.get("dp_shard_size", read.positive_int) or 1
    replicas = conversion.get("dp_replicate_size", read.positive_int) or 1
    if shards > 1 and replicas > 1:
        conversion.put("parallel.data", "hsdp", "dp_shard_size", "dp_replicate_size")
        conversion.put("parallel.shard", shards, "dp_shard_size")
        conversion.report(
            "dp_replicate_size", "the number of replicas is the number of processes divided by parallel.shard"
        )
    elif shards > 1:
        conversion.put("parallel.data", "fsdp", "dp_shard_size")
    elif replicas > 1:
        conversion.put("parallel.data", "ddp", "dp_replicate_size")


AXOLOTL = Tool("axolotl", is_axolotl, convert_axolotl, never_a_run_file=True)
