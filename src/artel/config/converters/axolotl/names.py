"""axolotl's keys that a run file has no place for, and those that need none."""

from __future__ import annotations

from artel.config.converters.keys import YamlKeys, did_you_mean
from artel.config.converters.training_arguments import TRACKER_ADVICE

_KERNEL = "artel chooses its kernels by device and model; the numbers are the same"
_CONFIG = "the model's config.json and the tokenizer's files say so"
_TOKENS = "the special tokens are those of the tokenizer's own files"
_LOSS = "the loss is the mean cross-entropy of the tokens that are learned"
_CLOUD = "is about where axolotl runs; artel runs where it is started, or by artel launch"
_QUANTIZED = "artel quantizes the weights below an adapter: model.quantize: nf4 or int8"

_AGREE = {
    "strict": "every key of a run file is checked",
    "model_type": _CONFIG,
    "type_of_model": _CONFIG,
    "cls_model_config": _CONFIG,
    "tokenizer_type": _CONFIG,
    "tokenizer_use_fast": _CONFIG,
    "tokenizer_legacy": _CONFIG,
    "tokenizer_save_jinja_files": _CONFIG,
    "is_falcon_derived_model": _CONFIG,
    "is_llama_derived_model": _CONFIG,
    "is_mistral_derived_model": _CONFIG,
    "is_qwen_derived_model": _CONFIG,
    "lora_fan_in_fan_out": _CONFIG,
    "torch_dtype": "train.weights says in what weights are held",
    "eot_tokens": "the chat template says with what a turn ends",
    "skip_prepare_dataset": "texts are prepared once, and found again by what they were made of",
    "dataset_keep_in_memory": "tokens are read from the store as they are needed",
    "base_model_ignore_patterns": "only safetensors are read",
    "low_cpu_mem_usage": "weights are read into the place where they stay",
    "hf_use_auth_token": "the hub's own login is used: hf auth login",
    "ddp": "data parallelism is what more than one process do",
    "debug": "metrics.jsonl and artel report show what happens",
    "sample_packing_eff_est": "is about how fast samples are packed",
    "sample_packing_seq_len_multiplier": "is about how fast samples are packed",
    "sample_packing_group_size": "is about how fast samples are packed",
    "sample_packing_bin_size": "is about how fast samples are packed",
    "multipack_real_batches": "is about how fast samples are packed",
    "pretrain_multipack_buffer_size": "all texts are packed together",
    "streaming_multipack_buffer_size": "all texts are packed together",
    "pretrain_multipack_attn": "packed documents do not see one another",
    "total_num_tokens": "tokens are counted when texts are prepared",
    "auto_resume_from_checkpoints": "the same command resumes a stopped run",
    "experts_implementation": _KERNEL,
    "device_map": "processes and devices are found",
    "device": "processes and devices are found",
    "world_size": "processes and devices are found",
    "include_tkps": "metrics.jsonl has the tokens a second",
    "include_tokens_per_second": "metrics.jsonl has the tokens a second",
    "gc_steps": "Python's garbage is collected between steps",
}
_AGREE_PREFIXES = {
    "liger_": _KERNEL,
    "flash_": _KERNEL,
    "flex_attn_": _KERNEL,
    "use_kernels": _KERNEL,
    "fused_": _KERNEL,
    "tiled_mlp": _KERNEL,
    "chunked_cross_entropy": _KERNEL,
    "cut_cross_entropy": _KERNEL,
    "ring_attn_func": "parallel.exchange says how processes that share a sequence exchange",
    "heads_k_stride": "parallel.exchange says how processes that share a sequence exchange",
    "sdpa_varlen": _KERNEL,
    "use_scattermoe": _KERNEL,
    "use_sonicmoe": _KERNEL,
    "use_dsv4_kernels": _KERNEL,
    "use_glm_dsa_kernels": _KERNEL,
    "dsv4_fp4_grouped_mode": _KERNEL,
    "gemma4_hybrid_attn_impl": _KERNEL,
    "large_head_attention": _KERNEL,
    "attn_implementation": "artel chooses how attention is computed by device and model",
}
_AGREE_SUFFIXES = {
    "_attention": "artel chooses how attention is computed by device and model",
    "_kernel": _KERNEL,
}
_LEAVE = {
    "adapter": "artel has adapters of the kind lora",
    "lora_model_dir": "to go on with it, merge it: artel export FOLDER merged --merge; write model.from: merged",
    "base_model_config": "the model's own config.json is taken",
    "revision_of_model": "the main branch is taken; for another, fetch it (hf download --revision) and name its folder",
    "reinit_weights": "training begins with pretrained weights; for new ones write model: {config: {model_type: …}}",
    "processor_type": "artel learns from text: images and sound in messages are not read",
    "image_size": "artel learns from text: images and sound in messages are not read",
    "image_resize_algorithm": "artel learns from text: images and sound in messages are not read",
    "freeze_mm_modules": "write model.freeze: the patterns of what is to stay, ['*vision*']",
    "unfrozen_parameters": "names what is trained, and model.freeze names what stays: write the others' patterns",
    "tokens": _TOKENS,
    "added_tokens_overrides": _TOKENS,
    "resize_token_embeddings_to_32x": "embeddings are as many as the tokenizer and the model need",
    "tokenizer_use_mistral_common": "the tokenizer is read by transformers",
    "default_system_message": "write it into the conversations, or into chat.template: FILE",
    "group_by_length": "artel's order is a function of the seed, never of lengths",
    "curriculum_sampling": "artel's order is a function of the seed",
    "sample_packing_sequentially": "artel's order is a function of the seed",
    "min_sample_len": "write data.clean.minimum, a number of characters",
    "eval_sequence_len": "validation has the length of training: data.block",
    "max_packed_sequence_len": "data.block is the length of a packed sequence",
    "push_dataset_to_hub": "prepared data stays in data.store",
    "hub_model_id": "nothing is sent anywhere by itself; RUN/model is in Hugging Face's format",
    "noisy_embedding_alpha": "artel adds no noise to embeddings",
    "orpo_alpha": "is for rl: orpo",
    "rl_beta": "is for rl",
    "cpo_alpha": "artel has dpo, ipo, kto, orpo and simpo",
    "rpo_alpha": "artel's preference loss has no such term",
    "precompute_ref_log_probs": "they are computed once, before training begins",
    "dpo_use_weighting": "artel's preference loss has no such weights",
    "use_eaft": _LOSS,
    "use_dynamic_finetuning": _LOSS,
    "center_rewards_coefficient": "is for reward models",
    "num_labels": "a language model has none",
    "use_onebitllms": "artel trains weights of 32 or 16 bits",
    "gptq": _QUANTIZED,
    "quantize_moe_experts": _QUANTIZED,
    "activation_offloading": "activations that are kept stay on the device",
    "layer_offloading": "layers stay on the device; write parallel.offload: cpu",
    "model_quantization_config": "a model whose files are quantized is read as they say",
    "lora_target_parameters": "write model.lora.target: [auto, experts] for experts that one tensor holds",
    "loraplus_lr_ratio": "both matrices of an adapter have one learning rate",
    "relora": "adapters stay until the end of the run",
    "plugins": "axolotl's plugins do not run here; kernels and losses are artel's own",
    "trainer_cls": "artel has one training loop",
    "lr_quadratic_warmup": "warmup is linear",
    "cosine_constant_lr_ratio": "write train.schedule: wsd, and train.decay, for a rate that stays first",
    "lr_div_factor": "warmup begins at 1 / train.warmup of the peak",
    "eta_min": "write train.minimum_learning_rate, a share of learning_rate",
    "embedding_lr": "there is one learning rate",
    "embedding_lr_scale": "there is one learning rate",
    "lr_groups": "there is one learning rate; train.layer_decay makes it fall layer by layer",
    "loss_watchdog_threshold": "write train.spike, how many times the mean a loss may be, and train.on_bad_step",
    "loss_watchdog_patience": "write train.spike, how many times the mean a loss may be, and train.on_bad_step",
    "save_first_step": "write checkpoint.every",
    "eval_table_size": "write validate.prompts for samples",
    "eval_max_new_tokens": "write validate.new_tokens",
    "generate_samples": "write validate.prompts for samples",
    "use_swanlab": TRACKER_ADVICE,
    "use_comet": TRACKER_ADVICE,
    "use_otel_metrics": TRACKER_ADVICE,
    "wandb_entity": "Weights & Biases takes it from the environment: WANDB_ENTITY",
    "wandb_mode": "Weights & Biases takes it from the environment: WANDB_MODE",
    "mlflow_tracking_uri": "MLflow takes it from the environment: MLFLOW_TRACKING_URI",
    "mlflow_experiment_name": "MLflow takes it from the environment: MLFLOW_EXPERIMENT_NAME",
    "trackio_project_name": "trackio takes it from the environment: TRACKIO_PROJECT",
    "trackio_space_id": "trackio takes it from the environment: TRACKIO_SPACE_ID",
    "wandb_watch": "gradients are not sent, only their norm",
    "wandb_log_model": "a model is not sent anywhere",
    "use_ray": "artel launch starts processes; prepare.engine: ray prepares texts with Ray",
    "profiler_steps": "write profile: true",
    "deepcompile": "train.compile compiles each layer",
    "torch_compile_options": "train.compile is on, off or auto",
    "max_memory": "train.micro_batch: auto and train.activation_checkpointing: auto keep a run within memory",
    "gpu_memory_limit": "train.micro_batch: auto and train.activation_checkpointing: auto keep a run within memory",
    "torchdistx_path": "the optimizer is PyTorch's own",
    "lora_on_cpu": "weights are read into the place where they stay",
    "llama4_linearized_experts": "the model's own code is transformers'",
    "fp8_enable_fsdp_float8_all_gather": "artel chooses what FSDP2 gathers",
    "experimental_skip_move_to_device": "weights are read into the place where they stay",
    "fp32_norms": "trained weights are in fp32; train.precision says in what layers compute",
    "selective_checkpointing": "write train.activation_checkpointing: selective",
    "tokenizer_config": "the tokenizer is the model's own",
    "full_finetune": "without adapter all weights are trained",
}
_LEAVE_PREFIXES = {
    "special_tokens": _TOKENS,
    "tokens.": _TOKENS,
    "overrides_of_model": "write the model's own config.json, and name its folder in model.from",
    "model_config.": "write the model's own config.json, and name its folder in model.from",
    "model_quantization_config_kwargs": "a model whose files are quantized is read as they say",
    "bnb_config_kwargs": "artel's 4 bits are nf4 with double quantization",
    "peft": "artel's adapters have rank, alpha, dropout, target, rslora, dora and save",
    "gptq_": _QUANTIZED,
    "qat.": "artel does not train for later quantization; artel export RUN DIR --gguf q4_k_m quantizes a trained one",
    "quantization.": "artel does not quantize a trained model by itself; artel export RUN DIR --gguf q4_k_m does",
    "llmcompressor": "artel does not prune",
    "nvfp4_": _QUANTIZED,
    "trl.": "is for reinforcement learning, which artel does not do",
    "vllm": "is for reinforcement learning, which artel does not do",
    "ebft": "is for reinforcement learning, which artel does not do",
    "swanlab_": TRACKER_ADVICE,
    "mlflow_": "a run is named after its folder",
    "comet_": TRACKER_ADVICE,
    "trackio_": "a run is named after its folder",
    "otel_": TRACKER_ADVICE,
    "gradio_": "artel chat RUN puts a model to use",
    "generation_": "write validate.prompts and validate.new_tokens",
    "ray_": "artel launch starts processes; prepare.engine: ray prepares texts with Ray",
    "resources_per_worker": "artel launch starts processes; prepare.engine: ray prepares texts with Ray",
    "relora_": "adapters stay until the end of the run",
    "jagged_": "train.schedule has no restarts",
    "lisa_": "all weights are trained in each step, or those that model.freeze leaves",
    "eaft_": _LOSS,
    "dion_": "is for the optimizer dion, which artel has not",
    "qgalore_": "is for the optimizer q_galore, which artel has not",
    "dpo_": "artel's preference loss has beta and smoothing",
    "expert_parallel_": "artel's experts exchange tokens as they come",
    "dynamic_checkpoint": "Ctrl-C saves a run at once",
    "bench_": "validate.tasks_limit is the number of examples of each task of validate.tasks",
    "accelerator_config": "artel starts its processes itself",
    "diffusion": "is for diffusion models of texts",
    "use_pose": "positions are those of the text",
    "pose_": "positions are those of the text",
    "scaling_softmax": "attention is the model's own",
}


def leave_the_rest(old: YamlKeys) -> None:
    """What the parts before have not read: agreed, left with its reason, or unknown."""
    for key in old.unasked():
        reason = _AGREE.get(key) or _of_prefix(key, _AGREE_PREFIXES) or _of_suffix(key)
        if reason:
            old.agree(key, reason)
            continue
        reason = _LEAVE.get(key) or _of_prefix(key, _LEAVE_PREFIXES)
        if reason:
            old.leave_if_on(key, reason)
        else:
            old.leave_if_on(key, f"is no key of axolotl's that artel knows{did_you_mean(key, KNOWN)}")


def _of_prefix(key: str, reasons: dict[str, str]) -> str:
    return next((reason for prefix, reason in reasons.items() if key.startswith(prefix)), "")


def _of_suffix(key: str) -> str:
    return next((reason for suffix, reason in _AGREE_SUFFIXES.items() if key.endswith(suffix)), "")


KNOWN = {*_AGREE, *_LEAVE}
