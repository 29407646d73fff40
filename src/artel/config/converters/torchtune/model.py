"""The model, adapter and precision of torchtune's YAML in a run file."""

from __future__ import annotations

import re
from pathlib import Path

from artel.config.converters.hub_data import is_here
from artel.config.converters.keys import YamlKeys, a_flag, a_share, a_text, above_zero, at_least_one, names, one_of
from artel.errors import Problem

# The linear layers of a decoder by torchtune's names and transformers', of most models and of those that join some.
_LAYERS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
_MLP = ["gate_proj", "up_proj", "down_proj"]
_JOINED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "output_proj": "o_proj"}
_JOINED_MLP = ["gate_up_proj", "down_proj"]
_IS_JOINED = re.compile(r"\.phi[34]\.")
_OWN_FILES = "the tokenizer is that of the model's folder"


def carry_model(old: YamlKeys) -> None:
    """The folder of the weights is the model; its builder says whether there is an adapter."""
    folder = old.read("checkpointer.checkpoint_dir", a_text)
    checkpointer = old.read("checkpointer._component_", a_text) or ""
    if folder is None:
        fix = "write checkpointer: {checkpoint_dir: FOLDER}"
        old.problems.append(Problem(old.place, "names no model", fix))
        return
    path = str(Path(folder))
    old.put("model.from", path, "checkpointer.checkpoint_dir")
    if checkpointer.endswith("MetaCheckpointer"):
        old.comment("model.from", "the model in Hugging Face's format: this folder has Meta's own files")
        old.leave("checkpointer._component_", "artel reads Hugging Face's format: config.json and safetensors")
    elif not is_here(path):
        old.comment("model.from", "the folder that tune download wrote, or the model's name on the hub")
    old.agree("checkpointer._component_", "a model's own config.json says what it is")
    for key in old.below("checkpointer"):
        if key in _CHECKPOINTER:
            old.agree(key, _CHECKPOINTER[key])
        elif key.startswith("checkpointer.checkpoint_files"):
            old.agree(key, "all safetensors of the folder are read")
    old.carry("checkpointer.keep_last_n_checkpoints", "checkpoint.keep", at_least_one)
    for key in old.below("tokenizer"):
        if key != "tokenizer.max_seq_len":
            old.agree(key, _OWN_FILES) if key in _TOKENIZER else old.leave(key, _OWN_FILES)
    for key in old.below("ref_checkpointer"):
        old.agree(key, "the reference is the model before training")
    _carry_adapter(old)


_CHECKPOINTER = {
    "checkpointer.output_dir": "RUN/model is the trained model",
    "checkpointer.model_type": "a model's own config.json says what it is",
    "checkpointer.safe_serialization": "weights are saved as safetensors",
}
_TOKENIZER = {
    *("tokenizer._component_", "tokenizer.path", "tokenizer.merges_file", "tokenizer.vocab_path"),
    *("tokenizer.merges_path", "tokenizer.special_tokens_path"),
}


def _carry_adapter(old: YamlKeys) -> None:
    """`lora_…` and `qlora_…` builders adapt the layers that they name."""
    builder = old.read("model._component_", a_text) or ""
    name = builder.rpartition(".")[2]
    old.decided("model.from", "model._component_")
    if not re.match(r"q?(lora|dora)_|qdora_", name):
        for key in old.below("model"):
            if key != "model._component_":
                old.leave(key, "the model's config.json says so; to change it write one, and name its folder")
        return
    old.decided("model.lora", "model._component_")
    old.carry("model.lora_rank", "model.lora.rank", at_least_one)
    old.carry("model.lora_alpha", "model.lora.alpha", above_zero)
    old.carry("model.lora_dropout", "model.lora.dropout", a_share)
    old.carry("model.use_dora", "model.lora.dora", a_flag)
    if old.read("model.quantize_base", a_flag) or name.startswith("q"):
        key = "model.quantize_base" if old.has("model.quantize_base") else "model._component_"
        old.put("model.quantize", "nf4", key)
    old.agree("model.quantize_base", "weights are held as they are")
    _carry_target(old, _IS_JOINED.search(builder) is not None)
    for key in old.below("model"):
        if key in old.unasked():
            old.leave(key, "the model's config.json says so; to change it write one, and name its folder")


def _carry_target(old: YamlKeys, joined: bool) -> None:
    layers, mlp = (_JOINED, _JOINED_MLP) if joined else (_LAYERS, _MLP)
    written = old.read("model.lora_attn_modules", names) or []
    has_mlp = old.read("model.apply_lora_to_mlp", a_flag)
    target = list(dict.fromkeys(layers[module] for module in written if module in layers))
    if set(written) - layers.keys():
        old.leave("model.lora_attn_modules", f"artel knows {', '.join(layers)}; write the others in model.lora.target")
    elif joined and not {"q_proj", "k_proj", "v_proj"} <= set(written):
        old.leave("model.lora_attn_modules", "transformers' model has the three in one layer: qkv_proj is adapted")
    target += mlp if has_mlp else []
    if target:
        old.put("model.lora.target", target, "model.lora_attn_modules", "model.apply_lora_to_mlp")
    old.leave_if_on("model.apply_lora_to_output", "the output head is not adapted; write model.lora.save: [lm_head]")


def carry_precision(old: YamlKeys) -> None:
    """dtype is that of the weights too: without an adapter they are trained in it."""
    dtype = old.read("dtype", one_of({name: name for name in ("bf16", "fp16", "fp32")}))
    if dtype is None:
        return
    old.put("train.precision", dtype, "dtype")
    is_plain = old.peek("optimizer._component_") in (None, "torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW")
    if dtype == "bf16" and is_plain and not old.has("model.lora_attn_modules"):
        old.put("train.weights", "bf16", "dtype")
    elif dtype == "bf16":
        old.leave("dtype", "torchtune holds trained weights in bf16 too; write train.weights: bf16 where adamw trains")
