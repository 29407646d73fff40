"""Convert a command line of transformers' run_clm.py or run_mlm.py.

The command may be in a shell script, after a launcher (torchrun, accelerate launch, deepspeed).
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
from artel.config.converters.conversion import Conversion, ConvertedConfig, KeyTable
from artel.config.converters.hub_data import local_or_hub
from artel.config.converters.tools import Tool
from artel.config.converters.yaml_text import format_value, top_level_keys
from artel.errors import InputError, Problem

SCRIPT = re.compile(r"\brun_([a-z]+)(_no_trainer)?\.py\b")
_OBJECTIVES = {"clm": "causal", "mlm": "masked"}
_BLOCKS = {"causal": 1024, "masked": 512}
# Arguments of the scripts without a Trainer.
_NO_TRAINER = {"max_train_steps": "max_steps", "num_warmup_steps": "warmup_steps"}
_PER_HOST = ("launcher.nproc_per_node", "launcher.num_gpus", "launcher.num_processes")
_HOSTS = ("launcher.nnodes", "launcher.num_nodes", "launcher.num_machines")
# Arguments with a path or a name: variables that the script does not set are kept, for the user to replace.
_PATH_ARGUMENTS = {
    "model_name_or_path": "model.from",
    "tokenizer_name": "tokenizer.from",
    "train_file": "data.sources.0.path",
    "dataset_name": "data.sources.0.path",
    "dataset_config_name": "data.sources.0.path",
    "validation_file": "data.validation",
    "output_dir": "run",
}
_END = re.compile(r"\||\|\||&&?|;|[0-9]*>>?(&[0-9])?.*|<.*")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?(\w+)=(\"[^\"]*\"|'[^']*'|[^\s;&|]*)", re.MULTILINE)

# fmt: off
TABLE = KeyTable(
    defaults={**trainer.DEFAULTS, "validation_split_percentage": 5},
    converted={
        "output_dir": ("run", read.text),
        "preprocessing_num_workers": ("prepare.workers", read.positive_int),
        "max_eval_samples": ("validate.blocks", read.positive_int),
    },
    implied={
        "line_by_line": "texts are joined and cut into blocks",
        "model_type": "config.json sets it",
        "tokenizer_name": "artel uses the model's tokenizer",
        "torch_dtype dtype": "weights are in fp32",
        "launcher.mixed_precision": "train.precision sets the precision",
        "keep_linebreaks": "artel keeps line breaks",
        "pad_to_max_length": "affects only the speed",
    },
    unsupported={
        "config_name config_overrides": "ignored: model_name_or_path is set, and artel uses its config.json",
        "train_file": "ignored: dataset_name is set and takes precedence",
        "validation_split_percentage": "ignored: validation_file is set and takes precedence",
        "max_train_samples": "limits blocks; write train.steps, or data.sources.rows",
        "with_tracking": "write track: [console, jsonl, tensorboard], or wandb",
        "adam_epsilon2": "not supported: AdamW has one epsilon",
    },
)
# fmt: on


class Word(NamedTuple):
    """A word of the command, with the variables that the script sets replaced."""

    text: str
    line: int
    unset: tuple[str, ...] = ()
    """Variables in the word that the script does not set."""


class Command(NamedTuple):
    """A command that runs one of transformers' scripts."""

    kind: str
    """clm, mlm …"""
    has_trainer: bool
    launcher: list[Word]
    """Assignments and the launcher: everything before the script's name."""
    arguments: list[Word]
    other_lines: list[int]
    """Lines of other such commands in the file."""


def is_command_line(text: str) -> bool:
    """True if a text runs one of transformers' scripts for language models."""
    run_file_keys = {"data", "model", "train", "objective", "run"}  # a path in a run file may contain a script's name
    is_json = text.lstrip().startswith("{")
    return SCRIPT.search(text) is not None and not is_json and not run_file_keys & top_level_keys(text)


