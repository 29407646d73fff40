"""Reads a DeepSpeed file and checks its keys, because DeepSpeed ignores most unknown keys."""

from __future__ import annotations

import difflib
import json
import math
import types
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from artel.config.read import read_file
from artel.errors import InputError, Problem

AUTO = "auto"

TOP_LEVEL = frozenset(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping optimizer scheduler "
    "zero_optimization fp16 bf16 bfloat16 data_types aio communication_data_type seq_parallel_communication_data_type "
    "prescale_gradients gradient_predivide_factor gradient_allreduce_op disable_allgather comms_logger "
    "use_data_before_expert_parallelism zero_allow_untested_optimizer zero_force_ds_cpu_optimizer".split()
)

# Keys that do not change the result -> the run file's key for the same, or what artel does.
HANDLED_BY_ARTEL = {
    "steps_per_print": "log.every",
    "wall_clock_breakdown": "profile",
    "memory_breakdown": "profile",
    "flops_profiler": "profile",
    "timers": "profile",
    "dump_state": "RUN/config.yaml",
    "log_level": "only errors are shown",
    "disable_python_gc": "garbage is collected between steps",
    "vocabulary_size": "tokenizer",
    "activation_checkpointing": "train.activation_checkpointing",
    "tensorboard": "track",
    "wandb": "track",
    "csv_monitor": "track",
    "comet": "track",
    "checkpoint": "checkpoint",
    "datastates_ckpt": "checkpoint",
    "dataloader_drop_last": "no sample is dropped",
}

_REMOVED = "DeepSpeed no longer supports it"
# Keys that contradict the run file or no longer exist -> fix. Allowed if switched off.
REFUSED = {
    "torch_autocast": 'use "bf16" or "fp16" instead',
    "tensor_parallel": "set parallel.tensor, without deepspeed",
    "sequence_parallel_size": "set parallel.context, without deepspeed",
    "data_parallel_size": "remove it: it follows from the number of processes",
    "expert_parallel": "set parallel.expert, without deepspeed",
    "pipeline": "set parallel.pipeline, without deepspeed",
    "compile": "set train.compile",
    "data_efficiency": "remove it: the run file alone determines the order of samples",
    "hybrid_engine": "remove it: use artel generate for generation",
    "autotuning": "remove it: artel finds the micro-batch itself (train.micro_batch: auto)",
    "weight_quantization": "set model.quantize, without deepspeed",
} | dict.fromkeys(
    "amp nebula compression_training quantize_training sparse_gradients eigenvalue sparse_attention elasticity "
    "graph_harvesting curriculum_learning progressive_layer_drop".split(),
    f"remove it: {_REMOVED}",
)


def read_tree(file: str) -> dict[str, Any]:
    """Return the content of the file: JSON, or JSON with comments (Hjson) as in DeepSpeed."""
    text = read_file(Path(file))

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(pairs)
        if len(tree) < len(pairs):
            names = [name for name, _ in pairs]
            duplicates = ", ".join(sorted({name for name in names if names.count(name) > 1}))
            raise InputError.at(file, f"duplicate keys: {duplicates}", "keep one of each")
        return tree

    try:
        tree = json.loads(text, object_pairs_hook=reject_duplicates)
    except json.JSONDecodeError as error:
        import hjson  # DeepSpeed depends on it; plain JSON can be planned without DeepSpeed

        try:
            tree = hjson.loads(text, object_pairs_hook=reject_duplicates)
        except hjson.HjsonDecodeError:
            location = f"{file}:{error.lineno}"
            raise InputError.at(location, f"is not valid JSON: {error.msg}", "check commas and quotes") from None
    if not isinstance(tree, dict):
        raise InputError.at(file, "is not a DeepSpeed configuration", 'write {"zero_optimization": {"stage": 1}}')
    return tree


