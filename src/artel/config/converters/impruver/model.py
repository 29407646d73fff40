"""The tokenizer, model, adapter and precision of impruver's YAML in a run file."""

from __future__ import annotations

import difflib
import re

from artel.config.converters.adapters import carry_target
from artel.config.converters.impruver.keys import Impruver
from artel.config.converters.keys import a_flag, a_share, a_text, above_zero, at_least_one, did_you_mean, names, one_of
from artel.errors import Problem

_ATTENTION = "artel chooses how attention is computed by device and model"
_WEIGHTS = "train.weights sets the dtype of trained weights, train.precision that of computation"
_ID = "the tokenizer's is taken"
_CONFIG_LEFT = {
    "vocab_size": "the tokenizer's number of tokens is taken; write model.config.vocab_size for a larger one",
    "bos_token_id": _ID,
    "eos_token_id": _ID,
    "pad_token_id": _ID,
    "torch_dtype": _WEIGHTS,
    "dtype": _WEIGHTS,
    "_attn_implementation": _ATTENTION,
    "attn_implementation": _ATTENTION,
}
# Keys of older transformers that the model type no longer has.
_CONFIG_GONE = {
    "n_ctx": "transformers has dropped it; max_position_embeddings (n_positions) is the length",
    "rope_theta": "write model.config.rope_parameters: {rope_type: default, rope_theta: …}",
    "rope_scaling": "write model.config.rope_parameters: {rope_type: …}",
}


def carry_tokenizer(old: Impruver) -> None:
    name = old.read("tokenizer.name", a_text)
    if name is not None and name != old.read("model.name", a_text):
        old.put("tokenizer.from", name, "tokenizer.name")
    else:
        old.agree("tokenizer.name", "the tokenizer is that of the model")
    own_class = "the tokenizer's own files say which class it has"
    if old.read("tokenizer.class", a_text) in (None, "transformers.AutoTokenizer"):
        old.agree("tokenizer.class", own_class)
    else:
        old.leave("tokenizer.class", own_class)
    old.leave("tokenizer.special_tokens", "the special tokens are those of the tokenizer's own files")
    template = old.read("tokenizer.chat_template", a_text)
    if template is not None and not re.search(r"\{[{%]", template):  # a name or a file, not the template itself
        old.put("chat.template", template, "tokenizer.chat_template")
    elif template is not None:
        old.leave("tokenizer.chat_template", "save it as a file, and write chat.template: FILE")
    else:
        old.tell(
            "tokenizer.chat_template is not given: for a tokenizer without one impruver writes each message as "
            "bos, role, line feed, text, eos, artel as chatml; for another write chat.template: FILE"
        )


def carry_model(old: Impruver) -> None:
    name = old.read("model.name", a_text)
    if name is not None:
        old.put("model.from", name, "model.name")
        for key in ("model.config_class", *old.below("model.config")):
            old.leave(key, "model.name is given, and its own config.json is taken")
        if old.read("model.class", a_text) not in (None, "transformers.AutoModelForCausalLM"):
            old.leave("model.class", "the model's config.json says which class it has; code beside it is not run")
        else:
            old.agree("model.class", "the model's config.json says which class it has")
    elif old.has("model.config_class") or old.below("model.config"):
        _carry_architecture(old)
    elif not old.has("model.name"):
        fix = "write model: {name: FOLDER-OR-HUB-ID}, or config_class and config for one from scratch"
        old.problems.append(Problem(old.place, "names no model", fix))
    old.leave("model.attn_implementation", "artel chooses how attention is computed by device and model")


