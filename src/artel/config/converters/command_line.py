"""A command line of transformers' run_clm.py or run_mlm.py.

The command may stand in a shell script, with a launcher before it (torchrun, accelerate launch, deepspeed).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from io import StringIO
from typing import Any, NamedTuple

from artel.config.converters import readers as read
from artel.config.converters import trainer
from artel.config.converters.conversion import Conversion, Converted, KeyTable, shown, top_level_keys
from artel.config.converters.hub_data import local_or_hub
from artel.config.converters.tools import Tool
from artel.errors import InputError, Problem

SCRIPT = re.compile(r"\brun_([a-z]+)(_no_trainer)?\.py\b")
_OBJECTIVES = {"clm": "causal", "mlm": "masked"}
_BLOCKS = {"causal": 1024, "masked": 512}
# Arguments of the scripts without a Trainer.
_NO_TRAINER = {"max_train_steps": "max_steps", "num_warmup_steps": "warmup_steps"}
_PER_HOST = ("launcher.nproc_per_node", "launcher.num_gpus", "launcher.num_processes")
_HOSTS = ("launcher.nnodes", "launcher.num_nodes", "launcher.num_machines")
# Arguments that hold a path or a name: a variable that the script does not set stays in it, for the user to replace.
_PATHS = {
    "model_name_or_path": "model.from",
    "tokenizer_name": "tokenizer.from",
    "train_file": "data.sources.0.path",
    "dataset_name": "data.sources.0.path",
    "dataset_config_name": "data.sources.0.path",
    "validation_file": "data.validation",
    "output_dir": "run",
}

# fmt: off
TABLE = KeyTable(
    defaults={**trainer.DEFAULTS, "validation_split_percentage": 5},
    carried={
        "output_dir": ("run", read.text),
        "preprocessing_num_workers": ("prepare.workers", read.at_least_one),
        "max_eval_samples": ("validate.blocks", read.at_least_one),
    },
    same={
        "line_by_line": "texts are joined and cut into blocks",
        "model_type": "config.json sets it",
        "tokenizer_name": "artel uses the model's tokenizer",
        "torch_dtype dtype": "weights are in fp32",
        "launcher.mixed_precision": "train.precision sets the precision",
        "keep_linebreaks": "artel keeps line breaks",
        "pad_to_max_length": "affects only the speed",
    },
    left={
        "config_name config_overrides": "model_name_or_path is set, and artel uses its config.json",
        "train_file": "dataset_name is set and takes precedence",
        "validation_split_percentage": "validation_file is set and takes precedence",
        "max_train_samples": "limits blocks; write train.steps, or data.sources.rows",
        "with_tracking": "write track: [console, jsonl, tensorboard], or wandb",
        "adam_epsilon2": "AdamW has one epsilon",
    },
)
# fmt: on


def is_command_line(text: str) -> bool:
    """True for a text that runs one of transformers' scripts of language models."""
    of_run_files = {"data", "model", "train", "objective", "run"}  # which may name such a script in a path
    is_json = text.lstrip().startswith("{")
    return SCRIPT.search(text) is not None and not is_json and not of_run_files & top_level_keys(text)


def convert_command_line(text: str, place: str) -> Converted:
    """Convert the first such command in the text. Raises InputError with all problems."""
    command = read_command(text, place)
    if command.kind not in _OBJECTIVES:
        fix = "give a command of run_clm.py or run_mlm.py, or write the run file by hand"
        raise InputError.at(place, f"run_{command.kind}.py is not a script that is converted", fix)
    objective = _OBJECTIVES[command.kind]
    old = Conversion(place, TABLE, trainer.TABLE, names={} if command.has_trainer else _NO_TRAINER)
    _add_arguments(old, command.arguments)
    _add_launcher(old, command.launcher)
    old.put("objective", objective)
    old.carry_table()
    _carry_data(old, objective)
    _carry_model(old)
    _carry_precision(old)
    processes = _processes(old)
    trainer.carry_arguments(old, processes)
    if processes is not None and old.written("train.batch"):
        old.decided("train.batch", *_PER_HOST, *_HOSTS)
        started = f"artel train run.yaml --nproc {processes}"
        old.note(f"the command starts {processes} processes, and train.batch is their total: {started}")
    for key in old.within("launcher"):
        if key != "launcher.mixed_precision":
            old.leave(key, trainer.STARTED)
    if not command.has_trainer:  # these scripts do not clip, and validate each epoch
        old.put("train.clip", old.written("train.clip"), "max_grad_norm")
        if not old.has("eval_strategy"):
            old.put("validate.every", "1 epoch")
    if old.raw("checkpointing_steps") == "epoch":
        old.put("checkpoint.every", "1 epoch", "checkpointing_steps")
    else:
        old.carry("checkpointing_steps", "checkpoint.every", read.from_zero)
    for line in command.others:
        old.note(f"{place}:{line}: another command; convert it from a separate file")
    trainer.fit_together(old)
    return old.finish()


