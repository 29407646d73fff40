"""Convert the YAML of TRL's script for GRPO (huggingface/trl): `trl grpo --config FILE`."""

from __future__ import annotations

from typing import Any

from artel.config.converters import grpo, trainer
from artel.config.converters import readers as read
from artel.config.converters.axolotl_data import find_files
from artel.config.converters.conversion import Conversion, ConvertedConfig, KeyTable
from artel.config.converters.hub_data import SLICED_SPLIT, local_or_hub
from artel.config.converters.tools import Tool
from artel.config.converters.yaml_text import top_level_keys
from artel.errors import Problem

_TOOL_KEYS = {"reward_funcs", "reward_model_name_or_path", "num_generations", "max_completion_length"}
_SCRIPT = "trl.rewards"
_REWARDS: dict[str, Any] = {
    "accuracy_reward": {"math": {"column": "solution"}},
    "think_format_reward": "format",
    "reasoning_accuracy_reward": {"function": f"{_SCRIPT}:reasoning_accuracy_reward"},
}
_OVERLONG = "get_soft_overlong_punishment"
_OVERLONG_LENGTH, _OVERLONG_TOKENS = 1280, 256  # as TRL's script sets them
_GRPO_ONLY = ("loss_type", "scale_rewards", "importance_sampling_level", "multi_objective_aggregation")
_NOT_IN_MIXTURE = "datasets is set and takes precedence"

# fmt: off
TABLE = KeyTable(
    defaults={
        **trainer.DEFAULTS, "learning_rate": 1e-6, "gradient_checkpointing": True, "logging_steps": 10,
        "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05,
    },
    converted={"output_dir": ("run", read.text), "model_name_or_path": ("model.from", read.text)},
    implied={
        "dtype torch_dtype": "weights are in fp32",
        "lora_task_type": "the objective sets the task",
        "use_bnb_nested_quant bnb_4bit_*": "artel's 4 bits are nf4 with double quantization",
        "dataset_streaming streaming": "texts are prepared once, and training reads tokens from the store",
        "ignore_bias_buffers torch_empty_cache_steps": "affects only the processes or the memory",
        "load_in_4bit load_in_8bit use_peft": "no effect: it is off",
        "datasets.*.split": "artel reads all records",
    },
    unsupported={
        "lora_target_parameters": "for experts stored in one tensor write model.lora.target: [auto, experts]",
        "cast_lm_head_to_fp32": "not supported: train.precision sets the dtype of every layer",
        "model_init_kwargs*": "not supported: artel loads weights in fp32, and chooses kernels itself",
        "dataset_name dataset_config dataset_train_split": _NOT_IN_MIXTURE,
        "dataset_test_split": "applies only with eval_strategy; write data.validation",
        "test_split_size": "write data.validation: 0.05, a fraction",
        "datasets.*.columns": "not needed: all columns of a row reach the rewards",
        "datasets.*.fraction": "write data.sources.weight",
        "datasets.*.data_dir": "write the files of that folder in data.sources.path",
        "model_revision": trainer.MAIN_BRANCH_ADVICE,
        "env.*": "is an environment variable; set it for artel train too",
    },
)
# fmt: on


def is_trl(text: str) -> bool:
    """True for the YAML of TRL's script for GRPO, even if it is invalid."""
    keys = top_level_keys(text)
    return "model_name_or_path" in keys and bool(keys & _TOOL_KEYS) and not keys & {"data", "rlhf_type", "stage"}


def convert_trl(text: str, location: str) -> ConvertedConfig:
    """Convert the configuration of a run with GRPO. Raise InputError with all problems."""
    conversion = Conversion.from_yaml(text, location, TABLE, grpo.build_table(), trainer.TABLE)
    _check_method(conversion)
    grpo.convert_grpo(conversion)
    conversion.convert_table()
    grpo.convert_block(conversion, "max_prompt_length")
    _convert_data(conversion)
    _convert_model(conversion)
    _convert_rewards(conversion)
    _convert_precision(conversion)
    trainer.convert_arguments(conversion, converts_batch=False)
    grpo.convert_rounds(conversion)
    trainer.resolve_conflicts(conversion)
    return conversion.finish()