class Findings:
    """Problems of a file, to report together, and notes for the log."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def add_problem(self, key: str, what: str, fix: str) -> None:
        self.problems.append(Problem(f"{self.file}: {key}", what, fix))

    def note(self, key: str, what: str) -> None:
        self.notes.append(f"{self.file}: {key} {what}")

    def raise_if_any(self) -> None:
        """Raise InputError with all problems, if there are any."""
        if self.problems:
            raise InputError(self.problems)

    def add_unknown_keys(self, where: str, keys: Collection[str], known: Collection[str]) -> None:
        """Add a problem for each unknown key, with the nearest known one."""
        for key in keys:
            if key not in known:
                similar_keys = difflib.get_close_matches(key, sorted(known), 1)
                fix = f"did you mean {similar_keys[0]}?" if similar_keys else "remove it"
                self.add_problem(f"{where}.{key}" if where else key, "is not a DeepSpeed key", fix)

    def compare(self, where: str, block: dict[str, Any], expected: dict[str, tuple[str, Any]]) -> None:
        """Add a problem for each value that differs from `expected`: the file's key -> (artel's key, value)."""
        for key, value in block.items():
            path = f"{where}.{key}" if where else key
            if key in expected:
                name, expected_value = expected[key]
                if value not in (AUTO, expected_value) and not _is_close(value, expected_value):
                    what = f"is {json.dumps(value)}, but {name} is {json.dumps(expected_value)}"
                    self.add_problem(path, what, f'set "auto", or change {name}')
            elif value:
                similar_keys = difflib.get_close_matches(key, sorted(expected), 1)
                fix = f"did you mean {similar_keys[0]}?" if similar_keys else "remove it"
                self.add_problem(path, f"is {json.dumps(value)}, but artel does not support it", fix)

    def use_defaults(self, where: str, block: dict[str, Any], exclude: Collection[str] = ()) -> None:
        """Remove "auto" values that artel does not set. DeepSpeed's own defaults then apply."""
        for key in [key for key, value in block.items() if value == AUTO and key not in exclude]:
            del block[key]
            self.note(f"{where}.{key}", "is DeepSpeed's own default")


def is_off(block: object) -> bool:
    """True if a value switches a feature off. For a number of processes, that is 1."""
    if isinstance(block, dict):
        return not block or block.get("enabled") is False
    return not block or block == AUTO or (isinstance(block, int) and not isinstance(block, bool) and block == 1)


def check_block(findings: Findings, where: str, model: type[BaseModel], block: dict[str, Any]) -> None:
    """Add the problems that DeepSpeed's own pydantic model finds in a section."""
    try:
        model(**block)
    except ValidationError as error:
        for detail in error.errors():
            path = [str(key) for key in detail["loc"]]
            owner = _follow_path(model, path[:-1])
            if detail["type"] == "extra_forbidden" and owner is not None:
                known = {field.alias or name for name, field in owner.model_fields.items()}
                findings.add_unknown_keys(".".join([where, *path[:-1]]), path[-1:], known)
            else:
                what = f"is {detail['input']!r}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"
                findings.add_problem(".".join([where, *path]), what, "change or remove it")
    except AssertionError as error:
        findings.add_problem(where, str(error), "correct the key named in the message")


def convert_integers(model: type[BaseModel], block: dict[str, Any]) -> dict[str, Any]:
    """Convert floats to ints for integer fields. People write sizes as 1e9, and JSON reads that as a float."""
    result = {}
    for key, value in block.items():
        field = _find_field(model, key)
        inner = _find_pydantic_model(field.annotation) if field is not None else None
        if isinstance(value, dict) and inner is not None:
            value = convert_integers(inner, value)
        elif isinstance(value, float) and field is not None and field.annotation is int and value.is_integer():
            value = int(value)
        result[key] = value
    return result


def _find_field(model: type[BaseModel], key: str) -> Any:
    fields = model.model_fields
    return fields.get(key) or next((field for field in fields.values() if field.alias == key), None)


def _follow_path(model: type[BaseModel] | None, path: list[str]) -> type[BaseModel] | None:
    for key in path:
        field = None if model is None else _find_field(model, key)
        model = None if field is None else _find_pydantic_model(field.annotation)
    return model


def _find_pydantic_model(annotation: object) -> type[BaseModel] | None:
    """Return the pydantic model in an annotation, or None."""
    choices = typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else ()
    for choice in (annotation, *choices):
        if isinstance(choice, type) and issubclass(choice, BaseModel):
            return choice
    return None


def _is_close(first: object, second: object) -> bool:
    """True if two numbers, or lists of numbers, are equal up to rounding."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_is_close, first, second))
    numbers = isinstance(first, int | float) and isinstance(second, int | float)
    return numbers and math.isclose(first, second, rel_tol=1e-9)  # type: ignore[arg-type]