def _add_arguments(old: Conversion, words: list[Word]) -> None:
    """`--key value`, `--key=value`, `--flag`, `--list a b`."""
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        where = f"{old.place}:{word.line}"
        if not word.text.startswith("--"):
            old.problems.append(Problem(where, f"{word.text} is not a named argument", "write --KEY VALUE"))
            continue
        name, has_value, written = word.text[2:].partition("=")
        values, unset = [written] if has_value else [], word.unset
        while not has_value and at < len(words) and not re.match(r"--\D", words[at].text):
            values.append(words[at].text)
            unset += words[at].unset
            at += 1
        key = name.replace("-", "_")
        if key.startswith("no_") and not values and key != "no_cuda":
            key, values = key.removeprefix("no_"), ["False"]
        value = [_value(each) for each in values] if len(values) > 1 else _value(values[0]) if values else True
        key = old.add(key, value, shown(" ".join(values) or "true", key), where)
        names = ", ".join(f"${name}" if not name.startswith("$") else name for name in dict.fromkeys(unset))
        if names and key in _PATHS:
            old.comment(_PATHS[key], f"the value of {names}, which the script does not set")
            old.note(f"{where}: {key}: {names} is not set in the script: write its value in {_PATHS[key]}")
        elif names:
            old.leave(key, f"{names} is not set in the script; write its value")
            old.replace(key, None)


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    try:
        return json.loads(text) if text.startswith("{") else text
    except ValueError:
        return text


def _add_launcher(old: Conversion, words: list[Word]) -> None:
    """Add what stands before the script: variables of the environment, and the launcher's options."""
    for at, word in enumerate(words):
        where, after = f"{old.place}:{word.line}", words[at + 1].text if at + 1 < len(words) else "-"
        assignment = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word.text)
        if assignment:
            name, value = assignment.groups()
            old.add(name, value or None, shown(value, name.lower()), where)
            old.leave(name, "is an environment variable; set it for artel train too")
        elif word.text.startswith("--"):
            name, _, value = word.text[2:].partition("=")
            value = value or ("" if after.startswith("-") or SCRIPT.search(after) else after)
            key = f"launcher.{name.replace('-', '_')}"
            old.add(key, _value(value) if value else True, value or "true", where)


def _processes(old: Conversion) -> int | None:
    """The number of processes that the launcher starts. None if it does not say."""
    per_host = next((old.get(key, read.at_least_one) for key in _PER_HOST if isinstance(old.raw(key), int)), None)
    hosts = next((old.raw(key) for key in _HOSTS if isinstance(old.raw(key), int)), 1)
    total = old.raw("launcher.num_processes")  # accelerate counts those of all machines
    return total if per_host is None or isinstance(total, int) else per_host * hosts


def _carry_data(old: Conversion, objective: str) -> None:
    """The text, how much of it is held out, and the length of a block."""
    source: dict[str, Any] = {}
    name, file = old.get("dataset_name", read.text), old.get("train_file", read.text)
    subset = "" if old.raw("dataset_config_name") is None else str(old.raw("dataset_config_name"))  # may be a number
    if name:
        data_set = local_or_hub(name, subset)
        source |= {"path": data_set.path, "format": "parquet" if data_set.is_on_hub else "auto"}
        old.decided("data.sources", "dataset_name", "dataset_config_name")
        old.comment("data.sources.0.path", data_set.doubt)
    elif file:
        source |= {"path": file, **({"format": "csv"} if file.endswith((".csv", ".tsv")) else {})}
        old.decided("data.sources", "train_file")
    else:
        source["path"] = "TEXTS.txt"
        old.comment("data.sources.0.path", "your text: the command has neither --train_file nor --dataset_name")
        old.note("the command names no text; write your files in data.sources.0.path")
    if objective == "masked" and old.get("line_by_line", read.flag):
        if file and not name and not file.endswith((".csv", ".tsv", ".json", ".jsonl")):
            source["document"] = "line"
        old.put("data.packing", "best_fit", "line_by_line")
    old.put("data.sources", [source])
    _carry_validation(old, name, subset)
    key = "max_seq_length" if objective == "masked" else "block_size"
    block = old.get(key, read.at_least_one)
    old.put("data.block", block or _BLOCKS[objective], key)
    if block is None:
        old.note(f"{key} is not given: data.block is {_BLOCKS[objective]}; the script uses the tokenizer's value")
    if objective == "masked":
        old.carry("mlm_probability", "masked.rate", read.share)
    old.put("data.dedup.exact", False)
    old.note("the script joins texts without a separator; artel puts the tokenizer's end token between them")


