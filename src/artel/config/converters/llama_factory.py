"""Convert the YAML of LLaMA-Factory, with the data sets in dataset_info.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from artel.config.converters import readers as read
from artel.config.converters import trainer
from artel.config.converters.conversion import Conversion, ConvertedConfig, KeyTable
from artel.config.converters.hub_data import local_or_hub, path_exists
from artel.config.converters.tools import Tool
from artel.config.converters.yaml_text import top_level_keys
from artel.errors import InputError, Problem
from artel.registry import OBJECTIVES, OPTIMIZERS

_TOOL_KEYS = {
    "stage",
    "finetuning_type",
    "template",
    "cutoff_len",
    "dataset",
    "dataset_dir",
    "do_train",
    "infer_backend",
}
_VERSION_1 = {"model_class", "train_dataset", "dist_config", "peft_config", "kernel_config", "quant_config"}
_STAGES = {"pt": "causal", "sft": "chat", "dpo": "preference", "kto": "preference"}
_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_FORMATS = {"causal": "auto", "chat": "chat", "preference": "preference"}
_LORA_KEYS = "lora_rank lora_alpha lora_dropout use_rslora use_dora additional_target lora_target"
_INFO = "dataset_info.json"
# Columns of a row: artel's names → LLaMA-Factory's names, and the default columns of the latter.
_ALPACA = {"instruction": "prompt", "input": "query", "output": "response", "system": "system", "history": "history"}
_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
_ROLES = {
    "user_tag": {"human", "user"},
    "assistant_tag": {"gpt", "assistant"},
    "system_tag": {"system"},
    "observation_tag": {"observation", "tool", "function", "function_response", "tool_response"},
    "function_tag": {"function_call", "tool_call"},
}
_TEXT_ONLY_NOTE = "ignored: artel trains on text only and does not read images or audio"
_INFERENCE_ADVICE = "applies to trained models: artel chat, artel generate, artel evaluate"
_OFFLOAD_ADVICE = "to hold all weights in host memory write parallel.offload: cpu"

# fmt: off
TABLE = KeyTable(
    defaults={
        **trainer.DEFAULTS, "stage": "sft", "finetuning_type": "lora", "dataset_dir": "data", "cutoff_len": 2048,
        "val_size": 0, "lora_rank": 8, "lora_dropout": 0, "lora_target": "all", "pref_beta": 0.1,
        "pref_loss": "sigmoid", "simpo_gamma": 0.5,
    },
    converted={
        "output_dir": ("run", read.text),
        "cutoff_len": ("data.block", read.positive_int),
        "tokenized_path": ("data.store", read.text),
        "preprocessing_num_workers": ("prepare.workers", read.positive_int),
        "model_name_or_path": ("model.from", read.text),
        "disable_gradient_checkpointing": ("train.activation_checkpointing", read.switch("none", "full")),
        "early_stopping_steps": ("validate.patience", read.positive_int),
        "tensor_model_parallel_size": ("parallel.tensor", read.positive_int),
        "pipeline_model_parallel_size": ("parallel.pipeline", read.positive_int),
        "context_parallel_size": ("parallel.context", read.positive_int),
        "expert_model_parallel_size": ("parallel.expert", read.positive_int),
        "hyper_parallel_cp_size": ("parallel.context", read.positive_int),
        "sequence_parallel": ("parallel.sequence", read.flag),
    },
    implied={
        "fp8 pure_bf16": "train.precision sets the precision",
        "train_on_prompt mask_history": "artel trains on the assistant's turns",
        "template": "the objective causal has no conversations",
        "packing neat_packing": "samples are not packed",
        "pref_loss": "stage kto sets the loss",
        "lora_* use_rslora use_dora additional_target": "there is no adapter",
        "quantization_method": "bitsandbytes quantizes",
        "quantization_type": "artel's 4 bits are nf4",
        "plot_loss": "artel report draws the loss",
        "buffer_size": "the order of samples depends on seed only",
        "preprocessing_batch_size": "affects only the speed of preparing",
        "data_shared_file_system": "processes on a shared file system find the store",
        "ignore_pad_token_for_loss": "padding is never a target",
        "enable_liger_kernel use_unsloth use_unsloth_gc use_v1_kernels fp8_backend fp8_enable_fsdp_float8_all_gather":
            "artel chooses kernels by device and model; the results are the same",
        "use_reentrant_gc": "artel uses non-reentrant checkpointing",
        "upcast_layernorm": "trained weights are in fp32",
        "upcast_lmhead_output": "the loss is computed in fp32",
        "use_kv_cache": "no effect: it applies to generation, not to training",
        "print_param_status": "the console prints the number of trained parameters",
        "create_new_adapter": "a run starts with a new adapter",
        "compute_accuracy": "not needed: artel evaluate RUN computes the accuracy",
        "include_effective_tokens_per_second": "metrics.jsonl has tokens_per_second",
        "split_special_tokens": "artel treats special tokens in texts as plain text",
        "use_megatron_bridge use_mca": "ignored: artel has only one training loop; remove it",
    },
    unsupported={
        "adapter_name_or_path":
            "to continue training it, merge it (artel export FOLDER merged --merge) and write model.from: merged",
        "pissa_init pissa_iter pissa_convert": "not supported: adapters start at zero, as in LoRA",
        "loraplus_lr_ratio loraplus_lr_embedding":
            "not supported: both matrices of an adapter use the same learning rate",
        "oft_* module_dropout": "not supported: OFT adapters; artel's adapters are LoRA",
        "use_llama_pro freeze_*": "write model.freeze, patterns of frozen layers; everything else is trained",
        "mixture_of_depths shift_attn block_diag_attn": "ignored: artel does not change layers or attention",
        "rope_scaling": "write model.rope: {type: yarn, factor: 4}, with the factor that you need",
        "moe_aux_loss_coef": "set router_aux_loss_coef in the model's config.json",
        "train_from_scratch": "write model: {config: {model_type: …}} instead of from",
        "double_quantization": "ignored: artel's 4 bits are nf4 with double quantization",
        "quantization_*": "write model.quantize: int8 or nf4",
        "resize_vocab add_tokens add_special_tokens new_special_tokens new_special_tokens_config init_special_tokens":
            "ignored: the tokenizer's own files define the special tokens; change them there",
        "media_dir image_* video_* audio_* crop_to_patches use_audio_in_video": _TEXT_ONLY_NOTE,
        "default_system": "add it to the conversations, or to a template: chat.template: FILE",
        "tool_format": "ignored: the chat template formats tools and calls",
        "enable_thinking preserve_thinking": "write chat.reasoning: keep, last or drop",
        "disable_shuffling": "the order of samples depends on seed only",
        "mix_strategy interleave_probs":
            "artel uses all samples; data.sources.weight sets how often an epoch repeats those of a source",
        "eval_on_each_dataset": "ignored: validation texts come from one path",
        "val_size": "ignored: eval_dataset is given",
        "pref_ftx pref_bco_weight ld_alpha": "not supported: artel's preference losses do not have this term",
        "ref_model ref_model_adapters ref_model_quantization_bit":
            "not supported: the reference model is the model before training",
        "use_adam_mini use_galore use_apollo use_badam galore_* apollo_* badam_*":
            f"artel has no such optimizer; train.optimizer is one of {', '.join(OPTIMIZERS.names)}",
        "use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha":
            "the loss is the mean cross-entropy of the target tokens",
        "use_swanlab swanlab_*": trainer.TRACKER_ADVICE,
        "use_kt kt_*": _OFFLOAD_ADVICE,
        "use_hyper_parallel hyper_parallel_args": "write the sizes in parallel",
        "enable_torch_profiler profiler_*": "write profile: true",
        "master_addr master_port": "not needed: artel launch starts processes",
        "ray_*": "processes start with artel launch; for preparing texts with Ray write prepare.engine: ray",
        "plot": "not needed: artel report draws it",
        "ppo_* reward_*": "not converted: for reinforcement learning write objective: policy, with keys of its own",
        "export_*": "artel export RUN DIR writes a trained model",
        "eval_num_beams predict_with_generate infer_* vllm_* sglang_* do_sample temperature top_p top_k num_beams "
        "max_length max_new_tokens repetition_penalty length_penalty": _INFERENCE_ADVICE,
        "ms_hub_token om_hub_token": "artel does not support this hub",
        "offload_folder": "to hold weights in host memory write parallel.offload: cpu",
        "bias_activation_fusion apply_rope_fusion overlap_param_gather overlap_grad_reduce use_distributed_optimizer "
        "moe_grouped_gemm moe_token_dispatcher_type recompute_granularity use_packed_sequences export_hf_on_finish "
        "virtual_pipeline_model_parallel_size": "is for Megatron; artel's strategies are in the section parallel",
    },
)
# fmt: on


def is_llama_factory(text: str) -> bool:
    """True for LLaMA-Factory's YAML, even if it is invalid or of version 1."""
    keys = top_level_keys(text)
    has_tool_keys = "model_name_or_path" in keys and keys & {*_TOOL_KEYS, "export_dir"}
    return "data" not in keys and bool(has_tool_keys or ("model" in keys and len(keys & _VERSION_1) >= 2))


