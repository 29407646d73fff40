"""What `artel config convert` says of artel is true of the registries, the schema and the verbs of today."""

import ast
import re
import typing
from pathlib import Path

import pytest

import artel
from artel.cli.main import app
from artel.config import RunConfig, run_from
from artel.config.converters.command_line import is_command_line
from artel.config.converters.tools import convert
from artel.config.converters.trainer import optimizer_of
from artel.config.other_names import OTHER_NAMES
from artel.config.schema.model import ModelConfig
from artel.config.schema.objectives import PreferenceConfig
from artel.config.suggest import all_keys
from artel.errors import InputError
from artel.registry import OBJECTIVES, OPTIMIZERS, SCHEDULES, TRACKERS

FOLDER = Path(artel.__file__).parent / "config" / "converters"
KEYS = {re.sub(r"\.0\b", "", key) for key in all_keys(RunConfig)}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
# Keys of the other tools in sections that run files have too, and names of parameters.
_OF_OTHER_TOOLS = ("model.config.", "model.name", "model.layers", "tokenizer.chat_template", "tokenizer.max_seq")
COMMAND = "python run_clm.py --model_name_or_path m --train_file a"


def strings(file):
    """The texts of a module that people read: all but docstrings and keys of tables; parts of f-strings together."""
    tree = ast.parse(file.read_text())
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    keys = {id(key) for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (inside | keys):
            yield node.lineno, node.value


TEXTS = [
    (f"{file.relative_to(FOLDER)}:{line}", text)
    for file in sorted(FOLDER.rglob("*.py"))
    for line, text in strings(file)
    if " " in text and "\n" not in text
]


def test_the_texts_are_found():
    assert len(TEXTS) > 300
    assert any("artel has no such optimizer" in text for _, text in TEXTS)


def test_each_key_of_a_run_file_that_a_text_names_exists():
    wrong = []
    for place, text in TEXTS:
        for key in re.findall(r"(?<![\w./])([a-z_]+(?:\.[a-z_]+)+)", text):
            is_ours = key.partition(".")[0] in SECTIONS and not key.endswith((".py", ".json", ".yaml", ".cfg"))
            if is_ours and key not in KEYS and not key.startswith(_OF_OTHER_TOOLS):
                wrong.append(f"{place}: {key} in {text!r}")
    assert wrong == []


def test_each_value_that_a_text_advises_is_one_that_the_key_takes():
    advised = {
        (key, value)
        for _, text in TEXTS
        for key, value in re.findall(r"\b([a-z_]+\.[a-z_.]+): ([a-z_0-9]+)\b", text)
        if key in KEYS and value not in ("the", "true")
    }
    assert {("chat.too_long", "truncate_left"), ("train.precision", "auto"), ("parallel.data", "fsdp")} <= advised
    for key, value in advised:
        base = {"data": {"sources": [{"path": "a.txt"}]}, "model": {"from": "m", "lora": {"rank": 16}}}
        try:
            run_from(base, {key: value}, {(): "run.yaml"})
        except InputError as error:
            assert all(key not in problem.where for problem in error.problems), (key, value, str(error))  # noqa: PT017


def test_each_verb_that_a_text_names_exists():
    verbs = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    named = {verb for _, text in TEXTS for verb in re.findall(r"\bartel ([a-z]+) (?:[A-Z]{3}|config |--)", text)}
    assert {"export", "train"} <= named
    assert named <= verbs


def test_an_optimizer_that_is_named_as_missing_is_missing():
    from transformers.training_args import OptimizerNames

    ours = {name.replace("_", "") for name in OPTIMIZERS.names}
    others = [name.value for name in OptimizerNames]
    for name in [*others, *OPTIMIZERS.names, "muon", "dion", "adopt_adamw", "came_pytorch", "PagedAdamW8bit", "Lion"]:
        optimizer, difference = optimizer_of(name)
        assert optimizer in OPTIMIZERS
        if "no such optimizer" in difference:
            assert re.sub(r"_|paged|bnb", "", name.lower()) not in ours
            assert all(each in difference for each in OPTIMIZERS.names)
    for name in OPTIMIZERS.names:
        assert optimizer_of(name)[0] == name
    assert optimizer_of("adafactor")[0] == "adafactor"
    assert "no such optimizer" in optimizer_of("rmsprop")[1]


def test_a_schedule_that_is_named_as_missing_is_missing():
    from transformers.trainer_utils import SchedulerType

    for name in [kind.value for kind in SchedulerType]:
        result = convert(f"{COMMAND} --lr_scheduler_type {name}", "old")
        assert result.run["train"]["schedule"] in SCHEDULES
        if any("no such schedule" in line for line in result.differs):
            assert name not in SCHEDULES


def test_trackers_are_those_of_the_registry():
    for name in set(TRACKERS.names) - {"console", "jsonl"}:
        result = convert(f"{COMMAND} --report_to {name}", "old")
        assert result.run["track"] == ["console", "jsonl", name]
        assert not any("report_to" in line for line in result.not_carried + result.differs)
    (line,) = [line for line in convert(f"{COMMAND} --report_to comet_ml", "old").not_carried if "report_to" in line]
    assert all(name in line for name in set(TRACKERS.names) - {"console", "jsonl"})
    assert "comet_ml" not in TRACKERS


def test_what_is_refused_for_its_objective_is_no_objective():
    assert not {"diffusion", "ppo", "grpo", "plm", "permutation"} & set(OBJECTIVES.names)
    named = [(place, name) for place, text in TEXTS for name in re.findall(r"write objective: (\w+)", text)]
    assert {name for _, name in named} >= {"reward"}
    assert [place for place, name in named if name not in OBJECTIVES] == []


def test_each_objective_of_another_tool_that_artel_has_is_named_in_its_refusal():
    """axolotl and LLaMA-Factory train reward models."""
    for text, objective in (
        ("base_model: m\nreward_model: true\ndatasets: [{path: a, type: b}]\n", "reward"),
        ("model_name_or_path: m\nstage: rm\ndo_train: true\ndataset: a\n", "reward"),
    ):
        with pytest.raises(InputError, match=f"objective: {objective}"):
            convert(text, "old")


def test_lists_of_values_in_texts_are_those_of_the_schema():
    losses = typing.get_args(PreferenceConfig.model_fields["loss"].annotation)
    assert set(losses) == {"dpo", "ipo", "kto", "orpo", "simpo"}
    assert set(typing.get_args(ModelConfig.model_fields["quantize"].annotation)) == {"none", "int8", "nf4"}


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
def test_a_name_of_something_that_artel_has_is_not_called_unknown(name):
    try:
        result = convert(f"{COMMAND} --{name} 3", "old")
    except InputError:  # 3 is no value of it
        return
    lines = [line for line in result.not_carried + result.differs if f": {name} = " in line]
    assert not any("nothing in its place" in line for line in lines)


def test_addresses_of_the_hub_are_read():
    """No text says that artel cannot read hf://, and each such address is a source's path."""
    assert not [text for _, text in TEXTS if re.search(r"cannot read .*hf://|no adafactor", text)]
    result = convert(f"{COMMAND.replace('--train_file a', '--dataset_name OWNER/NAME')}", "old")
    assert result.run["data"]["sources"][0]["path"].startswith("hf://datasets/OWNER/NAME@refs/convert/parquet/")


def test_a_run_file_that_names_a_script_is_a_run_file():
    assert is_command_line(COMMAND)
    assert not is_command_line("# made after run_clm.py\nrun: a\ndata:\n  sources: [{path: code/run_mlm.py}]\n")