def _carry_validation(old: Conversion, name: str | None, subset: str) -> None:
    """A file, or the data set's own split, or else a share of the text."""
    file = old.get("validation_file", read.text)
    percent = old.get("validation_split_percentage", read.from_zero)
    data_set = local_or_hub(name, subset, "validation") if name else None
    if file:
        old.put("data.validation", file, "validation_file")
    elif data_set and data_set.is_on_hub and not old.has("validation_split_percentage"):
        old.put("data.validation", data_set.path, "dataset_name", "dataset_config_name")
        old.comment("data.validation", "the data set's own split; if it has none, write 0.05")
    elif percent is not None:
        old.put("data.validation", percent / 100, "validation_split_percentage")


def _carry_model(old: Conversion) -> None:
    """A pretrained model, or one from scratch by its type."""
    name, config = old.get("model_name_or_path", read.text), old.get("config_name", read.text)
    model_type = old.get("model_type", read.text)
    if name:
        old.put("model.from", name, "model_name_or_path")
    elif model_type or config:
        model_type = model_type or _type_of(config or "")
        old.put("model.config.model_type", model_type or "gpt2", "model_type", "config_name")
        if config:
            old.comment("model.config.model_type", f"and further keys of the config.json of {config}")
            old.leave("config_name", "write the keys of its config.json in model.config")
        for override in (old.get("config_overrides", read.text) or "").split(","):
            key, _, value = override.strip().partition("=")
            if key:
                old.put(f"model.config.{key}", _override(value), "config_overrides")
    else:
        fix = "write --model_name_or_path FOLDER-OR-HUB-ID, or --model_type TYPE for one from scratch"
        old.problems.append(Problem(old.place, "names no model", fix))
    tokenizer = old.get("tokenizer_name", read.text)
    if tokenizer and tokenizer != name:
        old.put("tokenizer.from", tokenizer, "tokenizer_name")
    old.leave_unless(old.raw("model_revision") == "main", "model_revision", trainer.MAIN_BRANCH)


def _type_of(name: str) -> str:
    """The model type that the name of a model begins with: roberta of roberta-base."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    last = name.rpartition("/")[2].lower()
    return max((kind for kind in CONFIG_MAPPING_NAMES if last.startswith(kind)), key=len, default="")


def _override(value: str) -> Any:
    """A value of `--config_overrides n_embd=1024,scale_attn_weights=false`."""
    if re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", value):
        return int(value) if re.fullmatch(r"-?\d+", value) else float(value)
    return {"true": True, "false": False}.get(value.lower(), value)


def _carry_precision(old: Conversion) -> None:
    """bf16 and fp16, the dtype in which the model is loaded and trained, and the launcher's precision."""
    if not trainer.carry_precision(old, {"bf16": "bf16", "fp16": "fp16"}) and (old.has("bf16") or old.has("fp16")):
        old.put("train.precision", "fp32", "bf16", "fp16")
    for key in ("torch_dtype", "dtype"):
        if old.raw(key) in ("bfloat16", "bf16"):
            old.put("train.precision", "bf16", key)
            old.put("train.weights", "bf16", key)
        elif old.raw(key) in ("float16", "fp16"):
            fix = "see train.weights; for fp16 computation write train.precision: fp16"
            old.leave(key, f"artel's trained weights are in fp32 or bf16: {fix}")
    key = "launcher.mixed_precision"
    launched = old.raw(key)
    if not any(map(old.has, ("bf16", "fp16", "torch_dtype", "dtype"))):
        if launched in ("bf16", "fp16", "fp8"):
            old.put("train.precision", launched, key)
        else:
            old.put("train.precision", "fp32")
            advice = "train.precision: auto is faster on GPUs"
            old.note(f"neither bf16 nor fp16 is set, so the precision is fp32; {advice}")
    precision = old.written("train.precision")
    agrees = precision == {"no": "fp32"}.get(launched, launched)
    old.leave_unless(agrees, key, f"train.precision is {precision}, by the script's arguments")