def convert_llama_factory(text: str, location: str) -> ConvertedConfig:
    """Convert LLaMA-Factory's configuration. Raise InputError with all problems.

    Relative paths are relative to the working folder.
    """
    conversion = Conversion.from_yaml(text, location, TABLE, trainer.TABLE)
    _check_trains(conversion)
    objective = _convert_objective(conversion)
    conversion.convert_table()
    if not conversion.has("model_name_or_path"):
        conversion.problems.append(Problem(location, "has no model", "write model_name_or_path: FOLDER-OR-HUB-ID"))
    _convert_data(conversion, objective)
    conversion.report_unless(
        conversion.raw_value("model_revision") == "main", "model_revision", trainer.MAIN_BRANCH_ADVICE
    )
    _convert_adapter(conversion)
    if not trainer.convert_precision(conversion, {"fp8": "fp8", "pure_bf16": "bf16", "bf16": "bf16", "fp16": "fp16"}):
        conversion.put("train.precision", "fp32")
        advice = "train.precision: auto is faster on most GPUs"
        conversion.note(f"neither bf16 nor fp16 is true, so the precision is fp32; {advice}")
    if conversion.raw_value("pure_bf16"):
        conversion.put("train.weights", "bf16", "pure_bf16")
    trainer.convert_arguments(conversion)
    if conversion.get("use_muon", read.flag):
        conversion.put("train.optimizer", "muon", "use_muon")
        conversion.convert("learning_rate", "train.muon_learning_rate", read.positive_number)
        conversion.report("use_muon", trainer.find_optimizer("muon")[1])
    trainer.resolve_conflicts(conversion)
    return conversion.finish()


