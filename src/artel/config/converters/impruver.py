"""Convert the YAML of impruver (EvilFreelancer/impruver)."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from artel.config.converters import readers as read
from artel.config.converters import trainer
from artel.config.converters.conversion import Conversion, ConvertedConfig, KeyTable
from artel.config.converters.hub_data import SLICED_SPLIT, local_or_hub
from artel.config.converters.tools import Tool
from artel.config.converters.yaml_text import suggest_similar, top_level_keys
from artel.config.yaml_lines import Key
from artel.errors import Problem

_SECTIONS = ("model", "lora", "tokenizer", "trainer", "ddp", "model.config")
_LORA_KEYS = (
    "lora.r lora.lora_alpha lora.lora_dropout lora.use_rslora lora.use_dora lora.modules_to_save lora.target_modules"
)
_CONVERTERS = {
    "instruction_to_messages": "alpaca",
    "reasoning_to_messages": "alpaca",  # it reads the field `reasoning` as reasoning
    "dialog_to_messages": "dialog",
    "char_dialog_to_messages": "character",
    "conversations_to_messages": "sharegpt",
    "bot_messages_to_messages": "messages",
}
_PRECISIONS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp64": "fp32",
               **dict.fromkeys(("fp32", "float32"), "fp32")}  # fmt: skip
_ATTENTION_NOTE = "artel chooses the attention kernel by device and model"
_DTYPE_ADVICE = "train.weights sets the dtype of trained weights, train.precision that of computation"

# fmt: off
TABLE = KeyTable(
    defaults={
        **trainer.DEFAULTS,
        # defaults of peft's LoraConfig
        "lora.r": 8, "lora.lora_alpha": 8, "lora.lora_dropout": 0, "lora.bias": "none",
    },
    converted={"output_dir": ("run", read.text)},
    implied={
        "tokenizer.name": "artel uses the model's tokenizer",
        "datasets.*.split": "artel uses all records",
        "datasets.*.only_target_loss": "artel trains on the assistant's turns",
        "model.load_in_4bit model.load_in_8bit": "weights are not quantized",
        "trainer.dataloader_*": "blocks are read from the token store without workers",
    },
    unsupported={
        "train_path val_path": "artel keeps prepared text in its token store (data.store or the cache)",
        "datasets.*.subset": "give the files of that subset in data.sources.path",
        "tokenizer.special_tokens": "ignored: the tokenizer's own files define the special tokens; change them there",
        "tokenizer.chat_template": "save it as a file and write chat.template: FILE",
        "model.attn_implementation model.config.attn_implementation model.config._attn_implementation": _ATTENTION_NOTE,
        "model.config.vocab_size":
            "artel uses the tokenizer's number of tokens; for a larger one write model.config.vocab_size",
        "model.config.dtype model.config.torch_dtype": _DTYPE_ADVICE,
        "lora.inference_mode": "artel trains adapters",
        "trainer.output_dir": "the run's folder is output_dir outside the section trainer",
        "lora.use_qalora lora.use_bdlora": "not supported: artel's adapters are LoRA, rsLoRA and DoRA",
        "ddp.ddp_find_unused_parameters": trainer.UNUSED_PARAMETERS_NOTE,
        "ddp.* trainer.ddp_*": trainer.LAUNCH_ADVICE,
    },
)
# Keys of older transformers that model types no longer have.
_REMOVED_KEYS = {
    "n_ctx": "transformers has removed it; the length is max_position_embeddings (n_positions)",
    "rope_theta": "write model.config.rope_parameters: {rope_type: default, rope_theta: …}",
    "rope_scaling": "write model.config.rope_parameters: {rope_type: …}",
}
# fmt: on


def is_impruver(text: str) -> bool:
    """True for impruver's YAML, even if it is invalid. `model` and `tokenizer` are keys of run files too."""
    keys = top_level_keys(text)
    tool_keys = {"output_dir", "train_path", "val_path", "datasets", "lora", "trainer", "ddp"}
    return "data" not in keys and len(keys & tool_keys) >= 2


def _is_value(key: Key) -> bool:
    """True for a key of a section, whatever its value is."""
    if key[0] == "datasets" or key[:2] == ("model", "config"):
        return len(key) == 3
    return len(key) == (2 if key[0] in _SECTIONS else 1)


