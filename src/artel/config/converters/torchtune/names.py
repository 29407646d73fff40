"""torchtune's keys that a run file has no place for, and those that need none."""

from __future__ import annotations

from artel.config.converters.keys import YamlKeys, did_you_mean

_USE = "is for a trained model: artel generate, artel chat, artel evaluate"
_AGREE = {
    "log_level": "the console shows what matters",
    "log_peak_memory_stats": "metrics.jsonl has the memory",
    "tensor_parallel_plan": "artel has plans of its own for each model",
    "custom_sharded_layers": "artel shards layer by layer",
    "save_adapter_weights_only": "RUN/model of a run with adapters is the adapter",
    "collate_fn": "samples are padded to the longest of their micro-batch",
    "enable_kv_cache": "is for answers, not for training",
    "enable_async_checkpointing": "checkpoint.asynchronous is true",
    "use_distributed_state_dict": "checkpoints are sharded",
    "memory_efficient_fsdp_wrap": "artel shards layer by layer",
    "low_cpu_ram": "weights are read into the place where they stay",
    "model_type": "a model's own config.json says what it is",
    "use_flex": "artel chooses how attention is computed by device and model",
    "fp8_recipe_name": "artel scales each tensor",
    "tokenizer_path": "the tokenizer is that of the model's folder",
    "loss.num_output_chunks": "the loss is computed in chunks that fit",
    "loss.ignore_index": "padding is never learned",
    "activation_offloading_use_streams": "activations that are kept stay on the device",
    "context_parallel_rotate_method": "parallel.exchange says how processes that share a sequence exchange",
}
_LEAVE = {
    "resume_from_checkpoint": "the same command resumes a stopped run",
    "shuffle": "the order of all samples is a function of seed",
    "quantizer": "artel does not train for later quantization; artel export RUN DIR --gguf q4_k_m quantizes a model",
    "fake_quant_after_n_steps": "artel does not train for later quantization",
    "memory_efficient_save": "checkpoints are sharded",
    "cudnn_deterministic_mode": "seed fixes order and weights; kernels are torch's own",
    "resize_token_embeddings": "embeddings are as many as the tokenizer and the model need",
    "adapter_checkpoint": "to go on with an adapter, merge it: artel export FOLDER merged --merge",
    "checkpointer.adapter_checkpoint": "to go on with an adapter, merge it: artel export FOLDER merged --merge",
    "checkpointer.recipe_checkpoint": "the same command resumes a stopped run",
    "checkpointer.should_load_recipe_state": "the same command resumes a stopped run",
    "name": "a run is named after its folder",
    "base_model_path": "is a name for other keys",
    "dataloader": "tokens are read from the store, and need no workers",
    "loss": "the loss is the mean cross-entropy of the tokens that are learned",
    "max_seq_len": "data.block is the longest sample",
    "generation": _USE,
    "prompt": _USE,
    "instruct_template": "how a conversation is written is the chat template's affair: chat.template",
    "chat_format": "how a conversation is written is the chat template's affair: chat.template",
    "max_new_tokens": _USE,
    "temperature": _USE,
    "top_k": _USE,
    "federation": "artel averages no models of other places",
}
KNOWN = {*_AGREE, *_LEAVE}


def leave_the_rest(old: YamlKeys) -> None:
    """What the parts before have not read: agreed, left with its reason, or unknown."""
    _carry_device(old)
    if old.raw("shuffle") is True:
        old.agree("shuffle", "the order of all samples is a function of seed")
    elif old.raw("shuffle") is False:
        old.leave("shuffle", _LEAVE["shuffle"])
    for key in old.unasked():
        section = key.partition(".")[0]
        agreed = _AGREE.get(key) or _AGREE.get(section)
        if agreed:
            old.agree(key, agreed)
        else:
            unknown = f"is no key of torchtune's recipes that artel knows{did_you_mean(key, KNOWN)}"
            old.leave_if_on(key, _LEAVE.get(key) or _LEAVE.get(section) or unknown)


def _carry_device(old: YamlKeys) -> None:
    if old.raw("device") == "cpu":
        old.leave("device", "devices are found; CUDA_VISIBLE_DEVICES= keeps a run on the CPU")
    old.agree("device", "devices are found")