def convert_command_line(text: str, location: str) -> ConvertedConfig:
    """Convert the first command that runs one of the scripts. Raise InputError with all problems."""
    command = read_command(text, location)
    if command.kind not in _OBJECTIVES:
        fix = "use a command of run_clm.py or run_mlm.py, or create a run file with artel new"
        raise InputError.at(location, f"run_{command.kind}.py is not supported", fix)
    objective = _OBJECTIVES[command.kind]
    conversion = Conversion(location, TABLE, trainer.TABLE, names={} if command.has_trainer else _NO_TRAINER)
    _add_arguments(conversion, command.arguments)
    _add_launcher(conversion, command.launcher)
    conversion.put("objective", objective)
    conversion.convert_table()
    _convert_data(conversion, objective)
    _convert_model(conversion)
    _convert_precision(conversion)
    processes = _count_processes(conversion)
    trainer.convert_arguments(conversion, processes)
    if processes is not None and conversion.output_value("train.batch"):
        conversion.mark_converted("train.batch", *_PER_HOST, *_HOSTS)
        command_line = f"artel train run.yaml --nproc {processes}"
        conversion.note(f"the command starts {processes} processes; train.batch is their total: {command_line}")
    for key in conversion.keys_in("launcher"):
        if key != "launcher.mixed_precision":
            conversion.report(key, trainer.LAUNCH_ADVICE)
    if not command.has_trainer:  # these scripts do not clip, and validate each epoch
        conversion.put("train.clip", conversion.output_value("train.clip"), "max_grad_norm")
        if not conversion.has("eval_strategy"):
            conversion.put("validate.every", "1 epoch")
    if conversion.raw_value("checkpointing_steps") == "epoch":
        conversion.put("checkpoint.every", "1 epoch", "checkpointing_steps")
    else:
        conversion.convert("checkpointing_steps", "checkpoint.every", read.non_negative_int)
    for line in command.other_lines:
        conversion.note(f"{location}:{line}: another command; convert it from a separate file")
    trainer.resolve_conflicts(conversion)
    return conversion.finish()


def _add_arguments(conversion: Conversion, words: list[Word]) -> None:
    """Add arguments of the forms `--key value`, `--key=value`, `--flag` and `--list a b`."""
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        location = f"{conversion.location}:{word.line}"
        if not word.text.startswith("--"):
            conversion.problems.append(Problem(location, f"{word.text} is not a named argument", "write --KEY VALUE"))
            continue
        name, has_value, text = word.text[2:].partition("=")
        values = [text] if has_value else []
        unset = word.unset
        while not has_value and index < len(words) and not re.match(r"--\D", words[index].text):
            values.append(words[index].text)
            unset += words[index].unset
            index += 1
        key = name.replace("-", "_")
        if key.startswith("no_") and not values and key != "no_cuda":
            key, values = key.removeprefix("no_"), ["False"]
        value: Any = [_parse_value(text) for text in values] if values else True
        if len(values) == 1:
            value = value[0]
        key = conversion.add(key, value, format_value(" ".join(values) or "true", key), location)
        names = ", ".join(f"${name}" if not name.startswith("$") else name for name in dict.fromkeys(unset))
        if names and key in _PATH_ARGUMENTS:
            conversion.comment(_PATH_ARGUMENTS[key], f"the value of {names}, which the script does not set")
            fix = f"write its value in {_PATH_ARGUMENTS[key]}"
            conversion.note(f"{location}: {key}: {names} is not set in the script: {fix}")
        elif names:
            conversion.report(key, f"{names} is not set in the script; write its value")
            conversion.replace(key, None)


def _parse_value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    try:
        return json.loads(text) if text.startswith("{") else text
    except ValueError:
        return text


def _add_launcher(conversion: Conversion, words: list[Word]) -> None:
    """Add the words before the script: environment variables and the launcher's options."""
    for index, word in enumerate(words):
        location = f"{conversion.location}:{word.line}"
        next_text = words[index + 1].text if index + 1 < len(words) else "-"
        assignment = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word.text)
        if assignment:
            name, value = assignment.groups()
            conversion.add(name, value or None, format_value(value, name.lower()), location)
            conversion.report(name, "is an environment variable; set it for artel train too")
        elif word.text.startswith("--"):
            name, _, value = word.text[2:].partition("=")
            value = value or ("" if next_text.startswith("-") or SCRIPT.search(next_text) else next_text)
            key = f"launcher.{name.replace('-', '_')}"
            conversion.add(key, _parse_value(value) if value else True, value or "true", location)


def _count_processes(conversion: Conversion) -> int | None:
    """Return the number of processes that the launcher starts, or None if it is not given."""
    per_host_keys = [key for key in _PER_HOST if isinstance(conversion.raw_value(key), int)]
    host_keys = [key for key in _HOSTS if isinstance(conversion.raw_value(key), int)]
    per_host = conversion.get(per_host_keys[0], read.positive_int) if per_host_keys else None
    hosts = conversion.raw_value(host_keys[0]) if host_keys else 1
    processes = conversion.raw_value("launcher.num_processes")  # accelerate counts the processes of all hosts
    return processes if per_host is None or isinstance(processes, int) else per_host * hosts