def _check_method(conversion: Conversion) -> None:
    """Add problems for keys that only RLOOConfig has, and a note if no key tells `trl grpo` from `trl rloo`."""
    for key in ("normalize_advantages", "reward_clip_range"):
        if conversion.has(key):
            what = "belongs to trl rloo, and only trl grpo is converted"
            conversion.add_problem(key, what, "remove it, and write policy.preset: rloo in the run file")
    if not any(map(conversion.has, _GRPO_ONLY)):
        conversion.note(
            "read as a configuration of trl grpo; for trl rloo write policy.preset: rloo and policy.kl: 0.05"
        )


def _convert_data(conversion: Conversion) -> None:
    """Convert the prompts, and the split for validation if the configuration validates."""
    sources: list[dict[str, Any]] = []
    for index in range(conversion.list_length("datasets")):
        prefix = f"datasets.{index}"
        if conversion.get(f"{prefix}.data_files", read.names):
            sources.append({"path": find_files(conversion, prefix)[1], "format": "prompts"})
            keys = (f"{prefix}.path", f"{prefix}.data_files")
            conversion.mark_converted(f"data.sources.{index}.path", *keys)
            if "[" in str(conversion.raw_value(f"{prefix}.split")):
                conversion.report(f"{prefix}.split", "write the slice of rows: data.sources.rows: '[:1000]'")
        else:
            sources.append(_convert_source(conversion, index, f"{prefix}.path", f"{prefix}.name", f"{prefix}.split"))
    if not sources and conversion.has("dataset_name"):
        sources.append(_convert_source(conversion, 0, "dataset_name", "dataset_config", "dataset_train_split"))
    if not sources:
        conversion.problems.append(
            Problem(conversion.location, "has no data set", "write dataset_name: FILE-OR-HUB-ID")
        )
    conversion.put("data.sources", sources)
    conversion.put("data.dedup.exact", False)
    conversion.put("data.validation", 0)
    if conversion.raw_value("eval_strategy") in ("no", False):
        return
    if conversion.keys_in("datasets"):
        conversion.report("eval_strategy", "validates nothing without prompts; write data.validation, e.g. 0.05")
    elif conversion.has("dataset_name"):
        split = conversion.get("dataset_test_split", read.text) or "test"
        name, subset = str(conversion.raw_value("dataset_name")), conversion.raw_value("dataset_config") or ""
        data_set = local_or_hub(name, str(subset), split)
        if data_set.is_on_hub:
            conversion.put("data.validation", data_set.path, "dataset_test_split", "dataset_name")
        else:
            conversion.put("data.validation", 0.05, "eval_strategy")
            conversion.report("dataset_test_split", "write the file of that split in data.validation")


def _convert_source(conversion: Conversion, index: int, name: str, subset: str, split: str) -> dict[str, Any]:
    """Return the source of a data set, whose name, configuration and split are in these keys."""
    match = SLICED_SPLIT.fullmatch(conversion.get(split, read.text) or "train")
    if match is None:
        conversion.report(split, "artel reads one split and one slice of it: data.sources.rows: '[:1000]'")
    configuration = conversion.raw_value(subset)
    data_set = local_or_hub(
        conversion.get(name, read.text) or "", str(configuration or ""), match[1] if match else "train"
    )
    target_key = f"data.sources.{index}"
    source: dict[str, Any] = {"path": data_set.path, "format": "prompts"}
    conversion.mark_converted(f"{target_key}.path", name)
    conversion.comment(f"{target_key}.path", data_set.note)
    if match and match[2]:
        source["rows"] = match[2]
        conversion.mark_converted(f"{target_key}.rows", split)
    if data_set.is_on_hub:
        conversion.mark_converted(f"{target_key}.path", subset, split)
    else:
        conversion.report(subset, "write the files of that subset in data.sources.path")
        is_whole = match is not None and match[1] == "train"
        conversion.report_unless(is_whole, split, "write the files of that split in data.sources.path")
    return source


