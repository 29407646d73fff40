"""What `artel config convert` makes of public configurations: python benchmarks/convert.py FOLDER > convert.md

FOLDER has repositories as OWNER/NAME/PATH, and commits.json with the commit of each (convert_folder.py). Of each file
that trains:
- each key is counted: carried over, carried over with a difference that is told, not carried over, in need of nothing;
- what is printed must be a run file;
- numbers that are read from the file a second time, by the few lines below, must be those of the run file (wrong),
  but for an optimizer of which it is told that adamw is taken;
- another value of a key must show, in the run file or in what is told (lost); of the files with rows of their own this
  is tried for each key that is carried over, of the others only whether each key was counted.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from artel.config import run_from
from artel.config.converters.conversion import Converted
from artel.config.converters.tools import convert, tool_of
from artel.config.converters.yaml_text import flat
from artel.errors import InputError

SUFFIXES = (".yml", ".yaml", ".sh")
SHOWN = 14  # files of each tool with a row of their own


class Row(NamedTuple):
    """A configuration's figures."""

    file: str
    keys: int
    carried: int
    differs: int
    named: int
    same: int
    wrong: list[str]
    lost: list[str]


def main() -> None:
    folder = Path(sys.argv[1])
    rows: dict[str, list[Row]] = {}
    refused: dict[str, Counter[str]] = {}
    others = 0
    for file in sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES):
        text = file.read_text(encoding="utf-8")
        tool = tool_of(text)
        if not tool:
            others += 1
            continue
        try:
            converted = convert(text, str(file))
        except InputError as error:
            refused.setdefault(tool, Counter())[error.problems[0].what] += 1
            continue
        rows.setdefault(tool, []).append(row_of(str(file.relative_to(folder)), text, tool, converted))
    for of_tool in rows.values():
        for row in chosen(of_tool):
            row.lost.extend(uninfluential_keys((folder / row.file).read_text(encoding="utf-8")))
    print_report(rows, refused, others, json.loads((folder / "commits.json").read_text()))