def _convert_data(conversion: Conversion, objective: str) -> None:
    """Convert the text, the validation split and the block length."""
    source: dict[str, Any] = {}
    name = conversion.get("dataset_name", read.text)
    file = conversion.get("train_file", read.text)
    subset_value = conversion.raw_value("dataset_config_name")  # may be a number
    subset = "" if subset_value is None else str(subset_value)
    if name:
        data_set = local_or_hub(name, subset)
        source |= {"path": data_set.path, "format": "parquet" if data_set.is_on_hub else "auto"}
        conversion.mark_converted("data.sources", "dataset_name", "dataset_config_name")
        conversion.comment("data.sources.0.path", data_set.note)
    elif file:
        source |= {"path": file, **({"format": "csv"} if file.endswith((".csv", ".tsv")) else {})}
        conversion.mark_converted("data.sources", "train_file")
    else:
        source["path"] = "TEXTS.txt"
        conversion.comment("data.sources.0.path", "your text: the command has neither --train_file nor --dataset_name")
        conversion.note("the command has no text; write your files in data.sources.0.path")
    if objective == "masked" and conversion.get("line_by_line", read.flag):
        if file and not name and not file.endswith((".csv", ".tsv", ".json", ".jsonl")):
            source["document"] = "line"
        conversion.put("data.packing", "best_fit", "line_by_line")
    conversion.put("data.sources", [source])
    _convert_validation(conversion, name, subset)
    key = "max_seq_length" if objective == "masked" else "block_size"
    block = conversion.get(key, read.positive_int)
    conversion.put("data.block", block or _BLOCKS[objective], key)
    if block is None:
        conversion.note(f"{key} is not given: data.block is {_BLOCKS[objective]}; the script uses model_max_length")
    if objective == "masked":
        conversion.convert("mlm_probability", "masked.rate", read.fraction_below_one)
    conversion.put("data.dedup.exact", False)
    conversion.note("the script joins texts without a separator; artel puts the tokenizer's end token between them")


def _convert_validation(conversion: Conversion, name: str | None, subset: str) -> None:
    """Convert the validation text: a file, the data set's own split, or a fraction of the text."""
    file = conversion.get("validation_file", read.text)
    percent = conversion.get("validation_split_percentage", read.non_negative_int)
    data_set = local_or_hub(name, subset, "validation") if name else None
    if file:
        conversion.put("data.validation", file, "validation_file")
    elif data_set and data_set.is_on_hub and not conversion.has("validation_split_percentage"):
        conversion.put("data.validation", data_set.path, "dataset_name", "dataset_config_name")
        conversion.comment("data.validation", "the data set's own split; if it has none, write 0.05")
    elif percent is not None:
        conversion.put("data.validation", percent / 100, "validation_split_percentage")


def _convert_model(conversion: Conversion) -> None:
    """Convert the model: pretrained, or a new one by its type."""
    name = conversion.get("model_name_or_path", read.text)
    config = conversion.get("config_name", read.text)
    model_type = conversion.get("model_type", read.text)
    if name:
        conversion.put("model.from", name, "model_name_or_path")
    elif model_type or config:
        model_type = model_type or _guess_model_type(config or "")
        conversion.put("model.config.model_type", model_type or "gpt2", "model_type", "config_name")
        if config:
            conversion.comment("model.config.model_type", f"and other keys of the config.json of {config}")
            conversion.report("config_name", "write the keys of its config.json in model.config")
        for override in (conversion.get("config_overrides", read.text) or "").split(","):
            key, _, value = override.strip().partition("=")
            if key:
                conversion.put(f"model.config.{key}", _parse_config_override(value), "config_overrides")
    else:
        fix = "add --model_name_or_path FOLDER-OR-HUB-ID, or --model_type TYPE for a new model"
        conversion.problems.append(Problem(conversion.location, "the command has no model", fix))
    tokenizer = conversion.get("tokenizer_name", read.text)
    if tokenizer and tokenizer != name:
        conversion.put("tokenizer.from", tokenizer, "tokenizer_name")
    conversion.report_unless(
        conversion.raw_value("model_revision") == "main", "model_revision", trainer.MAIN_BRANCH_ADVICE
    )