def convert_impruver(text: str, location: str) -> ConvertedConfig:
    """Convert impruver's configuration. Raise InputError with all problems.

    Relative paths are relative to the working folder.
    """
    names = {f"trainer.{name}": name for name in trainer.NAMES}
    conversion = Conversion.from_yaml(text, location, TABLE, trainer.TABLE, names=names, is_value=_is_value)
    for key in filter(conversion.has, _SECTIONS):
        if not isinstance(conversion.raw_value(key), dict):
            conversion.add_problem(
                key, f"{conversion.raw_value(key)!r} is not a section", f"write {key}: with keys below it"
            )
    conversion.put("objective", "chat")
    conversion.convert_table()
    _convert_sources(conversion)
    conversion.put("data.packing", "concatenate")  # a row is a conversation; artel's own default may pack them
    _convert_tokenizer(conversion)
    _convert_model(conversion)
    _convert_quantization(conversion)
    _convert_adapter(conversion)
    # The trainer's bf16 and fp16 take precedence over the dtype that impruver loads the weights in.
    precision = trainer.convert_precision(conversion, {"bf16": "bf16", "fp16": "fp16"})
    dtype = conversion.get("model.dtype", read.one_of(_PRECISIONS))
    if precision:
        conversion.report("model.dtype", f"the trainer's bf16 or fp16 takes precedence; {_DTYPE_ADVICE}")
    elif dtype is not None:
        conversion.put("train.precision", dtype, "model.dtype")
    if conversion.raw_value("model.dtype") == "fp64":
        conversion.report("model.dtype", "artel's highest precision is fp32")
    trainer.convert_arguments(conversion)
    trainer.resolve_conflicts(conversion)
    return conversion.finish()


def _convert_sources(conversion: Conversion) -> None:
    num_datasets = conversion.list_length("datasets")
    block = _convert_block(conversion)
    if num_datasets:
        conversion.put("data.sources", [_convert_source(conversion, index) for index in range(num_datasets)])
        conversion.put("data.validation", 0.05)  # impruver shuffles and holds out the last 5 %
        keys = _dataset_keys(conversion, "only_target_loss")
        fully_trained = [key for key in keys if conversion.get(key, read.flag) is False]
        if len(fully_trained) == num_datasets:
            conversion.put("chat.train_on", "all", *fully_trained)
        for key in fully_trained if len(fully_trained) < num_datasets else ():
            conversion.report(
                key, "chat.train_on applies to all data sets, and the others train on the assistant's turns only"
            )
    else:
        _convert_files(conversion)
    if block is not None:
        keys = ["tokenizer.max_tokens_count", *_dataset_keys(conversion, "max_tokens_count")]
        conversion.put("data.block", block, *(key for key in keys if conversion.raw_value(key) == block))


def _dataset_keys(conversion: Conversion, name: str) -> list[str]:
    keys = (f"datasets.{index}.{name}" for index in range(conversion.list_length("datasets")))
    return [key for key in keys if conversion.has(key)]


def _convert_block(conversion: Conversion) -> int | None:
    """Return data.block: the maximum over all data sets of their maximum tokens per conversation."""
    keys = ["tokenizer.max_tokens_count", *_dataset_keys(conversion, "max_tokens_count")]
    counts = {key: conversion.get(key, read.positive_int) for key in keys}
    block: int | None = max((count for count in counts.values() if count is not None), default=None)
    for key, count in counts.items():
        if count not in (None, block):
            conversion.report(key, f"data.block applies to all data sets: {block}")
    return block


