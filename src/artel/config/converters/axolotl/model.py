"""The model, adapter and precision of axolotl's YAML in a run file."""

from __future__ import annotations

import re

from artel.config.converters.adapters import carry_target
from artel.config.converters.keys import YamlKeys, a_flag, a_share, a_text, above_zero, at_least_one, names, one_of
from artel.errors import Problem

_NO_ADAPTER = "there is no adapter: all weights are trained"


def carry_model(old: YamlKeys) -> None:
    if not old.has("base_model"):
        old.problems.append(Problem(old.place, "names no model", "write base_model: FOLDER-OR-HUB-ID"))
    old.carry("base_model", "model.from", a_text)
    tokenizer = old.read("tokenizer_config", a_text)
    if tokenizer and tokenizer != old.raw("base_model"):
        old.put("tokenizer.from", tokenizer, "tokenizer_config")
    if old.read("base_model_config", a_text) == old.raw("base_model"):
        old.agree("base_model_config", "the model's own config.json is taken")
    old.leave("base_model_config", "the model's own config.json is taken")
    old.agree("tokenizer_config", "the tokenizer is the model's own")
    if old.raw("trust_remote_code"):
        name = old.raw("base_model")
        old.leave(
            "trust_remote_code", f"code beside a model is not run; where it must, write model.trust_remote_code: {name}"
        )
    old.agree("trust_remote_code", "code beside a model is not run")


def carry_adapter(old: YamlKeys) -> None:
    """adapter: lora or qlora, with its sizes, and the weights below it in 8 or 4 bits."""
    adapter = old.read("adapter", one_of({name: name for name in ("lora", "qlora")}))
    four, eight = old.read("load_in_4bit", a_flag), old.read("load_in_8bit", a_flag)
    if adapter is None:
        for key in old.given():
            if re.match(r"(lora|peft|qlora)_|peft\.", key):
                old.agree(key, _NO_ADAPTER)
        for key in ("load_in_4bit", "load_in_8bit"):
            old.leave_if_on(key, "weights of 4 or 8 bits are held only under an adapter; write adapter: qlora")
        return
    old.carry("lora_r", "model.lora.rank", at_least_one)
    old.carry("lora_alpha", "model.lora.alpha", above_zero)
    old.carry("lora_dropout", "model.lora.dropout", a_share)
    old.carry("peft_use_rslora", "model.lora.rslora", a_flag)
    old.carry("peft_use_dora", "model.lora.dora", a_flag)
    old.carry("lora_modules_to_save", "model.lora.save", names)
    _carry_target(old)
    old.decided("model.lora", "adapter")
    kind, decisive = ("int8", "load_in_8bit") if eight and not four else ("nf4", "load_in_4bit")
    if four or eight or adapter == "qlora":
        old.put("model.quantize", kind, "adapter", *([decisive] if old.raw(decisive) else []))
    for key in ("load_in_4bit", "load_in_8bit"):
        if key != decisive or not old.raw(key):
            old.leave_if_on(key, f"{decisive} is true too, and is taken")


def _carry_target(old: YamlKeys) -> None:
    """lora_target_linear adds all linear layers to those that are named."""
    if old.read("lora_target_linear", a_flag):
        old.put("model.lora.target", ["auto"], "lora_target_linear")
        old.agree("lora_target_modules", "lora_target_linear takes all linear layers")
        return
    old.agree("lora_target_linear", "lora_target_modules names the layers")
    carry_target(old, "lora_target_modules")


def carry_precision(old: YamlKeys) -> None:
    """bf16 (auto, true, full), fp16, fp8 and their other names; axolotl takes bf16 first."""
    wanted = {
        "fp8": ("fp8",),
        "bf16": ("bf16", "bfloat16"),
        "fp16": ("fp16", "float16"),
        "fp32": ("float32",),
    }
    chosen = ""
    for precision, keys in wanted.items():
        for key in keys:
            value = old.raw(key)
            if value in (False, None):
                old.agree(key, "train.precision says in what is computed")
            elif value not in (True, "auto", "full"):
                old.refuse(key, f"{value!r} is neither true, false, auto nor full")
            elif chosen:
                old.leave(key, f"train.precision is {chosen}")
            else:
                chosen = "auto" if value == "auto" else precision
                old.put("train.precision", chosen, key)
    if not chosen:
        is_off = old.raw("bf16") is False
        old.put("train.precision", "fp32" if is_off else "auto", "bf16")
    elif chosen in ("bf16", "auto") and not old.has("adapter"):
        old.tell("axolotl holds trained weights in bf16, artel in fp32; train.weights: bf16 takes half the memory")