def _check_trains(conversion: Conversion) -> None:
    """Raise InputError for configurations of version 1, and for configurations that do not train."""
    version_1 = next((key for key in conversion.source_keys() if key.partition(".")[0] in _VERSION_1), "")
    if version_1:
        fix = "write the keys of version 0: model_name_or_path, dataset, finetuning_type"
        conversion.add_problem(version_1, "is a key of LLaMA-Factory's version 1, which is not supported", fix)
    elif conversion.has("export_dir"):
        fix = "use artel export FOLDER merged --merge"
        conversion.add_problem("export_dir", "merges an adapter, but nothing is trained", fix)
    elif not conversion.raw_value("do_train"):
        fix = "write do_train: true; for a trained model use artel chat, evaluate or generate"
        conversion.add_problem("do_train", "is not true, so nothing is trained", fix)
    if conversion.problems:
        raise InputError(conversion.problems)


def _convert_objective(conversion: Conversion) -> str:
    stage = conversion.get("stage", read.one_of("pt sft rm ppo dpo kto"))
    if stage == "rm":
        fix = "write objective: reward yourself"
        conversion.add_problem("stage", f"rm trains a reward model, which is not converted: {fix}")
    elif stage == "ppo":
        fix = "write pt, sft, dpo or kto; to learn from rewards, write objective: policy in a run file of your own"
        conversion.add_problem("stage", "ppo is not converted", fix)
    objective = _STAGES.get(stage, "chat")
    conversion.put("objective", objective, "stage")
    if objective != "preference":
        return objective
    loss = (
        "kto" if stage == "kto" else conversion.get("pref_loss", read.one_of("sigmoid hinge ipo kto_pair orpo simpo"))
    )
    loss_key = "stage" if stage == "kto" else "pref_loss"
    if loss is not None:
        conversion.put("preference.loss", _LOSSES.get(loss, "kto" if loss == "kto" else "dpo"), loss_key)
    if loss not in (None, "kto", *_LOSSES):
        conversion.report("pref_loss", f"artel has {', '.join(_LOSSES.values())} for pairs and uses dpo")
    conversion.convert("pref_beta", "preference.beta", read.non_negative_number)
    # Its SimPO has beta * (difference - gamma / beta), artel's beta * difference - margin: the same number.
    if loss == "simpo":
        conversion.convert("simpo_gamma", "preference.margin", read.non_negative_number)
    conversion.convert("dpo_label_smoothing", "preference.smoothing", read.non_negative_number)
    conversion.convert("kto_chosen_weight", "preference.desirable", read.non_negative_number)
    conversion.convert("kto_rejected_weight", "preference.undesirable", read.non_negative_number)
    return objective


