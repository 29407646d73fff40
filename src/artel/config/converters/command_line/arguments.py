"""The arguments of run_clm.py and run_mlm.py beside TrainingArguments, in a run file."""

from __future__ import annotations

import re
from typing import Any

from artel.config.converters.hub_data import local_or_hub
from artel.config.converters.keys import OldKeys, Section, a_flag, a_share, a_text, at_least_one, from_zero
from artel.config.converters.training_arguments import leave_unknown_arguments
from artel.errors import Problem

_USUAL_BLOCK = {"causal": 1024, "masked": 512}
_TOKEN = "the hub's own login is used: hf auth login"
_AGREE = {
    "overwrite_cache": "texts are prepared again when they or the keys change",
    "streaming": "texts are prepared once, and tokens read from the store",
    "keep_linebreaks": "line breaks stay",
    "use_fast_tokenizer": "the tokenizer is a fast one",
    "use_slow_tokenizer": "the tokenizer is a fast one",
    "low_cpu_mem_usage": "weights are read into the place where they stay",
    "attn_implementation": "artel chooses how attention is computed by device and model",
    "pad_to_max_length": "changes the speed, and nothing that is learned",
    "token": _TOKEN,
    "use_auth_token": _TOKEN,
}
_LEAVE = {
    "cache_dir": "models and data sets of the hub are kept where HF_HOME says",
    "with_tracking": "write track: [console, jsonl, tensorboard], or wandb",
    "adam_epsilon2": "AdamW has one epsilon",
}


def carry_data(old: OldKeys, objective: str) -> None:
    """The text, how it is held out, and how long a block is."""
    source: dict[str, Any] = {}
    name, file = old.read("dataset_name", a_text), old.read("train_file", a_text)
    subset = _text(old, "dataset_config_name")
    data_set = local_or_hub(name or file or "", subset)
    if name:
        source["path"] = data_set.path
        source["format"] = "parquet" if data_set.is_on_hub else "auto"
        old.decided("data.sources", "dataset_name", "dataset_config_name")
        old.leave("train_file", "dataset_name is given, and is taken")
        if data_set.doubt:
            old.comment("data.sources.0.path", data_set.doubt)
    elif file:
        source["path"] = file
        if file.endswith((".csv", ".tsv")):
            source["format"] = "csv"
        old.decided("data.sources", "train_file")
    else:
        source["path"] = "TEXTS.txt"
        old.comment("data.sources.0.path", "your text: the command has neither --train_file nor --dataset_name")
        old.tell("the command names no text: write your files in data.sources.0.path")
    if objective == "masked" and old.read("line_by_line", a_flag):
        if file and not name and not file.endswith((".csv", ".tsv", ".json", ".jsonl")):
            source["document"] = "line"
        old.put("data.packing", "best_fit", "line_by_line")
    else:
        old.agree("line_by_line", "texts are joined, and cut into blocks")
    old.put("data.sources", [source])
    _carry_validation(old, name, subset)
    key = "max_seq_length" if objective == "masked" else "block_size"
    block = old.read(key, at_least_one)
    old.put("data.block", block or _USUAL_BLOCK[objective], key)
    if block is None:
        old.tell(
            f"{key} is not given: data.block is {_USUAL_BLOCK[objective]}; the script takes what the tokenizer says"
        )
    if objective == "masked":
        old.carry("mlm_probability", "masked.rate", a_share)
    old.carry("preprocessing_num_workers", "prepare.workers", at_least_one)
    old.leave("max_train_samples", "is a number of blocks; write train.steps, or data.sources.budget_documents")
    old.carry("max_eval_samples", "validate.blocks", at_least_one)
    old.put("data.dedup.exact", False)
    old.tell("the script joins texts without anything between them; artel writes the tokenizer's end token there")


def _carry_validation(old: OldKeys, name: str | None, subset: str) -> None:
    """A file, or the data set's own split; else a share of the text."""
    file = old.read("validation_file", a_text)
    percent = old.read("validation_split_percentage", from_zero)
    if file:
        old.put("data.validation", file, "validation_file")
        old.leave("validation_split_percentage", "validation_file is given, and is taken")
        return
    data_set = local_or_hub(name or "", subset, "validation") if name else None
    if data_set and data_set.is_on_hub and not old.has("validation_split_percentage"):
        old.put("data.validation", data_set.path, "dataset_name", "dataset_config_name")
        old.comment("data.validation", "the data set's own split; where it has none, write 0.05")
    elif percent is not None:
        old.put("data.validation", percent / 100, "validation_split_percentage")


def _text(old: OldKeys, key: str) -> str:
    """A name that may look like a number."""
    value = old.raw(key)
    return "" if value is None else str(value)


def carry_model(old: OldKeys) -> None:
    """A pretrained model, or one from scratch by its type."""
    name = old.read("model_name_or_path", a_text)
    config = old.read("config_name", a_text)
    model_type = old.read("model_type", a_text)
    if name:
        old.put("model.from", name, "model_name_or_path")
        old.leave("config_name", "model_name_or_path is given, and its own config.json is taken")
        old.agree("model_type", "the model's config.json says so")
        old.leave("config_overrides", "model_name_or_path is given, and its own config.json is taken")
    elif model_type or config:
        model_type = model_type or _type_of(config or "")
        old.put("model.config.model_type", model_type or "gpt2", "model_type", "config_name")
        if config:
            old.comment("model.config.model_type", f"and further keys of the config.json of {config}")
            old.leave("config_name", "write the keys of its config.json in model.config")
        _carry_overrides(old)
    else:
        fix = "write --model_name_or_path FOLDER-OR-HUB-ID, or --model_type TYPE for one from scratch"
        old.problems.append(Problem(old.place, "names no model", fix))
    tokenizer = old.read("tokenizer_name", a_text)
    if tokenizer and tokenizer != name:
        old.put("tokenizer.from", tokenizer, "tokenizer_name")
    old.agree("tokenizer_name", "the tokenizer is that of the model")
    if old.raw("model_revision") in (None, "main"):
        old.agree("model_revision", "the main branch is taken")
    old.leave("model_revision", "the main branch is taken; fetch that one (hf download --revision), name its folder")
    if old.raw("trust_remote_code") is True:
        old.leave(
            "trust_remote_code", f"code beside a model is not run; where it must, write model.trust_remote_code: {name}"
        )
    old.agree("trust_remote_code", "code beside a model is not run")


def _type_of(name: str) -> str:
    """The model type that the name of a model begins with: roberta of roberta-base."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    last = name.rpartition("/")[2].lower()
    return max((kind for kind in CONFIG_MAPPING_NAMES if last.startswith(kind)), key=len, default="")


def _carry_overrides(old: OldKeys) -> None:
    """`n_embd=1024,n_head=16`: keys of the new model's configuration."""
    overrides = old.read("config_overrides", a_text)
    for override in (overrides or "").split(","):
        name, _, value = override.strip().partition("=")
        if not name:
            continue
        number = float(value) if re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", value) else None
        written = {"true": True, "false": False}.get(value.lower(), value)
        parsed = written if number is None else int(number) if re.fullmatch(r"-?\d+", value) else number
        old.put(f"model.config.{name}", parsed, "config_overrides")


def leave_the_rest(old: OldKeys) -> None:
    for key in old.unasked():
        if key in _AGREE:
            old.agree(key, _AGREE[key])
        elif key in _LEAVE:
            old.leave_if_on(key, _LEAVE[key])
    leave_unknown_arguments(Section(old), {*_AGREE, *_LEAVE, "block_size", "max_seq_length", "train_file"})
