"""Checks of a model's configuration and files, before any text or weights are read."""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel

from artel.config import ModelConfig
from artel.errors import InputError
from artel.models.loading.heads import check_direction, check_head, check_sizes, custom_classes, model_class
from artel.models.loading.language_part import find_language_part, is_multimodal
from artel.models.loading.model_config import change_context, check_rotary, known_keys
from artel.models.loading.model_folder import check_folder, read_config
from artel.models.loading.pretrained import check_multimodal, check_saved, plan_language_part
from artel.models.loading.structure import build_outline, position_limit
from artel.models.lora.adapters import adapter_problems, freeze, require_peft
from artel.models.quantization import require_bitsandbytes


def check_model_keys(config: ModelConfig) -> None:
    """Raise InputError for a model type that transformers does not have, and for wrong keys of its configuration."""
    problems = [] if config.config is None else known_keys(config.config)[1]
    if problems:
        raise InputError(problems)


def check_model(config: ModelConfig, auto_class: str) -> None:
    """Raise InputError for a wrong model type, key, folder or head, a missing package, or unknown layer names."""
    if config.lora is not None:
        require_peft()
    if config.quantize != "none":
        require_bitsandbytes()
    check_model_keys(config)
    if config.config is not None:
        check_head(config.config["model_type"], auto_class, "model.config.model_type")
        draft = CONFIG_MAPPING[config.config["model_type"]]()
        vars(draft).update(config.config)  # unchecked: a wrong value is reported when the model is built
        check_direction(draft, auto_class, "model.config.model_type")
    elif config.from_ is not None and Path(config.from_).is_dir():
        check_folder(Path(config.from_))
        saved_config, _ = read_config(config.from_, runs_code=config.runs_code)
        if is_multimodal(saved_config, auto_class):
            check_multimodal(config, saved_config)
            find_language_part(saved_config, config.from_)
        else:
            check_head(
                saved_config.model_type,
                auto_class,
                "model.from",
                custom_classes(saved_config, runs_code=config.runs_code),
            )
            check_direction(saved_config, auto_class, "model.from")
        change_context(saved_config, config)
    if config.rope is not None and (model := build_outline(config, auto_class)) is not None:
        check_rotary(model)
    if config.lora is not None or config.freeze:
        _check_names(config, auto_class)


def _check_names(config: ModelConfig, auto_class: str) -> None:
    """Raise InputError for names in `lora` and `freeze` that the model does not have."""
    model = build_outline(config, auto_class)
    if model is None:
        return
    problems = adapter_problems(model, config.lora) if config.lora is not None else []
    if auto_class == "AutoModelForQuestionAnswering":
        # Other names may belong to heads that the objective adds: they are checked when the model is built.
        problems = [problem for problem in problems if problem.where == "model.lora.target"]
    elif config.freeze:
        freeze(model, config.freeze)
    if problems:
        raise InputError(problems)


def check_positions(model: PreTrainedModel, block: int) -> None:
    """Raise InputError if `block` is longer than the model's longest input."""
    positions = position_limit(model)
    if positions is not None and positions < block:
        what = f"{block} tokens are more than the model's {positions} positions"
        raise InputError.at("data.block", what, f"write data.block: {positions} or less")


def check_pretrained(config: ModelConfig, auto_class: str) -> None:
    """Raise InputError if the folder of a run's pretrained model lacks weights. Reads headers only."""
    if config.from_ is not None and Path(config.from_).is_dir():
        saved_config, _ = read_config(config.from_, runs_code=config.runs_code)
        if is_multimodal(saved_config, auto_class):
            plan_language_part(config, saved_config)
            return
        cls = model_class(saved_config, auto_class, {}, runs_code=config.runs_code)
        check_saved(config.from_, saved_config, cls, for_training=True)


def check_complete_folder(name: str) -> None:
    """Raise InputError if a folder lacks weights of the class in its config.json, if transformers has the class."""
    config, _ = read_config(name)
    cls = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
        check_sizes(config)
        check_saved(name, config, cls, for_training=False)
