"""A command line of transformers' run_clm.py or run_mlm.py as a run file.

The command may stand in a shell script, with a launcher before it (torchrun, accelerate launch, deepspeed). A key that
is not carried over is reported, also an unknown one.
"""

from __future__ import annotations

import json
import re
from typing import Any

from artel.config.converters.command_line.arguments import carry_data, carry_model, leave_the_rest
from artel.config.converters.command_line.words import SCRIPT, Command, Word, read_command
from artel.config.converters.fitting import fit_together
from artel.config.converters.keys import (
    Converted,
    OldKeys,
    Section,
    a_text,
    at_least_one,
    from_zero,
    shown,
    top_level_keys,
)
from artel.config.converters.tool import Tool
from artel.config.converters.training_arguments import (
    TRAINER_DEFAULTS,
    carry_trainer,
    carry_trainer_precision,
    leave_trainer_rest,
)
from artel.errors import InputError

_OBJECTIVES = {"clm": "causal", "mlm": "masked"}
# Names of TrainingArguments in the scripts without a Trainer.
_NO_TRAINER = {"max_steps": "max_train_steps", "warmup_steps": "num_warmup_steps"}


def is_command_line(text: str) -> bool:
    """True for a text that runs one of transformers' scripts of language models."""
    match = SCRIPT.search(text)
    of_run_files = {"data", "model", "train", "objective", "run"}  # which may name such a script in a path
    return match is not None and not text.lstrip().startswith("{") and not of_run_files & top_level_keys(text)


def convert_command_line(text: str, place: str) -> Converted:
    """The run file of the first such command in the text. Raises InputError with all problems."""
    command = read_command(text, place)
    if command.kind not in _OBJECTIVES:
        fix = "give a command of run_clm.py or run_mlm.py, or write the run file by hand"
        raise InputError.at(place, f"run_{command.kind}.py is not a script that is converted", fix)
    old = OldKeys(place, _DEFAULTS, {})
    _read_arguments(old, command, place)
    world = _read_launcher(old, command, place)
    objective = _OBJECTIVES[command.kind]
    old.put("objective", objective)
    old.carry("output_dir", "run", a_text)
    carry_data(old, objective)
    carry_model(old)
    trainer = Section(old, names={} if command.has_trainer else _NO_TRAINER)
    carry_trainer_precision(trainer)
    _carry_dtype(old)
    carry_trainer(trainer)
    if not command.has_trainer:
        _carry_own_loop(old)
    _carry_world(old, world)
    _carry_checkpointing(old)
    leave_trainer_rest(trainer)
    leave_the_rest(old)
    for line in command.others:
        old.tell(f"{place}:{line}: another command; give it in a file of its own")
    fit_together(old)
    return old.converted(_ORDER)


def _read_arguments(old: OldKeys, command: Command, place: str) -> None:
    """`--key value`, `--key=value`, `--flag`, `--list a b`."""
    words = list(command.after)
    while words:
        word = words.pop(0)
        if not word.text.startswith("--"):
            old.problems.extend(
                InputError.at(
                    f"{place}:{word.line}", f"{word.text} is no argument with a name", "write --KEY VALUE"
                ).problems
            )
            continue
        name, has_value, written = word.text[2:].partition("=")
        unset = word.unset
        values = [written] if has_value else []
        while not has_value and words and not re.match(r"--\D", words[0].text):
            values.append(words[0].text)
            unset += words.pop(0).unset
        key = name.replace("-", "_")
        if key.startswith("no_") and not values and key != "no_cuda":
            key, values = key.removeprefix("no_"), ["False"]
        value = [_value(each) for each in values] if len(values) > 1 else _value(values[0]) if values else True
        text = " ".join(values) or "true"
        old.give(key, value, shown(text, key), f"{place}:{word.line}")
        if unset:
            _mark_unset(old, key, unset)


def _mark_unset(old: OldKeys, key: str, unset: tuple[str, ...]) -> None:
    """A value with a variable that the script does not set: paths keep it, for the user to replace."""
    names = ", ".join(f"${name}" if not name.startswith("$") else name for name in dict.fromkeys(unset))
    if key in _PATHS:
        old.comment(_PATHS[key], f"the value of {names}, which the script does not set")
        old.tell(f"{old.place_of(key)}: {key}: {names} is not set in the script: write its value in {_PATHS[key]}")
    else:
        old.leave(key, f"{names} is not set in the script; write its value")
        old.give_value(key, None)