def chosen(rows: list[Row]) -> list[Row]:
    """Those with rows of their own, evenly spaced in the order of their names."""
    return rows[:: max(1, len(rows) // SHOWN)][:SHOWN]


def row_of(file: str, text: str, tool: str, converted: Converted) -> Row:
    run = run_from(copy.deepcopy(converted.run), {}, {(): file})  # raises where it is none
    plain = run.model_dump(mode="json", by_alias=True)
    expected = EXPECTED[tool](text)
    wrong = [f"{key}: {value_of(plain, key)}, not {value}" for key, value in expected.items()
             if not equal(value_of(plain, key), value)]  # fmt: skip
    if any("adamw is taken" in line for line in converted.differs):  # and so the other optimizer is told
        wrong = [line for line in wrong if not line.startswith("train.optimizer: ")]
    told = {
        line.split(": ")[1].partition(" = ")[0] for line in converted.not_carried + converted.differs if " = " in line
    }
    keys = {*converted.carried, *told, *converted.same}
    return Row(
        file,
        len(keys),
        len(converted.carried.keys() - told),
        len(converted.carried.keys() & told),
        len(told - converted.carried.keys()),
        len(converted.same.keys() - told),
        wrong,
        sorted(uncounted_keys(text, tool, keys)),
    )


def uncounted_keys(text: str, tool: str, counted: set[str]) -> set[str]:
    """Keys of the file that are neither carried over nor told nor said to need nothing."""
    return set() if tool == COMMANDS else {".".join(map(str, key)) for key, _ in flat(yaml.safe_load(text))} - counted


def uninfluential_keys(text: str) -> list[str]:
    """Keys counted as carried over whose other values change nothing."""
    tool, before = tool_of(text), convert(text, "file")
    keys = []
    for key in before.carried:
        changed = with_another(text, tool, key)
        if changed is None:
            continue
        try:
            after = convert(changed, "file")
        except InputError:  # the other value is wrong, and so was seen
            continue
        if without_places(after) == without_places(before):
            keys.append(f"{key}: another value changes nothing")
    return keys


def without_places(converted: Converted) -> list[Any]:
    told = [[re.sub(r"^\S+:\d+: ", "", line) for line in lines] for lines in (converted.not_carried, converted.differs)]
    return [converted.run, told, converted.same]


def with_another(text: str, tool: str, key: str) -> str | None:
    """The configuration with another value of a key."""
    if tool == COMMANDS:
        pattern = re.compile(rf"(--{re.escape(key)}(?:=|\s+))([\w./-]+)")
        match = pattern.search(text)
        if match is None or match[2].startswith("--"):
            return None
        return text[: match.start(2)] + str(another(match[2])) + text[match.end(2) :]
    tree = yaml.safe_load(text)
    holder, *rest = tree, *key.split(".")
    for name in rest[:-1]:
        holder = holder[int(name)] if isinstance(holder, list) else holder[name]
    name = int(rest[-1]) if isinstance(holder, list) else rest[-1]
    holder[name] = another(holder[name])
    return yaml.safe_dump(tree, sort_keys=False)


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 3
    if isinstance(value, float):
        return value * 0.5 or 0.25
    if isinstance(value, list):
        return [*value, "other"]
    if isinstance(value, str) and re.fullmatch(r"[\d.]+(e-?\d+)?", value):
        return str(float(value) * 0.5) if "e" in value or "." in value else str(int(value) + 3)
    return f"{value}x"


# What a run file must say, read from the other tool's file by its meaning there.


def of_axolotl(text: str) -> dict[str, Any]:
    tree = yaml.safe_load(text)
    types = [data_set.get("type") for data_set in tree.get("datasets") or []]
    rl, adapter = tree.get("rl"), tree.get("adapter")
    is_text = tree.get("pretraining_dataset") or (types and all(str(kind).startswith("completion") for kind in types))
    micro, steps = tree.get("micro_batch_size", 1), tree.get("gradient_accumulation_steps")
    parts = steps or max(1, (tree.get("batch_size") or micro) // micro)
    share = float(tree.get("val_set_size") or 0)
    expected = {
        "objective": "preference" if rl else "causal" if is_text else "chat",
        "preference.loss": rl or "dpo",
        "run": tree["output_dir"] or "",
        "model.from": tree["base_model"],
        "data.block": tree.get("sequence_len", 512),
        "train.batch": micro * parts,
        "train.micro_batch": micro,
        "train.learning_rate": float(tree["learning_rate"]),
        "train.weight_decay": float(tree.get("weight_decay") or 0),
        "train.schedule": schedule_of(tree.get("lr_scheduler") or "cosine"),
        "train.optimizer": optimizer_of(tree.get("optimizer") or "adamw_torch"),
        "data.validation": 0.05 if share >= 1 else share,
        "model.quantize": quantized(tree, adapter),
        "seed": tree.get("seed") or 42,
    }
    if tree.get("test_datasets"):
        del expected["data.validation"]
    if tree.get("max_steps"):
        expected["train.steps"] = tree["max_steps"]
    else:
        expected["train.epochs"] = tree.get("num_epochs") or 1
    if adapter:
        expected |= {"model.lora.rank": tree.get("lora_r") or 8, "model.lora.alpha": tree.get("lora_alpha") or 8,
                     "model.lora.dropout": float(tree.get("lora_dropout") or 0)}  # fmt: skip
    if tree.get("evals_per_epoch"):
        expected["validate.every"] = f"{1 / tree['evals_per_epoch']:.4g} epoch"
    if tree.get("saves_per_epoch"):
        expected["checkpoint.every"] = f"{1 / tree['saves_per_epoch']:.4g} epoch"
    if tree.get("warmup_steps") or tree.get("warmup_ratio"):
        expected["train.warmup"] = tree.get("warmup_steps") or tree["warmup_ratio"]
        if expected["train.schedule"] == "constant" and tree["lr_scheduler"] == "constant":
            expected["train.warmup"] = 0
    return expected


def quantized(tree: dict[str, Any], adapter: str | None) -> str:
    if not adapter:
        return "none"
    return "nf4" if adapter == "qlora" or tree.get("load_in_4bit") else "int8" if tree.get("load_in_8bit") else "none"


def schedule_of(name: str) -> str:
    known = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
             "cosine_with_min_lr": "cosine", "rex": "cosine", "one_cycle": "cosine"}  # fmt: skip
    return known.get(name, name)


def optimizer_of(name: str) -> str:
    for part, optimizer in (("8bit", "adamw8bit"), ("4bit", "adamw8bit"), ("adamw", "adamw"), ("muon", "muon"),
                            ("adafactor", "adafactor"), ("sgd", "sgd")):  # fmt: skip
        if part in name.lower().replace("_bnb_", "_"):
            return optimizer
    return "adamw"


def of_llama_factory(text: str) -> dict[str, Any]:
    tree = yaml.safe_load(text)
    stage, kind = tree.get("stage", "sft"), tree.get("finetuning_type", "lora")
    micro, parts = tree.get("per_device_train_batch_size", 8), tree.get("gradient_accumulation_steps", 1)
    expected = {
        "objective": {"pt": "causal", "sft": "chat", "dpo": "preference", "kto": "preference"}[stage],
        "model.from": tree["model_name_or_path"],
        "run": tree["output_dir"],
        "data.block": tree.get("cutoff_len", 2048),
        "train.batch": micro * parts,
        "train.micro_batch": micro,
        "train.learning_rate": float(tree.get("learning_rate", 5e-5)),
        "train.schedule": schedule_of(tree.get("lr_scheduler_type", "linear")),
        "train.warmup": tree.get("warmup_steps") or tree.get("warmup_ratio") or 0,
        "train.precision": "fp8"
        if tree.get("fp8")
        else "bf16"
        if tree.get("bf16") or tree.get("pure_bf16")
        else "fp32",
        "model.quantize": {4: "nf4", 8: "int8"}.get(tree.get("quantization_bit"), "none"),
    }
    if kind in ("lora", "oft"):
        rank = tree.get("lora_rank", 8)
        expected |= {"model.lora.rank": rank, "model.lora.alpha": tree.get("lora_alpha") or 2 * rank}
    if (tree.get("max_steps") or -1) > 0:
        expected["train.steps"] = tree["max_steps"]
    else:
        expected["train.epochs"] = tree.get("num_train_epochs", 3)
    if tree.get("save_steps"):
        expected["checkpoint.every"] = tree["save_steps"]
    if stage == "dpo":
        expected["preference.beta"] = tree.get("pref_beta", 0.1)
    return expected


def of_command(text: str) -> dict[str, Any]:
    command = re.sub(r"\\\s*\n", " ", re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE))
    command = next(line for line in command.splitlines() if re.search(r"run_[cm]lm(_no_trainer)?\.py", line))

    def argument(name: str, usual: Any = None) -> Any:
        match = re.search(rf"--{name}(?:=|\s+)[\"']?([^\s\"']+)", command)
        if match is None or "$" in match[1]:
            return usual
        return type(usual)(match[1]) if usual is not None else match[1]

    processes = re.search(r"--(?:nproc_per_node|num_gpus|num_processes)[= ](\d+)", command)
    batch = argument("per_device_train_batch_size", 8) * argument("gradient_accumulation_steps", 1)
    expected = {
        "objective": "masked" if "run_mlm" in command else "causal",
        "train.batch": batch * (int(processes[1]) if processes else 1),
        "train.learning_rate": argument("learning_rate", 5e-5),
        "train.weight_decay": argument("weight_decay", 0.0),
        "train.schedule": "linear",
    }
    if argument("lr_scheduler_type"):
        expected["train.schedule"] = schedule_of(argument("lr_scheduler_type"))
    if argument("block_size"):
        expected["data.block"] = int(argument("block_size"))
    steps = argument("max_steps") or argument("max_train_steps")
    if steps and int(steps) > 0:
        expected["train.steps"] = int(steps)
    else:
        expected["train.epochs"] = argument("num_train_epochs", 3.0)
    if argument("model_name_or_path"):
        expected["model.from"] = argument("model_name_or_path")
    return expected


COMMANDS = "run_clm.py and run_mlm.py"
EXPECTED = {"axolotl": of_axolotl, "LLaMA-Factory": of_llama_factory, COMMANDS: of_command}


def value_of(plain: dict[str, Any], dotted: str) -> Any:
    value: Any = plain
    for name in dotted.split("."):
        value = value[name] if value is not None else None
    return value


def equal(left: Any, right: Any) -> bool:
    numbers = isinstance(left, int | float) and isinstance(right, int | float)
    return abs(left - right) < 1e-9 * max(1, abs(right)) if numbers else left == right


def print_report(
    rows: dict[str, list[Row]], refused: dict[str, Counter[str]], others: int, commits: dict[str, str]
) -> None:
    print("# `artel config convert` on public configurations\n")
    print("Made by `python benchmarks/convert.py FOLDER`, which says what the columns are. FOLDER was filled by")
    print("`python benchmarks/convert_folder.py FOLDER CLONE…` from clones of these repositories:\n")
    print("| repository | commit |\n|---|---|")
    for repository, commit in commits.items():
        print(f"| {repository} | {commit} |")
    print("\n## All of them\n")
    print("| tool | converted | refused | keys | carried over | with a difference | named | nothing | wrong | lost |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for tool, of_tool in rows.items():
        sums = [sum(column) for column in zip(*(astuple_numbers(row) for row in of_tool), strict=True)]
        print(f"| {tool} | {len(of_tool)} | {refused.get(tool, Counter()).total()} | {' | '.join(map(str, sums))} |")
    print(f"\n{others} other YAML files of these folders are of none of the tools (accelerate, clouds).\n")
    print("Refused, with exit status 2, is what trains nothing or by what artel has not:\n")
    for tool, reasons in refused.items():
        for reason, count in reasons.most_common():
            print(f"- {tool}, {count}: {reason}")
    print(f"\n## {SHOWN} of each, evenly spaced in the order of their names\n")
    print("| file | keys | carried over | with a difference | named | nothing needed | wrong | lost |")
    print("|---|---|---|---|---|---|---|---|")
    for of_tool in rows.values():
        for row in chosen(of_tool):
            print(f"| {row.file} | {' | '.join(map(str, astuple_numbers(row)))} |")
    for row in (row for of_tool in rows.values() for row in of_tool):
        for what in (*row.wrong, *row.lost):
            print(f"\n{row.file}: {what}")


def astuple_numbers(row: Row) -> list[int]:
    return [row.keys, row.carried, row.differs, row.named, row.same, len(row.wrong), len(row.lost)]


if __name__ == "__main__":
    main()
