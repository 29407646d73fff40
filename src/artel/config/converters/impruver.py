"""The YAML of impruver (EvilFreelancer/impruver): data sets, tokenizer, model, adapter and transformers' Trainer."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from artel.config.converters import readers as read
from artel.config.converters import trainer
from artel.config.converters.conversion import Conversion, Converted, KeyTable, did_you_mean, top_level_keys
from artel.config.converters.hub_data import SLICED_SPLIT, local_or_hub
from artel.config.converters.tools import Tool
from artel.config.yaml_lines import Key
from artel.errors import Problem

_SECTIONS = ("model", "lora", "tokenizer", "trainer", "ddp", "model.config")
_LORA = (
    "lora.r lora.lora_alpha lora.lora_dropout lora.use_rslora lora.use_dora lora.modules_to_save lora.target_modules"
)
_CONVERTERS = {
    "instruction_to_messages": "alpaca",
    "reasoning_to_messages": "alpaca",  # which takes the field `reasoning` for a thought
    "dialog_to_messages": "dialog",
    "char_dialog_to_messages": "character",
    "conversations_to_messages": "sharegpt",
    "bot_messages_to_messages": "messages",
}
_PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp64": "fp32",
               **dict.fromkeys(("fp32", "float32"), "fp32")}  # fmt: skip
_ATTENTION = "artel chooses the attention kernel by device and model"
_WEIGHTS = "train.weights sets the dtype of trained weights, train.precision that of computation"

# fmt: off
TABLE = KeyTable(
    defaults={
        **trainer.DEFAULTS,
        # defaults of peft's LoraConfig
        "lora.r": 8, "lora.lora_alpha": 8, "lora.lora_dropout": 0, "lora.bias": "none",
    },
    carried={"output_dir": ("run", read.text)},
    same={
        "tokenizer.name": "artel uses the model's tokenizer",
        "datasets.*.split": "artel uses all records",
        "datasets.*.only_target_loss": "artel trains on the assistant's turns",
        "model.load_in_4bit model.load_in_8bit": "weights are not quantized",
        "trainer.dataloader_*": "blocks are read from the token store without workers",
    },
    left={
        "train_path val_path": "artel keeps prepared text in its token store (data.store or the cache)",
        "datasets.*.subset": "give the files of that subset in data.sources.path",
        "tokenizer.special_tokens": "the tokenizer's own files define the special tokens",
        "tokenizer.chat_template": "save it as a file and write chat.template: FILE",
        "model.attn_implementation model.config.attn_implementation model.config._attn_implementation": _ATTENTION,
        "model.config.vocab_size":
            "artel uses the tokenizer's number of tokens; for a larger one write model.config.vocab_size",
        "model.config.dtype model.config.torch_dtype": _WEIGHTS,
        "lora.inference_mode": "artel trains adapters",
        "trainer.output_dir": "the run's folder is output_dir outside the section trainer",
        "lora.use_qalora lora.use_bdlora": "artel's adapters are LoRA, rsLoRA and DoRA",
        "ddp.ddp_find_unused_parameters": trainer.UNUSED,
        "ddp.* trainer.ddp_*": trainer.STARTED,
    },
)
# Keys of older transformers that the model type no longer has.
_GONE = {
    "n_ctx": "transformers has removed it; the length is max_position_embeddings (n_positions)",
    "rope_theta": "write model.config.rope_parameters: {rope_type: default, rope_theta: …}",
    "rope_scaling": "write model.config.rope_parameters: {rope_type: …}",
}
# fmt: on


def is_impruver(text: str) -> bool:
    """True for impruver's YAML, also a broken one; `model` and `tokenizer` are keys of run files too."""
    keys = top_level_keys(text)
    own = {"output_dir", "train_path", "val_path", "datasets", "lora", "trainer", "ddp"}
    return "data" not in keys and len(keys & own) >= 2


