"""The YAML of LLaMA-Factory as a run file: its data sets, model, adapter and training.

A key that is not carried over is reported, also an unknown one.
"""

from __future__ import annotations

from artel.config.converters.fitting import fit_together
from artel.config.converters.keys import (
    Converted,
    Section,
    YamlKeys,
    a_flag,
    a_text,
    above_zero,
    at_least_one,
    top_level_keys,
)
from artel.config.converters.llama_factory.data import carry_data
from artel.config.converters.llama_factory.model import carry_adapter, carry_model, carry_precision
from artel.config.converters.llama_factory.names import leave_the_rest
from artel.config.converters.optimizers import MUON_RATE
from artel.config.converters.tool import Tool
from artel.config.converters.training_arguments import TRAINER_DEFAULTS, carry_trainer, leave_trainer_rest
from artel.errors import InputError

_OWN = {"stage", "finetuning_type", "template", "cutoff_len", "dataset", "dataset_dir", "do_train", "infer_backend"}
_VERSION_1 = {"model_class", "train_dataset", "dist_config", "peft_config", "kernel_config", "quant_config"}


def is_llama_factory(text: str) -> bool:
    """True for LLaMA-Factory's YAML, also a broken one and one of its version 1."""
    keys = top_level_keys(text)
    has_own = "model_name_or_path" in keys and keys & {*_OWN, "export_dir"}
    return "data" not in keys and bool(has_own or ("model" in keys and len(keys & _VERSION_1) >= 2))


def convert_llama_factory(text: str, place: str) -> Converted:
    """The run file of LLaMA-Factory's configuration. Relative paths start at the current folder, as there.

    Raises InputError with all problems.
    """
    old = YamlKeys(text, place, _DEFAULTS)
    _refuse_others(old)
    old.carry("output_dir", "run", a_text)
    carry_data(old)
    carry_model(old)
    carry_adapter(old)
    carry_precision(old)
    _carry_training(old)
    leave_the_rest(old)
    fit_together(old)
    return old.converted(_ORDER)


def _refuse_others(old: YamlKeys) -> None:
    """Configurations of version 1, and those that do not train. Raises InputError."""
    version_1 = next((key for key in old.given() if key.partition(".")[0] in _VERSION_1), "")
    if version_1:
        old.refuse(
            version_1,
            "is a key of LLaMA-Factory's version 1, which is not read; write the keys of version 0: "
            "model_name_or_path, dataset, finetuning_type",
        )
    elif old.has("export_dir"):
        old.refuse("export_dir", "merges an adapter and trains nothing; artel export FOLDER merged --merge does that")
    elif not old.peek("do_train"):
        fix = "write do_train: true; a trained model is used by artel chat, evaluate and generate"
        old.refuse("do_train", f"is not true, so nothing is trained; {fix}")
    if old.problems:
        raise InputError(old.problems)


def _carry_training(old: YamlKeys) -> None:
    disabled = old.read("disable_gradient_checkpointing", a_flag)
    if disabled is not None:
        mode = "none" if disabled else "full"
        old.put("train.activation_checkpointing", mode, "disable_gradient_checkpointing")
    trainer = Section(old)
    carry_trainer(trainer)
    leave_trainer_rest(trainer)
    if old.read("use_muon", a_flag):
        old.put("train.optimizer", "muon", "use_muon")
        old.carry("learning_rate", "train.muon_learning_rate", above_zero)
        old.leave("use_muon", MUON_RATE)
    old.carry("early_stopping_steps", "validate.patience", at_least_one)
    for key, dotted in _SIZES.items():
        old.carry(key, dotted, at_least_one)
    old.carry("sequence_parallel", "parallel.sequence", a_flag)


_SIZES = {
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "context_parallel_size": "parallel.context",
    "expert_model_parallel_size": "parallel.expert",
    "hyper_parallel_cp_size": "parallel.context",
}
_ORDER = tuple(
    "run seed objective data prepare tokenizer model chat preference train validate parallel checkpoint log "
    "track".split()
)
# Defaults of LLaMA-Factory that differ from artel's, so that the run stays the same.
_DEFAULTS = {
    **TRAINER_DEFAULTS,
    "stage": "sft",
    "finetuning_type": "lora",
    "dataset_dir": "data",
    "cutoff_len": 2048,
    "val_size": 0,
    "lora_rank": 8,
    "lora_dropout": 0,
    "lora_target": "all",
    "pref_beta": 0.1,
    "pref_loss": "sigmoid",
    "simpo_gamma": 0.5,
}
LLAMA_FACTORY = Tool("LLaMA-Factory", is_llama_factory, convert_llama_factory, is_no_run_file=True)