def _convert_data(conversion: Conversion, objective: str) -> None:
    """Convert the data sets and the keys that apply to them."""
    data_sets = _DataSets(conversion, objective)
    names = conversion.get("dataset", _read_names) or []
    if not names and not conversion.problems:
        conversion.problems.append(
            Problem(conversion.location, "has no data set", "write dataset: NAME, as in dataset_info.json")
        )
    sources = [data_sets.source(name, f"data.sources.{index}.path") for index, name in enumerate(names)]
    max_rows = conversion.get("max_samples", read.positive_int)
    row_limit = {"rows": f"[:{max_rows}]"} if max_rows else {}
    conversion.put("data.sources", [source | row_limit for source in sources], "dataset")
    conversion.mark_converted("data.sources", "dataset_dir", "max_samples")
    eval_names = conversion.get("eval_dataset", _read_names)
    if eval_names:
        path = data_sets.source(eval_names[0], "data.validation")["path"]
        conversion.put("data.validation", path, "eval_dataset")
        if len(eval_names) > 1:
            conversion.report("eval_dataset", "validation texts come from one path: artel uses the first")
    else:
        trainer.convert_validation_split(conversion, "val_size")
    conversion.put("data.dedup.exact", False)
    if objective != "causal":
        what = "LLaMA-Factory truncates longer samples, artel skips them"
        conversion.report("cutoff_len", f"{what}; to truncate write chat.too_long: truncate_left")
    _convert_packing(conversion, objective)
    learns_prompts = conversion.get("train_on_prompt", read.flag)
    learns_last = conversion.get("mask_history", read.flag)
    if objective == "chat" and learns_prompts:
        conversion.put("chat.train_on", "all", "train_on_prompt")
    elif objective == "chat" and learns_last:
        conversion.put("chat.train_on", "last", "mask_history")
    template = conversion.get("template", read.text)
    if objective != "causal" and template is not None:
        conversion.put("chat.template", "chatml" if template == "chatml" else "auto", "template")
        if template != "chatml":
            what = f"LLaMA-Factory has its own template for {template}; artel uses the tokenizer's"
            conversion.report("template", f"{what}; for another write chat.template: FILE")