def _is_value(key: Key) -> bool:
    """True for a key of a section, whatever it holds."""
    if key[0] == "datasets" or key[:2] == ("model", "config"):
        return len(key) == 3
    return len(key) == (2 if key[0] in _SECTIONS else 1)


def convert_impruver(text: str, place: str) -> Converted:
    """Convert impruver's configuration; relative paths start at the current folder. Raises InputError."""
    names = {f"trainer.{name}": name for name in trainer.NAMES}
    old = Conversion.of_yaml(text, place, TABLE, trainer.TABLE, names=names, is_value=_is_value)
    for key in filter(old.has, _SECTIONS):
        if not isinstance(old.raw(key), dict):
            old.refuse(key, f"{old.raw(key)!r} is not a section", f"write {key}: with keys below it")
    old.put("objective", "chat")
    old.carry_table()
    _carry_sources(old)
    old.put("data.packing", "concatenate")  # a row is a conversation; artel's own default may pack them
    _carry_tokenizer(old)
    _carry_model(old)
    _carry_quantization(old)
    _carry_adapter(old)
    # The trainer's bf16 and fp16 go before the dtype in which impruver loads the weights.
    precision = trainer.carry_precision(old, {"bf16": "bf16", "fp16": "fp16"})
    dtype = old.get("model.dtype", read.one_of(_PRECISIONS))
    if precision:
        old.leave("model.dtype", f"the trainer's bf16 or fp16 takes precedence; {_WEIGHTS}")
    elif dtype is not None:
        old.put("train.precision", dtype, "model.dtype")
    if old.raw("model.dtype") == "fp64":
        old.leave("model.dtype", "artel's highest precision is fp32")
    trainer.carry_arguments(old)
    trainer.fit_together(old)
    return old.finish()


def _carry_sources(old: Conversion) -> None:
    count = old.members("datasets")
    block = _carry_block(old)
    if count:
        old.put("data.sources", [_source(old, number) for number in range(count)])
        old.put("data.validation", 0.05)  # impruver shuffles, and takes the last twentieth
        keys = _of_each(old, "only_target_loss")
        all_learned = [key for key in keys if old.get(key, read.flag) is False]
        if len(all_learned) == count:
            old.put("chat.train_on", "all", *all_learned)
        for key in all_learned if len(all_learned) < count else ():
            old.leave(key, "chat.train_on applies to all data sets, and the others train on the assistant's turns only")
    else:
        _carry_files(old)
    if block is not None:
        keys = ["tokenizer.max_tokens_count", *_of_each(old, "max_tokens_count")]
        old.put("data.block", block, *(key for key in keys if old.raw(key) == block))


def _of_each(old: Conversion, name: str) -> list[str]:
    keys = (f"datasets.{number}.{name}" for number in range(old.members("datasets")))
    return [key for key in keys if old.has(key)]


def _carry_block(old: Conversion) -> int | None:
    """data.block: the most tokens that a conversation of any data set may have. impruver has a number for each."""
    keys = ["tokenizer.max_tokens_count", *_of_each(old, "max_tokens_count")]
    counts = {key: old.get(key, read.at_least_one) for key in keys}
    block: int | None = max((count for count in counts.values() if count is not None), default=None)
    for key, count in counts.items():
        if count not in (None, block):
            old.leave(key, f"data.block applies to all data sets: {block}")
    return block


