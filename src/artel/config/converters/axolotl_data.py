"""Convert the data sets of axolotl's YAML."""

from __future__ import annotations

import re
from typing import Any

from artel.config.converters import readers as read
from artel.config.converters import trainer
from artel.config.converters.conversion import Conversion
from artel.config.converters.hub_data import SLICED_SPLIT, DataSet, local_or_hub
from artel.errors import Problem
from artel.registry import OBJECTIVES

SAMPLE_ORDER_NOTE = "the order of samples depends on seed only"
_TEXTS = ("completion", "pretrain")  # types of data sets that are plain texts
_LOADERS = ("json", "jsonl", "csv", "parquet", "text", "arrow")  # as `path`, these are names of loaders
# Roles that artel knows by these names.
_ROLES = {
    "system": {"system", "developer"},
    "user": {"user", "human", "prompter", "operator"},
    "assistant": {"assistant", "gpt", "chatgpt", "bot", "model", "char"},
    "tool": {"tool", "function", "observation", "function_response", "tool_response", "ipython"},
}
# (pattern of a data set's type, converter, artel's names of its fields). The first matching pattern applies.
_ORCA = {"instruction": "question", "output": "response", "system": "system_prompt"}
_ARGILLA = {"prompt": "instruction", "chosen": "chosen_response", "rejected": "rejected_response"}
_FORMS: dict[str, tuple[tuple[str, str, dict[str, str]], ...]] = {
    "chat": (
        (r"alpaca_chat\.load_qa|jeopardy|jeopardy_bot.*", "alpaca", {"instruction": "question", "output": "answer"}),
        (r"alpaca_chat\.load_camel_ai", "alpaca", {"instruction": "message_1", "output": "message_2"}),
        (r"alpaca_w_system\.load_open_orca.*|orcamini.*", "alpaca", _ORCA),
        (r"(alpaca|gpteacher|reflection|explainchoice|concisechoice|summarizetldr)\b.*|alpaca_\w+.*", "alpaca", {}),
        (r"(sharegpt|llama2_chat|pygmalion)\b.*", "sharegpt", {}),
        (r"(chat_template|messages)\b.*", "messages", {}),
        (r"oasst\b.*", "oasst", {}),
    ),
    "preference": (
        (r"chatml\.intel|llama3\.intel", "auto", {"prompt": "question"}),
        (r"(chatml|llama3)\.argilla", "auto", _ARGILLA),
        (r"(chatml|llama3)\.icr", "auto", {"prompt": "input"}),
        (r"chat_template\.default", "auto", {}),
    ),
}
_FORMATS = {"policy": "prompts"}
"""Formats of objectives; otherwise both have the same name."""
# artel's names of fields → keys of a data set that name them; the last key that is set applies.
_FIELDS = {
    "messages": ("field_messages",),
    "tools": ("field_tools",),
    "chosen": ("field_chosen", "type.field_chosen"),
    "rejected": ("field_rejected", "type.field_rejected"),
    "role": ("message_field_role", "message_property_mappings.role"),
    "content": ("message_field_content", "message_property_mappings.content"),
    **{name: (f"type.field_{name}",) for name in "instruction input output system prompt completion label".split()},
}
_READ_FIELDS = {
    "message_field_training": ("loss_weight", "weight", "train"),
    "field_thinking": ("reasoning_content", "thinking", "reasoning"),
}


def is_text(kind: object) -> bool:
    return isinstance(kind, str) and kind.partition(":")[0].partition(".")[0] in _TEXTS