def _read_names(value: object) -> list[str]:
    """Read comma-separated names, or a list of names. Raise ValueError for other values."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) and item.strip() for item in items):
        raise ValueError(f"{value!r} is not a list of names; write dataset: name, other")
    return [item.strip() for item in items]


def _convert_packing(conversion: Conversion, objective: str) -> None:
    packs = {key: conversion.get(key, read.flag) for key in ("packing", "neat_packing")}
    if objective == "causal":
        if packs["packing"] is False:
            conversion.report("packing", "artel joins texts and cuts them every data.block tokens")
        conversion.put("data.packing", "concatenate", "packing")  # LLaMA-Factory's own default in this stage
    elif OBJECTIVES[objective].packs_samples:  # artel's own default may pack them
        conversion.put("data.packing", "best_fit" if any(packs.values()) else "concatenate", *packs)
    else:
        for key in (key for key, is_on in packs.items() if is_on):
            conversion.report(key, trainer.PACKING_ADVICE.format(objective, "cutoff_len"))


class _DataSets:
    """The data sets in `dataset_info.json`, from a local folder or a folder above the configuration."""

    def __init__(self, conversion: Conversion, objective: str) -> None:
        self._conversion = conversion
        self._objective = objective
        name = conversion.get("dataset_dir", read.text) or "data"
        self._is_online = name == "ONLINE"
        self._folder = Path(name)
        self._entries: dict[str, Any] = {}
        if name.startswith("REMOTE:"):
            fetch = f"hf download --repo-type dataset {name[7:]}"
            conversion.report("dataset_dir", f"download it and write its folder: {fetch}")
            self._folder = Path("data")
        parents = [] if conversion.location == "-" else Path(conversion.location).absolute().parents
        folders = [self._folder, *(parent / name for parent in parents)] if name == str(self._folder) else []
        folder = next((folder for folder in folders if path_exists(str(folder / _INFO))), None)
        self._is_described = folder is not None and not self._is_online
        if folder is None or self._is_online:
            return
        self._folder = folder
        try:
            entries = json.loads((folder / _INFO).read_text(encoding="utf-8-sig"))
            self._entries = entries if isinstance(entries, dict) else {}
        except (OSError, ValueError) as error:
            conversion.add_problem("dataset_dir", f"{folder / _INFO} cannot be read: {error}", "fix it")

    def source(self, name: str, target_key: str) -> dict[str, Any]:
        """Return the source of a data set. Comments and notes refer to `target_key` of the run file."""
        entry = {"hf_hub_url": name} if self._is_online else self._entries.get(name)
        if not isinstance(entry, dict):
            reason = f"{_INFO} has no {name}" if self._is_described else f"{self._folder / _INFO} does not exist"
            self._conversion.comment(target_key, f"your file of the data set {name}: {reason}")
            return {"path": str(self._folder / f"{name}.json"), "format": _FORMATS[self._objective]}
        columns = entry["columns"] if isinstance(entry.get("columns"), dict) else {}
        source: dict[str, Any] = {"path": self._find_path(name, entry, target_key), "format": _FORMATS[self._objective]}
        if self._objective == "causal":
            source["format"] = "parquet" if source["path"].endswith(".parquet") else "auto"
            if not source["path"].endswith(".txt"):
                source["field"] = columns.get("prompt", "instruction")
        else:
            self._add_form(source, name, entry, columns or _COLUMNS, columns)
        if isinstance(entry.get("num_samples"), int):
            source["rows"] = f"[:{entry['num_samples']}]"
        unread = [column for column in ("images", "videos", "audios") if columns.get(column)]
        if unread:
            self._conversion.note(
                f"{_INFO}: {name}: {', '.join(unread)} of its rows are not read: artel trains on text only"
            )
        return source

    def _find_path(self, name: str, entry: dict[str, Any], target_key: str) -> str:
        keys = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name")
        key = next((key for key in keys if isinstance(entry.get(key), str)), "")
        if not key:
            self._conversion.comment(target_key, f"your file of the data set {name}: {_INFO} has none")
        elif key == "hf_hub_url":
            data_set = local_or_hub(entry[key], str(entry.get("subset") or ""), str(entry.get("split") or "train"))
            self._conversion.comment(target_key, data_set.note)
            return data_set.path
        elif key != "file_name":
            if key != "cloud_file_name":
                where = f"which is not on the Hugging Face hub: {entry[key]}"
                self._conversion.comment(target_key, f"your files of the data set {name}, {where}")
            return str(entry[key])
        return str(self._folder / entry.get(key, f"{name}.json"))

    def _add_form(
        self,
        source: dict[str, Any],
        name: str,
        entry: dict[str, Any],
        known_columns: dict[str, Any],
        columns: dict[str, Any],
    ) -> None:
        """Add `converter` and `mapping` of the rows. `known_columns`: `columns`, or LLaMA-Factory's defaults."""
        tags = entry["tags"] if isinstance(entry.get("tags"), dict) else {}
        mapping: dict[str, Any] = {}
        if entry.get("formatting", "alpaca") == "alpaca":
            converter = "alpaca"
            mapping = {field: known_columns.get(tool_field) for field, tool_field in _ALPACA.items()}
            if self._objective != "chat" and columns.get("kto_tag"):
                mapping["completion"] = mapping.pop("output")
        else:
            messages = known_columns.get("messages")
            converter = "sharegpt" if messages == "conversations" else "messages"
            mapping = {"messages": messages} if converter == "messages" else {}
            mapping |= {"role": tags.get("role_tag"), "content": tags.get("content_tag")}
            mapping["system"] = columns.get("system")
            for tag in (tag for tag, roles in _ROLES.items() if tags.get(tag) and tags[tag] not in roles):
                what = f"artel does not know the role {tags[tag]} ({tag}) and rejects it"
                self._conversion.note(f"{_INFO}: {name}: {what}; rename it, or write converter: module:function")
        if self._objective == "chat":
            source["converter"] = converter
        mapping |= {field: columns.get(field) for field in ("chosen", "rejected", "tools")}
        mapping["label"] = columns.get("kto_tag")
        known_names = {"from", "value"} if mapping.get("role") == "from" else set()
        mapping = {field: column for field, column in mapping.items() if column and column not in {field, *known_names}}
        if mapping:
            source["mapping"] = mapping