def _source(old: Conversion, number: int) -> dict[str, Any]:
    at, dotted = f"datasets.{number}", f"data.sources.{number}"
    if old.has(at):
        old.refuse(at, f"{old.raw(at)!r} is no data set", "write - name: FILE, or OWNER/NAME")
    elif not old.has(f"{at}.name"):
        old.refuse(at, "has no name", "write name: FILE, or OWNER/NAME")
    name, subset = old.get(f"{at}.name", read.text) or "", old.get(f"{at}.subset", read.text) or ""
    split, rows = old.get(f"{at}.split", _split) or ("train", "")
    data_set = local_or_hub(name, subset, split)
    # without a converter impruver takes the field `messages`
    converter, mapping = old.get(f"{at}.converter", _converter) or "messages", old.get(f"{at}.mapping", _mapping)
    source = {"path": data_set.path, "format": "chat", "converter": converter}
    old.comment(f"{dotted}.path", data_set.doubt)
    old.decided(f"{dotted}.path", f"{at}.name", *([f"{at}.subset", f"{at}.split"] if data_set.is_on_hub else []))
    old.decided(f"{dotted}.converter", f"{at}.converter")
    if mapping:
        source["mapping"] = mapping
        old.decided(f"{dotted}.mapping", f"{at}.mapping")
    if rows:
        source["rows"] = rows
        old.decided(f"{dotted}.rows", f"{at}.split")
    if split != "train" and not data_set.is_on_hub:
        old.leave(f"{at}.split", f"give the files of that split in {dotted}.path, and a slice in .rows")
    for end in ("bos", "eos"):
        old.leave(f"{at}.add_global_{end}", "the chat template begins and ends conversations")
    return source


def _converter(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"\w+(\.\w+)+", value):
        raise ValueError(f"{value!r} is not module.function; write impruver.instruction_to_messages")
    module, _, function = value.rpartition(".")
    own = module.split(".")[0] == "impruver" and function in _CONVERTERS
    return _CONVERTERS[function] if own else f"{module}:{function}"


def _split(value: object) -> tuple[str, str]:
    """The split's name and its slice: `train[:1000]`. Anything else that can be written there is kept as a name."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a split; write train[:1000]")
    match = SLICED_SPLIT.fullmatch(value.strip())
    return (match[1], match[2] or "") if match else (value, "")


def _mapping(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for pair in value.items() for name in pair):
        raise ValueError(f"{value!r} does not say which field is which; write mapping: {{instruction: question}}")
    return value


def _carry_files(old: Conversion) -> None:
    """Without data sets: files of conversations, which impruver calls composed."""
    if old.within("datasets") or old.raw("datasets"):
        old.refuse("datasets", "is not a list of data sets", "write - name: FILE below it")
    elif not old.has("train_path"):
        fix = "write datasets: with - name: FILE and converter: below it"
        old.problems.append(Problem(old.place, "names no text", fix))
    files = {key: old.get(key, read.text) for key in ("train_path", "val_path")}
    for key, file in files.items():
        if file is not None and _holds_tokens(Path(file)):
            what = f"{file} holds token ids, not text"
            old.refuse(key, what, "give the original datasets")
    old.put("data.sources", [{"path": files["train_path"], "format": "chat"}], "train_path")
    old.put("data.validation", files["val_path"] or 0.05, "val_path")


def _holds_tokens(file: Path) -> bool:
    """True for a file that impruver's compose_dataset wrote."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return '"input_ids"' in lines.readline(1000)
    except OSError:  # a missing or unreadable file is reported when its text is read
        return False


def _carry_tokenizer(old: Conversion) -> None:
    name = old.get("tokenizer.name", read.text)
    if name is not None and name != old.get("model.name", read.text):
        old.put("tokenizer.from", name, "tokenizer.name")
    is_auto = old.raw("tokenizer.class") == "transformers.AutoTokenizer"
    old.leave_unless(is_auto, "tokenizer.class", "the tokenizer's files define its class")
    template = old.get("tokenizer.chat_template", read.text)
    if template is None:
        what = "if the tokenizer has none, impruver formats messages as bos, role, line feed, text, eos; artel as "
        old.note(f"tokenizer.chat_template is not given: {what}chatml; for another write chat.template: FILE")
    elif not re.search(r"\{[{%]", template):  # a name or a file, not the template itself
        old.put("chat.template", template, "tokenizer.chat_template")