_PATHS = {
    "model_name_or_path": "model.from",
    "tokenizer_name": "tokenizer.from",
    "train_file": "data.sources.0.path",
    "dataset_name": "data.sources.0.path",
    "dataset_config_name": "data.sources.0.path",
    "validation_file": "data.validation",
    "output_dir": "run",
}


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _read_launcher(old: OldKeys, command: Command, place: str) -> int | None:
    """What stands before the script: variables of the environment, and how many processes are started."""
    words = list(command.before)
    while words:
        word = words.pop(0)
        assignment = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word.text)
        if assignment:
            old.give(
                assignment[1], assignment[2] or None, shown(assignment[2], assignment[1].lower()), _at(place, word)
            )
            old.leave(assignment[1], "is a variable of the environment; set it before artel train too")
        elif word.text.startswith("--"):
            name, _, value = word.text[2:].partition("=")
            if not value and words and not words[0].text.startswith("-") and not SCRIPT.search(words[0].text):
                value = words.pop(0).text
            key = f"launcher.{name.replace('-', '_')}"
            old.give(key, _value(value) if value else True, value or "true", _at(place, word))
    return _world(old)


def _at(place: str, word: Word) -> str:
    return f"{place}:{word.line}"


def _world(old: OldKeys) -> int | None:
    """The number of processes that the launcher starts; None where it does not say."""
    per_host = next(
        (old.read(f"launcher.{key}", at_least_one) for key in _PER_HOST if isinstance(old.raw(f"launcher.{key}"), int)),
        None,
    )
    hosts = next((old.raw(f"launcher.{key}") for key in ("nnodes", "num_nodes", "num_machines")
                  if isinstance(old.raw(f"launcher.{key}"), int)), 1)  # fmt: skip
    if per_host is None:
        return None
    total = old.raw("launcher.num_processes")  # accelerate counts those of all machines
    return total if isinstance(total, int) else per_host * hosts


_PER_HOST = ("nproc_per_node", "num_gpus", "num_processes")


def _carry_world(old: OldKeys, world: int | None) -> None:
    """With the number of processes known, train.batch is that of all of them."""
    micro = old.read("per_device_train_batch_size", at_least_one)
    parts = old.read("gradient_accumulation_steps", at_least_one)
    if world is not None and micro and parts:
        keys = [f"launcher.{key}" for key in (*_PER_HOST, "nnodes", "num_nodes", "num_machines")]
        old.put("train.batch", micro * parts * world, "per_device_train_batch_size", *keys)
        old.forget("per_device_train_batch_size")
        old.tell(
            f"the command starts {world} processes, and train.batch is of all: artel train run.yaml --nproc {world}"
        )
    for key in old.below("launcher"):
        if key == "launcher.mixed_precision":
            _carry_launched_precision(old, key)
            continue
        old.leave(key, "processes are started by artel train --nproc, --nnodes and --node-rank, or by torchrun")


def _carry_dtype(old: OldKeys) -> None:
    """The dtype in which the model's weights are loaded, and trained."""
    for key in ("torch_dtype", "dtype"):
        dtype = old.raw(key)
        if dtype in ("bfloat16", "bf16"):
            old.put("train.precision", "bf16", key)
            old.put("train.weights", "bf16", key)
        elif dtype in ("float16", "fp16"):
            old.leave(
                key, "artel holds trained weights in fp32 or bf16: train.weights; train.precision: fp16 computes so"
            )
        else:
            old.agree(key, "weights are in fp32")
    asked = any(old.has(key) for key in ("bf16", "fp16", "torch_dtype", "dtype"))
    launched = old.peek("launcher.mixed_precision")
    if launched in ("bf16", "fp16", "fp8") and not asked:
        old.put("train.precision", launched, "launcher.mixed_precision")
    elif not asked:
        old.put("train.precision", "fp32")
        old.tell("neither bf16 nor fp16 is asked for, so it computes in fp32; train.precision: auto is quicker on GPUs")


def _carry_launched_precision(old: OldKeys, key: str) -> None:
    """What accelerate computes in, where the script's own arguments do not say it."""
    precision = old.value("train.precision")
    if precision == {"no": "fp32"}.get(old.raw(key), old.raw(key)):
        old.agree(key, "train.precision says in what is computed")
    else:
        old.leave(key, f"train.precision is {precision}, by the script's arguments")


def _carry_own_loop(old: OldKeys) -> None:
    """What the scripts without a Trainer do and have no argument for: no clipping, and a validation each epoch."""
    if not old.has("max_grad_norm"):
        old.put("train.clip", None)
    if not old.has("eval_strategy"):
        old.put("validate.every", "1 epoch")


def _carry_checkpointing(old: OldKeys) -> None:
    """`--checkpointing_steps` of the scripts without a Trainer: steps, or epoch."""
    value = old.raw("checkpointing_steps")
    if value == "epoch":
        old.put("checkpoint.every", "1 epoch", "checkpointing_steps")
    elif value is not None:
        old.carry("checkpointing_steps", "checkpoint.every", from_zero)


_ORDER = tuple(
    "run seed objective data prepare tokenizer model masked train validate parallel checkpoint log track".split()
)
_DEFAULTS = {**TRAINER_DEFAULTS, "validation_split_percentage": 5}
COMMAND_LINE = Tool("run_clm.py and run_mlm.py", is_command_line, convert_command_line, is_no_run_file=True)