def convert_data(conversion: Conversion, section: str, objective: str) -> None:
    """Convert the data sets and the keys that apply to them."""
    sources: list[dict[str, Any]] = []
    for prefix in (f"{section}.{index}" for index in range(conversion.list_length(section))):
        if objective == "chat" and is_text(conversion.raw_value(f"{prefix}.type")):
            for key in conversion.keys_in(prefix):
                conversion.report(key, "chat needs conversations; train on plain text in a separate run")
        else:
            sources.append(_convert_source(conversion, prefix, f"data.sources.{len(sources)}", objective))
    if isinstance(conversion.raw_value(section), str):  # pretraining_dataset: NAME
        data_set = local_or_hub(conversion.raw_value(section))
        sources.append({"path": data_set.path, "format": "parquet" if data_set.is_on_hub else "auto"})
        conversion.mark_converted("data.sources.0.path", section)
        conversion.comment("data.sources.0.path", data_set.note)
    if not sources:
        conversion.problems.append(
            Problem(conversion.location, "no data set is configured", "write datasets: with - path: FILE below it")
        )
    conversion.put("data.sources", sources)
    test_keys = conversion.keys_in("test_datasets")
    if test_keys:
        data_set = local_or_hub(conversion.get("test_datasets.0.path", read.text) or "", split="test")
        conversion.put("data.validation", data_set.path, "test_datasets.0.path")
        conversion.comment("data.validation", data_set.note)
        for key in test_keys:
            conversion.report(key, "validation texts come from one path and are read like the first of data.sources")
    else:
        trainer.convert_validation_split(conversion, "val_set_size")
    _convert_packing(conversion, objective)
    learns_all = conversion.get("train_on_inputs", read.flag) if objective == "chat" else None
    if learns_all is not None:
        conversion.put("chat.train_on", "all" if learns_all else "assistant", "train_on_inputs")
    if conversion.get("excess_length_strategy", read.one_of("drop truncate raise")) == "drop" or objective == "causal":
        conversion.mark_implied("excess_length_strategy", "chat.too_long is skip")
    for key in ("shuffle_merged_datasets", "shuffle_before_merging_datasets"):
        if conversion.raw_value(key) is False:
            conversion.report(key, SAMPLE_ORDER_NOTE)
    for key in conversion.source_keys() if objective != "causal" else ():
        name = (
            conversion.raw_value(key)
            if key.rpartition(".")[2] == "chat_template" and key.count(".") in (0, 2)
            else None
        )
        if name is not None:
            conversion.put("chat.template", "chatml" if name == "chatml" else "auto", key)
        is_default = name == "tokenizer_default" or str(name).startswith("tokenizer_default_fallback_")
        if name not in (None, "chatml") and not is_default:
            what = f"axolotl has its own template for {name}; artel uses the tokenizer's"
            conversion.report(key, f"{what}; for another write chat.template: FILE")


def _convert_packing(conversion: Conversion, objective: str) -> None:
    """Convert sample_packing. artel always packs texts, packs conversations if asked, and never packs other samples."""
    packs = conversion.raw_value("sample_packing")
    if objective == "causal" and packs is False:
        conversion.report("sample_packing", "artel joins texts and cuts them every data.block tokens; axolotl pads")
    if (objective == "causal" and packs in (True, False)) or (
        objective != "causal" and OBJECTIVES[objective].packs_samples  # artel's own default may pack them
    ):
        conversion.put("data.packing", "best_fit" if packs is True else "concatenate", "sample_packing")
    elif packs is True:
        conversion.report("sample_packing", trainer.PACKING_ADVICE.format(objective, "sequence_len"))


def _convert_source(conversion: Conversion, prefix: str, target_key: str, objective: str) -> dict[str, Any]:
    """Return the source of the data set whose keys begin with `prefix`. `target_key`: its key in the run file."""
    data_set, paths = find_files(conversion, prefix)
    source: dict[str, Any] = {"path": paths[0] if len(paths) == 1 else paths}
    conversion.mark_converted(f"{target_key}.path", f"{prefix}.path")
    conversion.comment(f"{target_key}.path", data_set.note)
    text_format = "parquet" if data_set.is_on_hub else "jsonl"
    source["format"] = text_format if objective == "causal" else _FORMATS.get(objective, objective)
    if objective == "causal":
        field = conversion.get(f"{prefix}.field", read.text) or conversion.get(f"{prefix}.text_column", read.text)
        if field:
            source["field"] = field
            conversion.mark_converted(f"{target_key}.field", f"{prefix}.field", f"{prefix}.text_column")
        if prefix.startswith("datasets"):
            conversion.mark_converted("objective", f"{prefix}.type")
        if conversion.raw_value(f"{prefix}.skip"):
            source["rows"] = f"[{conversion.raw_value(f'{prefix}.skip')}:]"
            conversion.mark_converted(f"{target_key}.rows", f"{prefix}.skip")
    else:
        _convert_form(conversion, prefix, target_key, source, objective)
    match = SLICED_SPLIT.fullmatch(conversion.get(f"{prefix}.split", read.text) or "train")
    if match is None:
        conversion.report(f"{prefix}.split", "artel reads one split and one slice of it: data.sources.rows: '[:1000]'")
    elif match[2]:
        source["rows"] = match[2]
        conversion.mark_converted(f"{target_key}.rows", f"{prefix}.split")
    if match and match[1] != "train" and "refs/convert" in str(source["path"]):
        conversion.mark_converted(f"{target_key}.path", f"{prefix}.split")
    elif match and match[1] != "train":
        conversion.report(f"{prefix}.split", "write the files of that split in data.sources.path")
    _convert_roles(conversion, prefix)
    for name, fields in _READ_FIELDS.items():
        if conversion.raw_value(f"{prefix}.{name}") not in fields:
            conversion.report(f"{prefix}.{name}", f"artel reads {', '.join(fields)}; rename the field")
    return source