def _carry_model(old: Conversion) -> None:
    name = old.get("model.name", read.text)
    if name is not None:
        old.put("model.from", name, "model.name")
        for key in ("model.config_class", *old.within("model.config")):
            old.leave(key, "model.name is set, and artel uses its config.json")
        is_auto = old.raw("model.class") == "transformers.AutoModelForCausalLM"
        reason = "artel takes the class from config.json and runs no code that comes with the model"
        old.leave_unless(is_auto, "model.class", reason)
    elif old.has("model.config_class") or old.within("model.config"):
        _carry_architecture(old)
    elif not old.has("model.name"):
        fix = "write model: {name: FOLDER-OR-HUB-ID}, or config_class and config for one from scratch"
        old.problems.append(Problem(old.place, "names no model", fix))


def _carry_architecture(old: Conversion) -> None:
    """A model from scratch: the model type of its config class, and the keys that this type has."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    of_class, of_config = "model.config_class", "model.config.model_type"
    classes = sorted(CONFIG_MAPPING_NAMES.values())
    module, _, class_name = (old.get(of_class, read.text) or "").rpartition(".")
    written = old.get(of_config, read.one_of({name: name for name in CONFIG_MAPPING_NAMES}))
    model_type = getattr(transformers, class_name).model_type if class_name in classes else written
    if model_type is None:
        near = difflib.get_close_matches(class_name, classes, 1)
        if class_name:
            fix = f"did you mean transformers.{near[0]}?" if near else "write model.config.model_type: gpt2, llama …"
            old.refuse(of_class, f"transformers has no {class_name}", fix)
        elif not old.has(of_config):
            fix = "write config_class: transformers.GPT2Config"
            old.refuse("model", "does not say of what type the model is", fix)
        return
    old.put(of_config, model_type, of_class, of_config)
    if class_name and (module != "transformers" or class_name not in classes):
        old.leave(of_class, f"artel does not run custom code and uses {model_type} of transformers")
    if written not in (None, model_type):
        old.leave(of_config, f"config_class says {model_type}")
    known_classes = ("AutoModelForCausalLM", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type))
    is_known = old.raw("model.class") in [f"transformers.{name}" for name in known_classes]
    old.leave_unless(is_known, "model.class", f"artel uses the causal model {model_type} of transformers")
    plain = CONFIG_MAPPING[model_type]()
    known = {*plain.to_dict(), *plain.attribute_map}
    for key in old.within("model.config"):
        name = key.removeprefix("model.config.")
        if name == "model_type" or old.knows(key):
            continue
        if name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            old.leave(key, "artel uses the tokenizer's")
        elif name in known:
            old.put(key, old.raw(key), key)
        else:
            old.leave(key, _GONE.get(name) or f"{model_type} has no such key{did_you_mean(name, known)}")


def _carry_quantization(old: Conversion) -> None:
    four, eight = old.get("model.load_in_4bit", read.flag), old.get("model.load_in_8bit", read.flag)
    if not four and not eight:
        return
    key, kind = ("model.load_in_8bit", "int8") if eight else ("model.load_in_4bit", "nf4")
    if four and eight:
        old.leave("model.load_in_4bit", "load_in_8bit is also true and takes precedence in impruver")
    if not old.has("model.name"):
        old.leave(key, "a model from scratch cannot be quantized")
    elif not old.within("lora"):
        what = "quantized weights cannot be trained and need an adapter"
        old.leave(key, f"{what}; write model.lora: {{rank: 16}} and model.quantize: {kind}")
    else:
        old.put("model.quantize", kind, key)


def _carry_adapter(old: Conversion) -> None:
    if old.within("lora") and old.has("model.name"):
        trainer.carry_lora(old, _LORA)
        is_none = old.get("lora.bias", read.one_of("none all lora_only")) == "none"
        old.leave_unless(is_none, "lora.bias", "biases are not trained")
        is_causal = old.raw("lora.task_type") == "CAUSAL_LM"
        old.leave_unless(is_causal, "lora.task_type", "the objective decides: chat")
    for key in old.within("lora") if not old.has("model.name") else ():
        old.leave(key, "an adapter needs a pretrained model, and this one is from scratch")


IMPRUVER = Tool("impruver", is_impruver, convert_impruver, is_no_run_file=True)
