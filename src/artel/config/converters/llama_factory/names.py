"""LLaMA-Factory's keys that a run file has no place for, and those that need none."""

from __future__ import annotations

from artel.config.converters.keys import Section, YamlKeys
from artel.config.converters.training_arguments import TRACKER_ADVICE, leave_unknown_arguments
from artel.registry import OPTIMIZERS

_OPTIMIZER = f"artel has no such optimizer; train.optimizer is one of {', '.join(OPTIMIZERS.names)}"
_KERNEL = "artel chooses its kernels by device and model; the numbers are the same"
_IMAGES = "artel learns from text: images and sound are not read"
_TOKENS = "the special tokens are those of the tokenizer's own files"
_LOSS = "the loss is the mean cross-entropy of the tokens that are learned"
_USE = "is for a trained model: artel chat, artel generate, artel evaluate"
_LAUNCH = "artel launch starts processes"
_MERGE = "to go on with an adapter, merge it: artel export FOLDER merged --merge; write model.from: merged"

_AGREE = {
    "overwrite_cache": "texts are prepared again when they or the keys change",
    "plot_loss": "artel report draws the loss",
    "streaming": "texts are prepared once, and tokens read from the store",
    "buffer_size": "the order of all samples is a function of seed",
    "preprocessing_batch_size": "is about how fast texts are prepared",
    "data_shared_file_system": "processes that share a store find it",
    "ignore_pad_token_for_loss": "padding is never learned",
    "flash_attn": "artel chooses how attention is computed by device and model",
    "enable_liger_kernel": _KERNEL,
    "use_unsloth": _KERNEL,
    "use_unsloth_gc": _KERNEL,
    "use_v1_kernels": _KERNEL,
    "fp8_backend": _KERNEL,
    "fp8_enable_fsdp_float8_all_gather": _KERNEL,
    "use_reentrant_gc": "artel recomputes without re-entrance",
    "upcast_layernorm": "trained weights are in fp32",
    "upcast_lmhead_output": "the loss is computed in fp32",
    "low_cpu_mem_usage": "weights are read into the place where they stay",
    "use_fast_tokenizer": "the tokenizer is a fast one",
    "use_kv_cache": "is for answers, not for training",
    "print_param_status": "the console says how many parameters are trained",
    "create_new_adapter": "a run begins with a new adapter",
    "compute_accuracy": "artel evaluate RUN gives the accuracy",
    "include_effective_tokens_per_second": "metrics.jsonl has the tokens a second",
    "split_special_tokens": "special tokens in a text are text",
    "use_megatron_bridge": "artel has one training loop",
    "use_mca": "artel has one training loop",
}
_LEAVE = {
    "disable_shuffling": "the order of all samples is a function of seed",
    "adapter_name_or_path": _MERGE,
    "pissa_init": "an adapter begins at zero, as in LoRA",
    "pissa_iter": "an adapter begins at zero, as in LoRA",
    "pissa_convert": "an adapter begins at zero, as in LoRA",
    "loraplus_lr_ratio": "both matrices of an adapter have one learning rate",
    "loraplus_lr_embedding": "both matrices of an adapter have one learning rate",
    "use_llama_pro": "no layers are added; write model.freeze for what stays",
    "mixture_of_depths": "a model's layers are its own",
    "shift_attn": "attention is the model's own",
    "block_diag_attn": "attention is the model's own",
    "rope_scaling": "write model.rope: {type: yarn, factor: 4}, with the factor that the old cutoff_len needed",
    "moe_aux_loss_coef": "the factor is router_aux_loss_coef of the model's config.json",
    "train_from_scratch": "write model: {config: {model_type: …}} in place of from",
    "double_quantization": "artel's 4 bits are nf4 with double quantization",
    "resize_vocab": _TOKENS,
    "add_tokens": _TOKENS,
    "add_special_tokens": _TOKENS,
    "new_special_tokens": _TOKENS,
    "new_special_tokens_config": _TOKENS,
    "init_special_tokens": _TOKENS,
    "cache_dir": "models and data sets of the hub are kept where HF_HOME says",
    "media_dir": _IMAGES,
    "default_system": "write it into the conversations, or into chat.template: FILE",
    "tool_format": "tools and calls are written as the chat template writes them",
    "enable_thinking": "write chat.reasoning: keep or drop",
    "preserve_thinking": "write chat.reasoning: keep, last or drop",
    "mix_strategy": "all samples are taken; data.sources.weight says how often those of a source come",
    "interleave_probs": "write data.sources.weight, how often the samples of a source come in an epoch",
    "eval_on_each_dataset": "validation texts are of one path",
    "eval_num_beams": _USE,
    "predict_with_generate": _USE,
    "pref_ftx": "artel's preference loss has no such term",
    "pref_bco_weight": "artel's preference loss has no such term",
    "ld_alpha": "artel's preference loss has no such term",
    "ref_model": "the reference is the model before training",
    "ref_model_adapters": "the reference is the model before training",
    "ref_model_quantization_bit": "the reference is the model before training",
    "use_adam_mini": _OPTIMIZER,
    "use_galore": _OPTIMIZER,
    "use_apollo": _OPTIMIZER,
    "use_badam": _OPTIMIZER,
    "use_dft_loss": _LOSS,
    "use_asft_loss": _LOSS,
    "asft_alpha": _LOSS,
    "use_eaft_loss": _LOSS,
    "eaft_alpha": _LOSS,
    "neat_packing": "samples stand alone",
    "module_dropout": "is for OFT; artel's adapters are LoRA",
    "use_swanlab": TRACKER_ADVICE,
    "use_kt": "KTransformers holds experts in host memory; here parallel.offload: cpu does it for all weights",
    "use_hyper_parallel": "write the sizes in parallel",
    "hyper_parallel_args": "write the sizes in parallel",
    "enable_torch_profiler": "write profile: true",
    "master_addr": _LAUNCH,
    "master_port": _LAUNCH,
    "plot": "artel report draws it",
    "ddp_timeout": "text is prepared before processes meet; train.hang_timeout ends those that get no further",
}
_LEAVE_PREFIXES = {
    "oft_": "is for OFT; artel's adapters are LoRA",
    "galore_": _OPTIMIZER,
    "apollo_": _OPTIMIZER,
    "badam_": _OPTIMIZER,
    "freeze_": "write model.freeze: the patterns of what is to stay",
    "ppo_": "is for reinforcement learning, which artel does not do",
    "reward_": "is for reinforcement learning, which artel does not do",
    "image_": _IMAGES,
    "video_": _IMAGES,
    "audio_": _IMAGES,
    "crop_to_patches": _IMAGES,
    "use_audio_in_video": _IMAGES,
    "swanlab_": TRACKER_ADVICE,
    "kt_": "KTransformers holds experts in host memory; here parallel.offload: cpu does it for all weights",
    "ray_": "artel launch starts processes; prepare.engine: ray prepares texts with Ray",
    "export_": "artel export RUN DIR writes a trained model",
    "infer_": _USE,
    "vllm_": _USE,
    "sglang_": _USE,
    "profiler_": "write profile: true",
    "hf_hub_token": "the hub's own login is used: hf auth login",
    "ms_hub_token": "artel does not know this hub",
    "om_hub_token": "artel does not know this hub",
    "quantization_": "write model.quantize: int8 or nf4",
    "offload_folder": "weights stay in memory; parallel.offload: cpu holds them in that of the host",
}
_MEGATRON = dict.fromkeys(
    (
        "bias_activation_fusion apply_rope_fusion overlap_param_gather overlap_grad_reduce use_distributed_optimizer "
        "moe_grouped_gemm moe_token_dispatcher_type recompute_granularity use_packed_sequences export_hf_on_finish "
        "virtual_pipeline_model_parallel_size"
    ).split(),
    "is for Megatron; artel's own strategies are in the section parallel",
)
_GENERATING = dict.fromkeys(
    "do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty length_penalty".split(),
    _USE,
)


def leave_the_rest(old: YamlKeys) -> None:
    """What the parts before have not read: agreed, left with its reason, or unknown."""
    for key in old.unasked():
        if key in _AGREE:
            old.agree(key, _AGREE[key])
            continue
        known = {**_LEAVE, **_MEGATRON, **_GENERATING}
        prefixed = (reason for prefix, reason in _LEAVE_PREFIXES.items() if key.startswith(prefix))
        reason = known.get(key) or next(prefixed, "")
        if reason:
            old.leave_if_on(key, reason)
    leave_unknown_arguments(Section(old), {*_AGREE, *_LEAVE})