def _convert_model(conversion: Conversion) -> None:
    """Convert the adapter and the quantization of base weights."""
    if not conversion.has("model_name_or_path"):
        fix = "write model_name_or_path: FOLDER-OR-HUB-ID"
        conversion.problems.append(Problem(conversion.location, "has no model_name_or_path", fix))
    conversion.report_unless(
        conversion.raw_value("model_revision") == "main", "model_revision", trainer.MAIN_BRANCH_ADVICE
    )
    uses_adapter = conversion.get("use_peft", read.flag)
    if uses_adapter:
        keys = "lora_r lora_alpha lora_dropout use_rslora use_dora lora_modules_to_save lora_target_modules"
        trainer.convert_lora(conversion, keys)
        conversion.mark_converted("model.lora", "use_peft")
    else:
        for key in conversion.source_keys():
            if key.startswith("lora_") or key in ("use_rslora", "use_dora"):
                conversion.mark_implied(key, "there is no adapter; all weights are trained")
    for key, kind in (("load_in_4bit", "nf4"), ("load_in_8bit", "int8")):
        if conversion.get(key, read.flag) and uses_adapter:
            conversion.put("model.quantize", kind, key)
        elif conversion.raw_value(key):
            conversion.report(key, "4 and 8 bits need an adapter; write use_peft: true")


def _convert_rewards(conversion: Conversion) -> None:
    """Convert reward functions and the reward model. The penalty of long answers is a key of its own."""
    names = conversion.get("reward_funcs", read.names) or []
    folder = conversion.get("reward_model_name_or_path", read.text)
    models = [("reward_model_name_or_path", folder)] if folder else []
    if _OVERLONG in names:
        conversion.report("mask_truncated_completions", f"{_OVERLONG} decides: policy.overlong is punish")
        conversion.put("policy.overlong", "punish", "reward_funcs")
        length = conversion.output_value("policy.new_tokens") or _OVERLONG_LENGTH
        conversion.put("policy.overlong_tokens", min(_OVERLONG_TOKENS, length), "reward_funcs")
        if length != _OVERLONG_LENGTH:
            what = f"{_OVERLONG} of TRL's script counts from {_OVERLONG_LENGTH:,} tokens, artel from policy.new_tokens"
            conversion.report("reward_funcs", what)
        position = len(models) + names.index(_OVERLONG)
        weights = conversion.raw_value("reward_weights")
        if weights is not None and not isinstance(weights, list):
            weights = [weights]
        conversion.replace("reward_funcs", [name for name in names if name != _OVERLONG])
        if weights and position < len(weights):
            if weights[position] != 1:
                conversion.report(
                    "reward_weights", f"policy.overlong: punish has the weight 1, not {weights[position]}"
                )
            elif len(weights) == 1:
                conversion.mark_implied("reward_weights", "policy.overlong: punish has the weight 1")
            conversion.replace("reward_weights", [*weights[:position], *weights[position + 1 :]])
    if "accuracy_reward" in names:
        what = "TRL accepts only LaTeX in an answer, math also plain numbers"
        conversion.report("reward_funcs", f"accuracy_reward is math with the column solution; {what}")
    grpo.convert_rewards(conversion, "reward_funcs", "reward_weights", _REWARDS, models)


def _convert_precision(conversion: Conversion) -> None:
    """Convert bf16, which is TRL's default, and fp16, and the dtype of the weights."""
    if not trainer.convert_precision(conversion, {"bf16": "bf16", "fp16": "fp16"}):
        conversion.put("train.precision", "fp32" if conversion.has("bf16") else "bf16", "bf16", "fp16")
    has_adapter = conversion.output_value("model.lora") is not None
    for key in ("dtype", "torch_dtype"):
        dtype = conversion.raw_value(key)
        if has_adapter and conversion.output_value("model.quantize"):
            conversion.mark_implied(key, "model.quantize decides the dtype of the base weights")
        elif has_adapter and dtype == "auto":
            conversion.mark_implied(key, "model.lora.base: auto keeps the saved dtype")
        elif has_adapter and dtype in ("bfloat16", "bf16"):
            conversion.put("model.lora.base", "bf16", key)
        elif dtype == "auto":
            fix = "if the model is saved in bf16, write train.weights: bf16 to train in bf16 as TRL does"
            conversion.report(key, f"artel trains weights in fp32; {fix}")
        elif dtype in ("bfloat16", "bf16"):
            conversion.put("train.weights", "bf16", key)
        elif dtype in ("float16", "fp16"):
            conversion.report(key, "not supported: trained weights are in fp32 or bf16; write train.weights: bf16")


TRL = Tool("TRL", is_trl, convert_trl, never_a_run_file=True)