def _convert_source(conversion: Conversion, index: int) -> dict[str, Any]:
    prefix, target_key = f"datasets.{index}", f"data.sources.{index}"
    if conversion.has(prefix):
        conversion.add_problem(
            prefix, f"{conversion.raw_value(prefix)!r} is not a data set", "write - name: FILE, or OWNER/NAME"
        )
    elif not conversion.has(f"{prefix}.name"):
        conversion.add_problem(prefix, "has no name", "write name: FILE, or OWNER/NAME")
    name = conversion.get(f"{prefix}.name", read.text) or ""
    subset = conversion.get(f"{prefix}.subset", read.text) or ""
    split, rows = conversion.get(f"{prefix}.split", _read_split) or ("train", "")
    data_set = local_or_hub(name, subset, split)
    # Without a converter, impruver uses the field `messages`.
    converter = conversion.get(f"{prefix}.converter", _read_converter) or "messages"
    mapping = conversion.get(f"{prefix}.mapping", _read_mapping)
    source = {"path": data_set.path, "format": "chat", "converter": converter}
    conversion.comment(f"{target_key}.path", data_set.note)
    conversion.mark_converted(
        f"{target_key}.path", f"{prefix}.name", *([f"{prefix}.subset", f"{prefix}.split"] if data_set.is_on_hub else [])
    )
    conversion.mark_converted(f"{target_key}.converter", f"{prefix}.converter")
    if mapping:
        source["mapping"] = mapping
        conversion.mark_converted(f"{target_key}.mapping", f"{prefix}.mapping")
    if rows:
        source["rows"] = rows
        conversion.mark_converted(f"{target_key}.rows", f"{prefix}.split")
    if split != "train" and not data_set.is_on_hub:
        conversion.report(
            f"{prefix}.split", f"write the files of that split in {target_key}.path, and a slice in .rows"
        )
    for end in ("bos", "eos"):
        conversion.report(f"{prefix}.add_global_{end}", "the chat template starts and ends conversations")
    return source


def _read_converter(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"\w+(\.\w+)+", value):
        raise ValueError(f"{value!r} is not module.function; write impruver.instruction_to_messages")
    module, _, function = value.rpartition(".")
    is_known = module.split(".")[0] == "impruver" and function in _CONVERTERS
    return _CONVERTERS[function] if is_known else f"{module}:{function}"


def _read_split(value: object) -> tuple[str, str]:
    """Return (name of the split, slice) for `train[:1000]`. Any other text is returned as a name."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{value!r} is not a split; write train[:1000]")
    match = SLICED_SPLIT.fullmatch(value.strip())
    return (match[1], match[2] or "") if match else (value, "")


def _read_mapping(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for pair in value.items() for name in pair):
        raise ValueError(f"{value!r} is not a mapping of fields; write e.g. mapping: {{instruction: question}}")
    return value


def _convert_files(conversion: Conversion) -> None:
    """Convert files of conversations, which impruver calls composed, if there are no data sets."""
    if conversion.keys_in("datasets") or conversion.raw_value("datasets"):
        conversion.add_problem("datasets", "is not a list of data sets", "write - name: FILE below it")
    elif not conversion.has("train_path"):
        fix = "write datasets: with - name: FILE and converter: below it"
        conversion.problems.append(Problem(conversion.location, "has no data sets", fix))
    files = {key: conversion.get(key, read.text) for key in ("train_path", "val_path")}
    for key, file in files.items():
        if file is not None and _has_tokens(Path(file)):
            what = f"{file} contains token ids, not text"
            conversion.add_problem(key, what, "use the original datasets")
    conversion.put("data.sources", [{"path": files["train_path"], "format": "chat"}], "train_path")
    conversion.put("data.validation", files["val_path"] or 0.05, "val_path")


def _has_tokens(file: Path) -> bool:
    """True if a file was written by impruver's compose_dataset."""
    try:
        with file.open(encoding="utf-8", errors="replace") as lines:
            return '"input_ids"' in lines.readline(1000)
    except OSError:  # a missing or unreadable file is reported when its text is read
        return False


def _convert_tokenizer(conversion: Conversion) -> None:
    name = conversion.get("tokenizer.name", read.text)
    if name is not None and name != conversion.get("model.name", read.text):
        conversion.put("tokenizer.from", name, "tokenizer.name")
    is_auto = conversion.raw_value("tokenizer.class") == "transformers.AutoTokenizer"
    conversion.report_unless(is_auto, "tokenizer.class", "the tokenizer's files define its class")
    template = conversion.get("tokenizer.chat_template", read.text)
    if template is None:
        what = "if the tokenizer has none, impruver formats messages as bos, role, line feed, text, eos; artel as "
        conversion.note(f"tokenizer.chat_template is not given: {what}chatml; for another write chat.template: FILE")
    elif not re.search(r"\{[{%]", template):  # a name or a file, not the template itself
        conversion.put("chat.template", template, "tokenizer.chat_template")