# Shell scripts


class Word(NamedTuple):
    """A word of the command, with the values of variables that the script sets in their places."""

    text: str
    line: int
    unset: tuple[str, ...] = ()
    """The variables in it that the script does not set."""


class Command(NamedTuple):
    """A command that runs one of transformers' scripts."""

    kind: str
    """clm, mlm …"""
    has_trainer: bool
    launcher: list[Word]
    """Assignments and the launcher: everything before the script's name."""
    arguments: list[Word]
    others: list[int]
    """Lines of further commands in the same file."""


_ENDS = re.compile(r"\||\|\||&&?|;|[0-9]*>>?(&[0-9])?.*|<.*")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?(\w+)=(\"[^\"]*\"|'[^']*'|[^\s;&|]*)", re.MULTILINE)


def read_command(text: str, place: str) -> Command:
    """Return the first command of a text that runs one of transformers' scripts. Raises InputError."""
    lines = text.splitlines()
    is_comment = [line.lstrip().startswith("#") for line in lines]
    starts = [number for number, line in enumerate(lines) if SCRIPT.search(line) and not is_comment[number]]
    if not starts:
        fix = "give the whole command: python run_clm.py --model_name_or_path gpt2 …"
        raise InputError.at(place, "names run_clm.py or run_mlm.py in comments only", fix)
    first = last = starts[0]  # all lines of a command but the last end with a backslash
    while first > 0 and lines[first - 1].rstrip().endswith("\\"):
        first -= 1
    while last < len(lines) - 1 and lines[last].rstrip().endswith("\\"):
        last += 1
    values: dict[str, str] = {}
    for name, written in _ASSIGNMENT.findall("\n".join(lines[:first])):
        value, unset = _replaced(written.strip("\"'"), values)
        if not unset:
            values[name] = value
    try:
        words = list(_words(lines[first : last + 1], first + 1, values))
    except ValueError as error:  # shlex: an open quotation
        raise InputError.at(f"{place}:{first + 1}", f"is no command: {error}", "check its quotes") from None
    at, script = next((at, match) for at, word in enumerate(words) if (match := SCRIPT.search(word.text)))
    arguments = words[at + 1 :]
    end = next((number for number, word in enumerate(arguments) if _ENDS.fullmatch(word.text)), len(arguments))
    others = [number + 1 for number in starts if not first <= number <= last]
    return Command(script[1], not script[2], words[:at], arguments[:end], others)


def _words(lines: list[str], number: int, values: dict[str, str]) -> Iterator[Word]:
    """Yield the words of a command whose first line has this number. Raises ValueError."""
    joined = "\n".join(re.sub(r"\\\s*$", "", line) for line in lines)
    stream = StringIO(joined)
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    line, counted = number, 0
    while (text := lexer.get_token()) is not None:
        end = max(counted, stream.tell() - 1)
        line, counted = line + joined.count("\n", counted, end), end
        replaced, unset = _replaced(text, values)
        assignment = re.match(r"(\w+)=", text)
        if assignment:
            values[assignment[1]] = replaced.partition("=")[2]
        word = replaced.strip()
        yield Word(word.rstrip(";") or word, line, unset)


def _replaced(text: str, values: dict[str, str]) -> tuple[str, tuple[str, ...]]:
    """(the text with its variables replaced, the variables without a value)."""
    unset: list[str] = []

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in values and match[3] is None:
            unset.append(name)
        return values.get(name, match[0] if match[3] is None else match[3])

    replaced = _VARIABLE.sub(value, text)
    return replaced, (*unset, *(["$(…)"] if "$(" in replaced or "`" in replaced else []))


COMMAND_LINE = Tool("run_clm.py and run_mlm.py", is_command_line, convert_command_line, is_no_run_file=True)
