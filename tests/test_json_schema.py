"""The JSON schema of a run file, as an editor uses it."""

import ast
import copy
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from artel.config import RunConfig, parse_run, recipe_names, recipe_text, schema
from artel.config.json_schema import run_file_schema
from artel.errors import InputError
from support.runs import TINY, artel, merged

SCHEMA = run_file_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def mistakes(tree) -> list[str]:
    return [".".join(map(str, error.absolute_path)) for error in VALIDATOR.iter_errors(tree)]


@pytest.mark.slow
def test_it_is_a_schema_and_the_command_prints_it():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(artel("config", "schema").stdout) == SCHEMA


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_right(name):
    assert mistakes(yaml.safe_load(recipe_text(name))) == []


def test_what_a_run_writes_is_right():
    run = parse_run(copy.deepcopy(TINY), {}, {(): "run"})
    assert mistakes(run.model_dump(mode="json", by_alias=True)) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.batch", "1k"),
        ("train.batch", 8),
        ("train.learning_rate", "5e-5"),
        ("train.learning_rate", 0.1),
        ("train.budget", "30min"),
        ("train.warmup", 0.01),
        ("train.warmup", "2k"),
        ("train.compile", True),
        ("train.compile", "auto"),
        ("train.tokens", "2G"),
        ("checkpoint.every", 1500),
        ("checkpoint.every", "1 epoch"),
        ("data.sources", [{"path": "a.txt"}]),
        ("data.sources", [{"path": ["a.txt", "b.txt"]}]),
        ("data.validation", "dev.txt"),
        ("data.max_document", "100MB"),
        ("model.config", {"model_type": "gpt2", "n_layer": 3}),
    ],
)
def test_what_artel_reads_an_editor_takes(key, value):
    section, _, name = key.partition(".")
    tree = merged(TINY, {section: {name: value}})
    tree["train"] = {name: given for name, given in tree["train"].items() if name != "steps"}  # one length
    assert mistakes(tree) == []
    parse_run(tree, {}, {(): "run"})


@pytest.mark.parametrize(
    ("key", "value", "at"),
    [
        ("trin.batch", 8, ""),
        ("train.stps", 8, "train"),
        ("data.sources", [{"pth": "a.txt"}], "data.sources.0"),
        ("train.batch", "many", "train.batch"),
        ("train.batch", 0, "train.batch"),
        ("train.learning_rate", "fast", "train.learning_rate"),
        ("train.learning_rate", -1, "train.learning_rate"),
        ("train.optimizer", "adam", "train.optimizer"),
        ("train.budget", "30 minutes", "train.budget"),
        ("data.packing", "tight", "data.packing"),
        ("data.sources", "a.txt", "data.sources"),
    ],
)
def test_what_artel_refuses_an_editor_marks(key, value, at):
    section, _, name = key.partition(".")
    tree = merged(TINY, {section: {name: value}})
    if name in ("budget",):
        del tree["train"]["steps"]
    assert mistakes(tree) == [at]
    with pytest.raises(InputError):
        parse_run(copy.deepcopy(tree), {}, {(): "run"})


def test_every_key_has_its_help_and_default():
    for name, section in {"RunConfig": SCHEMA, **SCHEMA["$defs"]}.items():
        for key, about in section["properties"].items():
            assert about.get("description") or name == "HeadWeights", f"{name}.{key}"
    train = SCHEMA["$defs"]["TrainConfig"]["properties"]
    assert (train["warmup"]["default"], SCHEMA["$defs"]["ValidateConfig"]["properties"]["every"]["default"]) == (
        0.01, "1 epoch")  # fmt: skip
    keys = {field.alias or name for name, field in RunConfig.model_fields.items()}
    assert set(SCHEMA["properties"]) == keys | RunConfig.entry_sections().keys()


def test_defaults_are_named_so_that_type_checkers_see_them():
    """Without pydantic's plugin a checker takes `Field(3)` for a key that must be given, by PEP 681."""
    files = sorted(Path(schema.__file__).parent.glob("*.py"))
    calls = [node for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    fields = [call for call in calls if ast.unparse(call.func) == "Field"]
    assert len(fields) > 100
    assert [ast.unparse(call) for call in fields if call.args] == []