def _guess_model_type(name: str) -> str:
    """Return the model type at the start of a model's name, e.g. roberta for roberta-base."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_name = name.rpartition("/")[2].lower()
    return max((kind for kind in CONFIG_MAPPING_NAMES if model_name.startswith(kind)), key=len, default="")


def _parse_config_override(value: str) -> Any:
    """Convert a value of `--config_overrides n_embd=1024,scale_attn_weights=false`."""
    if re.fullmatch(r"-?\d*\.?\d+(e-?\d+)?", value):
        return int(value) if re.fullmatch(r"-?\d+", value) else float(value)
    return {"true": True, "false": False}.get(value.lower(), value)


def _convert_precision(conversion: Conversion) -> None:
    """Convert bf16 and fp16, the dtype of the weights and the launcher's precision."""
    chosen = trainer.convert_precision(conversion, {"bf16": "bf16", "fp16": "fp16"})
    if not chosen and (conversion.has("bf16") or conversion.has("fp16")):
        conversion.put("train.precision", "fp32", "bf16", "fp16")
    for key in ("torch_dtype", "dtype"):
        if conversion.raw_value(key) in ("bfloat16", "bf16"):
            conversion.put("train.precision", "bf16", key)
            conversion.put("train.weights", "bf16", key)
        elif conversion.raw_value(key) in ("float16", "fp16"):
            fix = "write train.weights: bf16; for fp16 computation write train.precision: fp16"
            conversion.report(key, f"not supported: artel's trained weights are in fp32 or bf16; {fix}")
    key = "launcher.mixed_precision"
    launcher_precision = conversion.raw_value(key)
    if not any(map(conversion.has, ("bf16", "fp16", "torch_dtype", "dtype"))):
        if launcher_precision in ("bf16", "fp16", "fp8"):
            conversion.put("train.precision", launcher_precision, key)
        else:
            conversion.put("train.precision", "fp32")
            advice = "train.precision: auto is faster on GPUs"
            conversion.note(f"neither bf16 nor fp16 is set, so the precision is fp32; {advice}")
    precision = conversion.output_value("train.precision")
    agrees = precision == {"no": "fp32"}.get(launcher_precision, launcher_precision)
    conversion.report_unless(agrees, key, f"train.precision is {precision}, by the script's arguments")


# Shell scripts


def read_command(text: str, location: str) -> Command:
    """Return the first command that runs one of transformers' scripts. Raise InputError if there is none."""
    lines = text.splitlines()
    is_comment = [line.lstrip().startswith("#") for line in lines]
    starts = [index for index, line in enumerate(lines) if SCRIPT.search(line) and not is_comment[index]]
    if not starts:
        fix = "use the full command: python run_clm.py --model_name_or_path gpt2 …"
        raise InputError.at(location, "mentions run_clm.py or run_mlm.py only in comments", fix)
    first = last = starts[0]  # all lines of a command except the last end with a backslash
    while first > 0 and lines[first - 1].rstrip().endswith("\\"):
        first -= 1
    while last < len(lines) - 1 and lines[last].rstrip().endswith("\\"):
        last += 1
    values: dict[str, str] = {}
    for name, quoted in _ASSIGNMENT.findall("\n".join(lines[:first])):
        value, unset = _replace_variables(quoted.strip("\"'"), values)
        if not unset:
            values[name] = value
    try:
        words = list(_split_words(lines[first : last + 1], first + 1, values))
    except ValueError as error:  # shlex: an open quotation
        raise InputError.at(f"{location}:{first + 1}", f"is not a valid command: {error}", "check its quotes") from None
    index, script = next((index, match) for index, word in enumerate(words) if (match := SCRIPT.search(word.text)))
    arguments = words[index + 1 :]
    end = next((index for index, word in enumerate(arguments) if _END.fullmatch(word.text)), len(arguments))
    other_lines = [start + 1 for start in starts if not first <= start <= last]
    return Command(script[1], not script[2], words[:index], arguments[:end], other_lines)


def _split_words(lines: list[str], first_line: int, values: dict[str, str]) -> Iterator[Word]:
    """Yield the words of a command that starts at line `first_line`. Raise ValueError if a quote is not closed."""
    joined = "\n".join(re.sub(r"\\\s*$", "", line) for line in lines)
    stream = StringIO(joined)
    lexer = shlex.shlex(stream, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    line, offset = first_line, 0
    while (text := lexer.get_token()) is not None:
        end = max(offset, stream.tell() - 1)
        line, offset = line + joined.count("\n", offset, end), end
        replaced, unset = _replace_variables(text, values)
        assignment = re.match(r"(\w+)=", text)
        if assignment:
            values[assignment[1]] = replaced.partition("=")[2]
        word = replaced.strip()
        yield Word(word.rstrip(";") or word, line, unset)


def _replace_variables(text: str, values: dict[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return (text with its variables replaced, variables without a value)."""
    unset: list[str] = []

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in values and match[3] is None:
            unset.append(name)
        return values.get(name, match[0] if match[3] is None else match[3])

    replaced = _VARIABLE.sub(value, text)
    return replaced, (*unset, *(["$(…)"] if "$(" in replaced or "`" in replaced else []))


COMMAND_LINE = Tool("run_clm.py and run_mlm.py", is_command_line, convert_command_line, never_a_run_file=True)
