"""Format the answers as a commented run file."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import yaml

from artel.config import ModelConfig
from artel.errors import InputError
from artel.models.loading.structure import build_outline, position_limit
from artel.objectives import Objective
from artel.planning.budget.sizes import Size
from artel.planning.hardware import find_hardware
from artel.planning.new.questions import Answers
from artel.planning.outline import is_available_offline
from artel.registry import FORMATS, OBJECTIVES

_BYTES_PER_PARAMETER = 16  # weights, gradients, two averages
_MEMORY_FRACTION = 0.6  # for weights, gradients and optimizer state; the rest is for activations
_MAX_BLOCK = 1024
_ENCODER = {
    "model_type": "modernbert",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
_ENCODER_DECODER = {
    "model_type": "t5",
    "d_model": 256,
    "d_kv": 32,
    "d_ff": 512,
    "num_layers": 4,
    "num_heads": 8,
    "feed_forward_proj": "gated-gelu",
}
_SMALL_CONFIGS = {"AutoModelForSeq2SeqLM": _ENCODER_DECODER}
_COMMENT_COLUMN = 36


def format_run_file(answers: Answers, name: str) -> str:
    """Return the text of a run file named `name`. Raise InputError if the model cannot be read."""
    objective: type[Objective] = OBJECTIVES[answers.objective]
    sections = [_header_lines(answers, name), _data_lines(answers, objective), *_model_lines(answers, objective)]
    return "\n".join(line.rstrip() for section in sections for line in section) + "\n"


def _header_lines(answers: Answers, name: str) -> Iterator[str]:
    quoted = shlex.quote(name)
    hardware_option = nproc_option = ""
    if answers.hardware:
        hardware_option = f" --hardware {shlex.quote(answers.hardware)}"
        count = find_hardware(answers.hardware).count
        nproc_option = f" --nproc {count}" if count > 1 else ""
    yield "# Written by artel new."
    yield f"#   {f'artel config check {quoted}':<48} check this file for errors"
    yield f"#   {f'artel plan {quoted}{hardware_option}':<48} predict memory, disk and time"
    yield f"#   {f'artel train {quoted}{nproc_option}':<48} train; run it again to resume after an interruption"
    yield "# Keys not set here are chosen for you and recorded in the run folder; artel config explain shows them"


def _data_lines(answers: Answers, objective: type[Objective]) -> Iterator[str]:
    text = answers.text
    path = text.paths[0] if len(text.paths) == 1 else list(text.paths)
    yield "data:"
    yield "  sources:"
    yield _with_comment(f"    - path: {_format_flow_yaml(path)}", text.describe().partition(":")[0])
    format_name = text.format_for(objective.learns_from)
    if not FORMATS[format_name].goes_by_suffix:
        yield _with_comment(f"      format: {format_name}", text.formats[format_name])
    yield _with_comment("  validation: 0.05", "held out from training, for validation")


def _model_lines(answers: Answers, objective: type[Objective]) -> Iterator[Iterator[str]]:
    """Yield the lines after `data`, for a model from scratch or a pretrained one."""
    task_comment = (
        f"{objective.presentation.verb}: {objective.presentation.does}" if objective.presentation.verb else ""
    )
    if answers.model:
        yield _pretrained_lines(answers, objective, task_comment)
    elif objective.packs_text and objective.generates:
        yield _auto_model_lines(answers, task_comment)
    else:
        yield _small_model_lines(answers, objective, task_comment)


def _auto_model_lines(answers: Answers, task_comment: str) -> Iterator[str]:
    yield _tokenizer_line()
    yield _with_comment(
        "model: {auto: true}", "from scratch; size, batch and learning rates are chosen for this text, time and machine"
    )
    yield _with_comment(f"objective: {answers.objective}", task_comment)
    yield from _train_lines(answers, {})


def _small_model_lines(answers: Answers, objective: type[Objective], task_comment: str) -> Iterator[str]:
    config = Size(4).config() if objective.generates else _SMALL_CONFIGS.get(objective.auto_class, _ENCODER)
    yield _with_comment("  block: 512", "maximum tokens per sequence")
    yield _tokenizer_line()
    yield _with_comment("model:", "from scratch and small: change the sizes as you like")
    yield f"  config: {_format_flow_yaml(config)}"
    yield _with_comment(f"objective: {answers.objective}", task_comment)
    yield from _train_lines(answers, {"batch": 32, "learning_rate": 1e-3})


def _pretrained_lines(answers: Answers, objective: type[Objective], task_comment: str) -> Iterator[str]:
    parameters, limit = _inspect_model(answers.model, objective)
    uses_adapters = _needs_adapters(answers, objective, parameters)
    rate = objective.presentation.finetuning_rate * (4 if uses_adapters else 1)
    yield _with_comment(f"  block: {min(_MAX_BLOCK, limit or _MAX_BLOCK)}", "maximum tokens per sequence")
    comment = f"{parameters / 1e6:,.3g} M parameters; its own tokenizer" if parameters else "its own tokenizer"
    yield "model:"
    yield _with_comment(f"  from: {_format_flow_yaml(answers.model)}", comment)
    if uses_adapters:
        yield _with_comment("  lora: {rank: 16, alpha: 32}", "small trainable matrices; the model's own are frozen")
    yield _with_comment(f"objective: {answers.objective}", task_comment)
    if not uses_adapters and _exceeds_one_gpu(answers, parameters):
        yield _with_comment("parallel: {data: fsdp}", "too large for one GPU, so its weights are sharded")
    yield from _train_lines(answers, {"batch": 32, "learning_rate": rate, "warmup": 0.03})


def _inspect_model(name: str, objective: type[Objective]) -> tuple[int, int | None]:
    """Return a pretrained model's number of parameters and its longest block. (0, None) if it is only on the hub.

    Raise InputError for a folder without a model.
    """
    if not is_available_offline(name):
        return 0, None
    model = build_outline(ModelConfig.model_validate({"from": name}), objective.auto_class)
    if model is None:
        raise InputError.at("--from", f"{name} cannot be opened for {objective.presentation.verb}", "use another model")
    return sum(parameter.numel() for parameter in model.parameters()), position_limit(model)


def _needs_adapters(answers: Answers, objective: type[Objective], parameters: int) -> bool:
    """True if training all weights would not fit. For a model of unknown size, true for chat and similar tasks."""
    if not parameters:
        return objective.generates and not objective.packs_text
    hardware = find_hardware(answers.hardware)
    return parameters * _BYTES_PER_PARAMETER > _MEMORY_FRACTION * hardware.memory_bytes * (
        1 if hardware.shares_memory else hardware.world_size
    )


def _exceeds_one_gpu(answers: Answers, parameters: int) -> bool:
    """True if training all weights would not fit on one GPU."""
    hardware = find_hardware(answers.hardware)
    return not hardware.shares_memory and parameters * _BYTES_PER_PARAMETER > _MEMORY_FRACTION * hardware.memory_bytes


def _tokenizer_line() -> str:
    return _with_comment(
        "tokenizer: {train: {vocab: auto}}", "subword tokenizer trained on this text; the vocabulary size is chosen"
    )


def _train_lines(answers: Answers, keys: dict[str, Any]) -> Iterator[str]:
    yield "train:"
    yield _with_comment(f"  budget: {answers.time}", "total time, including loading and saving the model")
    for key, value in keys.items():
        yield f"  {key}: {_format_flow_yaml(value)}"


def _with_comment(text: str, comment: str) -> str:
    return f"{text:<{_COMMENT_COLUMN}} # {comment}" if comment else text


def _format_flow_yaml(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")