def _carry_architecture(old: Impruver) -> None:
    """A model from scratch: the model type of its config class, and the keys that this type has."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = set(CONFIG_MAPPING_NAMES.values())
    module, _, class_name = (old.read("model.config_class", a_text) or "").rpartition(".")
    written = old.read("model.config.model_type", one_of({name: name for name in CONFIG_MAPPING_NAMES}))
    model_type = getattr(transformers, class_name).model_type if class_name in classes else written
    if model_type is None:
        if class_name:
            near = difflib.get_close_matches(class_name, sorted(classes), 1)
            fix = f"did you mean transformers.{near[0]}?" if near else "write model.config.model_type: gpt2, llama …"
            old.refuse("model.config_class", f"transformers has no {class_name}; {fix}")
        elif not old.has("model.config.model_type"):
            old.problems.append(
                Problem(
                    old.where("model"),
                    "does not say of what type the model is",
                    "write config_class: transformers.GPT2Config",
                )
            )
        return
    old.put("model.config.model_type", model_type, "model.config_class", "model.config.model_type")
    if class_name and (module != "transformers" or class_name not in classes):
        old.leave("model.config_class", f"code of one's own is not run; transformers' {model_type} is taken")
    if written not in (None, model_type):
        old.leave("model.config.model_type", f"config_class says {model_type}")
    usual = (
        None,
        f"transformers.{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)}",
        "transformers.AutoModelForCausalLM",
    )
    if old.read("model.class", a_text) not in usual:
        old.leave("model.class", f"transformers' causal model of type {model_type} is taken")
    else:
        old.agree("model.class", f"transformers' causal model of type {model_type} is taken")
    plain = CONFIG_MAPPING[model_type]()
    known = {*plain.to_dict(), *plain.attribute_map}
    for key in old.below("model.config"):
        name = key.removeprefix("model.config.")
        if name == "model_type":
            continue
        if name in _CONFIG_LEFT:
            old.leave(key, _CONFIG_LEFT[name])
        elif name in known:
            old.put(key, old.raw(key), key)
        else:
            reason = f"{model_type} has no such key{did_you_mean(name, known)}"
            old.leave(key, _CONFIG_GONE.get(name, reason))


def carry_quantization(old: Impruver) -> None:
    four, eight = old.read("model.load_in_4bit", a_flag), old.read("model.load_in_8bit", a_flag)
    for key, is_on in (("model.load_in_4bit", four), ("model.load_in_8bit", eight)):
        if is_on is False:
            old.agree(key, "weights are held as they are")
    if not four and not eight:
        return
    key, kind = ("model.load_in_8bit", "int8") if eight else ("model.load_in_4bit", "nf4")
    if four and eight:
        old.leave("model.load_in_4bit", "load_in_8bit is true too, and is what impruver takes")
    if not old.has("model.name"):
        old.leave(key, "a model from scratch has no weights to hold in fewer bits")
    elif not old.below("lora"):
        old.leave(
            key,
            "such weights are not trained themselves, and artel holds them so only under an adapter; write "
            f"model.lora: {{rank: 16}} and model.quantize: {kind}",
        )
    else:
        old.put("model.quantize", kind, key)


def carry_adapter(old: Impruver) -> None:
    keys = old.below("lora")
    if not keys:
        return
    if not old.has("model.name"):
        for key in keys:
            old.leave(key, "an adapter changes a pretrained model, and this one is from scratch")
        return
    old.carry("lora.r", "model.lora.rank", at_least_one)
    old.carry("lora.lora_alpha", "model.lora.alpha", above_zero)
    old.carry("lora.lora_dropout", "model.lora.dropout", a_share)
    old.carry("lora.use_rslora", "model.lora.rslora", a_flag)
    old.carry("lora.use_dora", "model.lora.dora", a_flag)
    old.carry("lora.modules_to_save", "model.lora.save", names)
    carry_target(old, "lora.target_modules")
    if old.read("lora.bias", one_of({kind: kind for kind in ("none", "all", "lora_only")})) == "none":
        old.agree("lora.bias", "biases are not trained")
    else:
        old.leave("lora.bias", "biases are not trained")
    if old.read("lora.task_type", a_text) == "CAUSAL_LM":
        old.agree("lora.task_type", "the objective decides: chat")
    else:
        old.leave("lora.task_type", "the objective decides: chat")
    if old.read("lora.inference_mode", a_flag):
        old.leave("lora.inference_mode", "an adapter that is not trained needs no run")
    else:
        old.agree("lora.inference_mode", "the adapter is trained")


def carry_precision(old: Impruver) -> None:
    """The trainer's bf16 and fp16 go before the model's dtype, in which impruver loads the weights."""
    dtype = old.read("model.dtype", one_of({name: name for name in _PRECISIONS}))
    bf16, fp16 = old.read("trainer.bf16", a_flag), old.read("trainer.fp16", a_flag)
    if bf16 or fp16:
        old.put("train.precision", "bf16" if bf16 else "fp16", "trainer.bf16" if bf16 else "trainer.fp16")
        old.leave("model.dtype", f"the trainer's bf16 or fp16 decides; {_WEIGHTS}")
    elif dtype is not None:
        old.put("train.precision", _PRECISIONS[dtype], "model.dtype")
    if bf16 and fp16:
        old.leave("trainer.fp16", "trainer.bf16 decides")
    if dtype == "fp64":
        old.leave("model.dtype", "artel computes in fp32 at most")
    for key, is_on in (("trainer.bf16", bf16), ("trainer.fp16", fp16)):
        if is_on is False:
            old.agree(key, "train.precision says in what is computed")


_PRECISIONS = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
    "fp64": "fp32",
}