def _convert_model(conversion: Conversion) -> None:
    name = conversion.get("model.name", read.text)
    if name is not None:
        conversion.put("model.from", name, "model.name")
        for key in ("model.config_class", *conversion.keys_in("model.config")):
            conversion.report(key, "model.name is set, and artel uses its config.json")
        is_auto = conversion.raw_value("model.class") == "transformers.AutoModelForCausalLM"
        reason = "artel uses the class in config.json and does not run code that comes with the model"
        conversion.report_unless(is_auto, "model.class", reason)
    elif conversion.has("model.config_class") or conversion.keys_in("model.config"):
        _convert_architecture(conversion)
    elif not conversion.has("model.name"):
        fix = "write model: {name: FOLDER-OR-HUB-ID}, or config_class and config for a new model"
        conversion.problems.append(Problem(conversion.location, "has no model", fix))


def _convert_architecture(conversion: Conversion) -> None:
    """Convert a new model: the model type of its config class, and the keys of this type."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    class_key, type_key = "model.config_class", "model.config.model_type"
    classes = sorted(CONFIG_MAPPING_NAMES.values())
    module, _, class_name = (conversion.get(class_key, read.text) or "").rpartition(".")
    config_type = conversion.get(type_key, read.one_of({name: name for name in CONFIG_MAPPING_NAMES}))
    model_type = getattr(transformers, class_name).model_type if class_name in classes else config_type
    if model_type is None:
        near = difflib.get_close_matches(class_name, classes, 1)
        if class_name:
            fix = f"did you mean transformers.{near[0]}?" if near else "write model.config.model_type: gpt2, llama …"
            conversion.add_problem(class_key, f"transformers has no {class_name}", fix)
        elif not conversion.has(type_key):
            fix = "write e.g. config_class: transformers.GPT2Config"
            conversion.add_problem("model", "has no model type", fix)
        return
    conversion.put(type_key, model_type, class_key, type_key)
    if class_name and (module != "transformers" or class_name not in classes):
        conversion.report(class_key, f"artel does not run custom code and uses {model_type} of transformers")
    if config_type not in (None, model_type):
        conversion.report(type_key, f"config_class is of type {model_type}")
    known_classes = ("AutoModelForCausalLM", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type))
    is_known = conversion.raw_value("model.class") in [f"transformers.{name}" for name in known_classes]
    conversion.report_unless(is_known, "model.class", f"artel uses the causal model {model_type} of transformers")
    default_config = CONFIG_MAPPING[model_type]()
    known = {*default_config.to_dict(), *default_config.attribute_map}
    for key in conversion.keys_in("model.config"):
        name = key.removeprefix("model.config.")
        if name == "model_type" or conversion.knows(key):
            continue
        if name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            conversion.report(key, "artel uses the tokenizer's")
        elif name in known:
            conversion.put(key, conversion.raw_value(key), key)
        else:
            conversion.report(
                key, _REMOVED_KEYS.get(name) or f"{model_type} has no such key{suggest_similar(name, known)}"
            )


def _convert_quantization(conversion: Conversion) -> None:
    uses_4bit = conversion.get("model.load_in_4bit", read.flag)
    uses_8bit = conversion.get("model.load_in_8bit", read.flag)
    if not uses_4bit and not uses_8bit:
        return
    key, kind = ("model.load_in_8bit", "int8") if uses_8bit else ("model.load_in_4bit", "nf4")
    if uses_4bit and uses_8bit:
        conversion.report("model.load_in_4bit", "load_in_8bit is also true and takes precedence in impruver")
    if not conversion.has("model.name"):
        conversion.report(key, "a new model cannot be quantized")
    elif not conversion.keys_in("lora"):
        what = "quantized weights cannot be trained and need an adapter"
        conversion.report(key, f"{what}; write model.lora: {{rank: 16}} and model.quantize: {kind}")
    else:
        conversion.put("model.quantize", kind, key)


def _convert_adapter(conversion: Conversion) -> None:
    if conversion.keys_in("lora") and conversion.has("model.name"):
        trainer.convert_lora(conversion, _LORA_KEYS)
        is_none = conversion.get("lora.bias", read.one_of("none all lora_only")) == "none"
        conversion.report_unless(is_none, "lora.bias", "biases are not trained")
        is_causal = conversion.raw_value("lora.task_type") == "CAUSAL_LM"
        conversion.report_unless(is_causal, "lora.task_type", "the objective decides: chat")
    for key in conversion.keys_in("lora") if not conversion.has("model.name") else ():
        conversion.report(key, "an adapter needs a pretrained model, but this one is new")


IMPRUVER = Tool("impruver", is_impruver, convert_impruver, never_a_run_file=True)