def find_files(conversion: Conversion, prefix: str) -> tuple[DataSet, list[str]]:
    """Return the data set with its path or hub id, and the paths of its files."""
    name = conversion.get(f"{prefix}.path", read.text) or ""
    files = conversion.get(f"{prefix}.data_files", read.names) or []
    split = (conversion.get(f"{prefix}.split", read.text) or "train").partition("[")[0] or "train"
    data_set = local_or_hub(name, conversion.get(f"{prefix}.name", read.text) or "", split)
    if name in _LOADERS and files:
        conversion.mark_converted("data.sources", f"{prefix}.path", f"{prefix}.data_files")
        return DataSet(files[0]), files
    if files:
        folder = f"hf://datasets/{name}" if data_set.is_on_hub else name.rstrip("/")
        conversion.mark_converted("data.sources", f"{prefix}.data_files")
        conversion.report(f"{prefix}.name", "data_files is set and takes precedence")
        return DataSet(folder), [file if "://" in file else f"{folder}/{file}" for file in files]
    if data_set.is_on_hub:
        conversion.mark_converted("data.sources", f"{prefix}.name")
    else:
        conversion.report(f"{prefix}.name", f"write the files of that subset in data.sources.path: {name}")
    return data_set, [data_set.path]


def _convert_form(conversion: Conversion, prefix: str, target_key: str, source: dict[str, Any], objective: str) -> None:
    """Convert `type` and field names to `converter` and `mapping`."""
    kind = conversion.raw_value(f"{prefix}.type")
    type_name = kind.partition(":")[0] if isinstance(kind, str) else ""
    form = next((form for form in _FORMS.get(objective, ()) if re.fullmatch(form[0], type_name)), None)
    converter, mapping = (form[1], dict(form[2])) if form else ("auto", {})
    for field, names in _FIELDS.items():
        for key in (f"{prefix}.{name}" for name in names if conversion.has(f"{prefix}.{name}")):
            mapping |= {field: conversion.get(key, read.text)}
            conversion.mark_converted(f"{target_key}.mapping", key)
            if mapping[field] in (None, field):
                del mapping[field]
    if objective == "chat" and conversion.keys_in(f"{prefix}.type"):
        converter = "alpaca"
    if converter == "messages" and "messages" not in mapping and conversion.raw_value(f"{prefix}.conversation"):
        mapping["messages"] = "conversations"
    if converter != "auto":
        source["converter"] = converter
    if mapping:
        source["mapping"] = mapping
    conversion.mark_converted(f"{target_key}.converter", f"{prefix}.type")
    if converter == "alpaca" and objective == "chat":
        what = "axolotl puts Alpaca's prompt around each question (Below is an instruction …)"
        artel_format = "artel formats the same fields with the tokenizer's chat template, or as User: … Assistant: …"
        conversion.report(f"{prefix}.type", f"{what}; {artel_format} if it has none")
    elif isinstance(kind, str) and form is None:
        fix = "if it does not, write data.sources.mapping, or converter: module:function"
        conversion.report(f"{prefix}.type", f"artel recognizes rows by their fields; {fix}")


def _convert_roles(conversion: Conversion, prefix: str) -> None:
    for key in conversion.keys_in(f"{prefix}.roles"):
        role = key.split(".")[3]
        known_roles = _ROLES.get(role, set())
        if not set(conversion.get(key, read.names) or []) <= known_roles:
            conversion.report(key, f"artel's names for {role} are {', '.join(sorted(known_roles))}; rename the others")
    trained = conversion.get(f"{prefix}.roles_to_train", read.names)
    if trained is not None:
        is_assistant = set(trained) <= _ROLES["assistant"]
        conversion.put("chat.train_on", "assistant" if is_assistant else "all", f"{prefix}.roles_to_train")
        if not is_assistant:
            conversion.report(f"{prefix}.roles_to_train", "chat.train_on is assistant, last or all: artel uses all")