def _convert_adapter(conversion: Conversion) -> None:
    """Convert finetuning_type with its sizes, and the quantization of base weights."""
    kind = conversion.get("finetuning_type", read.one_of("lora oft freeze full"))
    bits = conversion.get("quantization_bit", read.positive_int)
    if kind == "freeze":
        conversion.put("model.freeze", [], "finetuning_type")
        conversion.comment("model.freeze", "patterns of the frozen parameters: ['*embed*', 'model.layers.0.*', …]")
        what = "lists trained layers, but model.freeze lists frozen ones"
        conversion.report("finetuning_type", f"{what}: write patterns there, or all layers are trained")
    elif kind == "full":
        conversion.mark_converted("model.from", "finetuning_type")
    if kind in ("freeze", "full"):
        conversion.report("quantization_bit", "4 and 8 bits need an adapter: finetuning_type: lora")
        return
    rank = conversion.get("lora_rank", read.positive_int)
    if rank and not conversion.has("lora_alpha"):
        conversion.replace("lora_alpha", 2 * rank)  # LLaMA-Factory's own default
    for key in ("additional_target", "lora_target"):
        if isinstance(conversion.raw_value(key), str):
            conversion.replace(key, [name.strip() for name in conversion.raw_value(key).split(",")])
    trainer.convert_lora(conversion, _LORA_KEYS)
    conversion.mark_converted("model.lora", "finetuning_type")
    if kind == "oft":
        conversion.report("finetuning_type", "artel only has LoRA and uses lora_rank 8")
    if bits in (4, 8):
        conversion.put("model.quantize", "nf4" if bits == 4 else "int8", "quantization_bit")
    elif bits:
        conversion.report("quantization_bit", "artel supports 8 and 4 bits; write model.quantize: int8 or nf4")
    if conversion.get("quantization_method", read.text) not in (None, "bnb", "bitsandbytes"):
        conversion.report("quantization_method", "artel quantizes with bitsandbytes: model.quantize: int8 or nf4")
    if conversion.raw_value("quantization_type") == "fp4":
        conversion.report("quantization_type", "artel's 4 bits are nf4")


LLAMA_FACTORY = Tool("LLaMA-Factory", is_llama_factory, convert_llama_factory, never_a_run_file=True)
