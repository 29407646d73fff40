"""The model, adapter and precision of LLaMA-Factory's YAML in a run file."""

from __future__ import annotations

from artel.config.converters.adapters import carry_target
from artel.config.converters.keys import YamlKeys, a_flag, a_share, a_text, above_zero, at_least_one, one_of
from artel.errors import Problem

_BITS = {4: "nf4", 8: "int8"}


def carry_model(old: YamlKeys) -> None:
    if not old.has("model_name_or_path"):
        old.problems.append(Problem(old.place, "names no model", "write model_name_or_path: FOLDER-OR-HUB-ID"))
    old.carry("model_name_or_path", "model.from", a_text)
    if old.read("model_revision", a_text) not in (None, "main"):
        old.leave(
            "model_revision", "the main branch is taken; fetch that one (hf download --revision), name its folder"
        )
    old.agree("model_revision", "the main branch is taken")
    if old.raw("trust_remote_code"):
        name = old.raw("model_name_or_path")
        old.leave(
            "trust_remote_code", f"code beside a model is not run; where it must, write model.trust_remote_code: {name}"
        )
    old.agree("trust_remote_code", "code beside a model is not run")


def carry_adapter(old: YamlKeys) -> None:
    """finetuning_type with its sizes, and the weights below an adapter in 8 or 4 bits."""
    kind = old.read("finetuning_type", one_of({name: name for name in ("lora", "oft", "freeze", "full")}))
    bits = old.read("quantization_bit", at_least_one)
    if kind == "freeze":
        old.put("model.freeze", [], "finetuning_type")
        old.comment("model.freeze", "the parameters that stay as they are: ['*embed*', 'model.layers.0.*', …]")
        for key in ("finetuning_type", "freeze_trainable_layers", "freeze_trainable_modules", "freeze_extra_modules"):
            old.leave(key, "says what is trained, and model.freeze what stays: write its patterns, or all is trained")
    if kind in ("freeze", "full"):
        if kind == "full":
            old.decided("model.from", "finetuning_type")
        for key in old.given():
            if key.startswith(("lora_", "oft_")) or key in ("use_rslora", "use_dora", "additional_target"):
                old.agree(key, "there is no adapter")
        old.leave("quantization_bit", "weights of 4 or 8 bits are held only under an adapter: finetuning_type: lora")
        return
    _carry_lora(old)
    old.decided("model.lora", "finetuning_type")
    if kind == "oft":
        old.leave("finetuning_type", "artel's adapters are LoRA, and one of lora_rank 8 is taken")
    if bits in _BITS:
        old.put("model.quantize", _BITS[bits], "quantization_bit")
    elif bits:
        old.leave("quantization_bit", "artel holds weights in 8 or 4 bits; write model.quantize: int8 or nf4")
    if old.read("quantization_method", a_text) in (None, "bnb", "bitsandbytes"):
        old.agree("quantization_method", "bitsandbytes quantizes")
    else:
        old.leave("quantization_method", "bitsandbytes quantizes: model.quantize: int8 or nf4")
    if old.raw("quantization_type") == "fp4":
        old.leave("quantization_type", "artel's 4 bits are nf4")
    old.agree("quantization_type", "artel's 4 bits are nf4")


def _carry_lora(old: YamlKeys) -> None:
    """Its alpha is twice the rank where it is not given."""
    rank = old.read("lora_rank", at_least_one)
    old.carry("lora_rank", "model.lora.rank", at_least_one)
    alpha = old.read("lora_alpha", above_zero)
    if rank:
        old.put("model.lora.alpha", alpha or 2 * rank, "lora_alpha")
    old.carry("lora_dropout", "model.lora.dropout", a_share)
    old.carry("use_rslora", "model.lora.rslora", a_flag)
    old.carry("use_dora", "model.lora.dora", a_flag)
    saved = old.read("additional_target", a_text)
    if saved:
        old.put("model.lora.save", [name.strip() for name in saved.split(",")], "additional_target")
    target = old.read("lora_target", lambda value: value)
    if isinstance(target, str):
        old.give_value("lora_target", [name.strip() for name in target.split(",")])
    carry_target(old, "lora_target")


def carry_precision(old: YamlKeys) -> None:
    """bf16 and fp16; pure_bf16 holds the weights so, too. Without any of them it computes in fp32."""
    chosen = ""
    for key, precision in (("fp8", "fp8"), ("pure_bf16", "bf16"), ("bf16", "bf16"), ("fp16", "fp16")):
        is_on = old.read(key, a_flag)
        if is_on and chosen not in ("", precision):
            old.leave(key, f"train.precision is {chosen}")
        elif is_on:
            chosen = precision
            old.put("train.precision", precision, key)
        else:
            old.agree(key, "train.precision says in what is computed")
    if old.raw("pure_bf16"):
        old.put("train.weights", "bf16", "pure_bf16")
    if not chosen:
        old.put("train.precision", "fp32")
        old.tell("neither bf16 nor fp16 is true, so it computes in fp32; train.precision: auto is quicker on most GPUs")
