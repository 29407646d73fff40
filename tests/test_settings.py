"""Settings that entries of registries bring along: read, checked, listed, kept and compared as all keys are."""

import copy
import json
import subprocess
import sys

import pytest
import yaml
from pydantic import Field

from artel.config import RunConfig, Section, SourceConfig, TrainConfig, dump_run, parse_run, result_differences
from artel.config.json_schema import run_file_schema
from artel.config.suggest import all_keys
from artel.errors import InputError
from artel.preparing.stores import store_key
from artel.registry import FORMATS, OPTIMIZERS, TRACKERS
from artel.text.formats.dummy import DUMMY
from artel.training.unused_settings import find_unused_settings
from support.runs import ENVIRONMENT, TINY, artel


class Wobble(Section):
    """How it wobbles."""

    width: float = Field(default=1.0, gt=0, description="In steps.")
    quiet: bool = Field(default=False, description="Says nothing.", json_schema_extra={"shapes_result": False})


class Needed(Section):
    name: str = Field(description="Has no default.")


@pytest.fixture(autouse=True)
def entries():
    """What plugins would register, for the length of a test."""
    registries = (FORMATS, OPTIMIZERS, TRACKERS)
    before = [{name: dict(table) for name, table in vars(each).items() if name != "key"} for each in registries]
    for registry in registries:
        registry.register("wobbly", settings=Wobble)(DUMMY if registry is FORMATS else object())
    OPTIMIZERS.register("needy", settings=Needed)(object())
    yield
    for registry, tables in zip(registries, before, strict=True):
        vars(registry).update(tables)


def run_of(**train):
    return parse_run({**copy.deepcopy(TINY), "train": TINY["train"] | train}, {}, {(): "run.yaml"})


def problems_of(**train):
    with pytest.raises(InputError) as error:
        run_of(**train)
    return {problem.where.removeprefix("run.yaml: "): problem for problem in error.value.problems}


def test_settings_stand_beside_the_key_that_takes_the_name():
    source = SourceConfig.model_validate({"format": "wobbly", "wobbly": {"width": 3.0}})
    run = RunConfig.model_validate({"track": ["wobbly"], "wobbly": {"width": 2.0}})
    assert (source.settings(Wobble).width, run.settings(Wobble).width) == (3.0, 2.0)
    assert run_of(optimizer="wobbly").train.settings(Wobble) == Wobble()
    assert TrainConfig().settings(Wobble) == Wobble()  # also where nobody names the entry


def test_mistakes_in_settings_are_reported_with_their_keys():
    found = problems_of(optimizer="wobbly", wobbly={"width": -1, "widht": 2}, wobly={})
    assert set(found) == {"train.wobbly.width", "train.wobbly.widht", "train.wobly"}
    assert found["train.wobbly.widht"].fix == "did you mean train.wobbly.width?"
    assert found["train.wobly"].fix == "did you mean train.wobbly?"
    assert set(problems_of(optimizer="needy")) == {"train.needy.name"}
    assert set(problems_of(optimizer="wobbly", wobbly=3)) == {"train.wobbly"}


def test_settings_are_in_what_a_run_writes_and_are_compared():
    run = run_of(optimizer="wobbly", wobbly={"width": 2.0})
    tree = yaml.safe_load(dump_run(run))
    assert tree["train"]["wobbly"] == {"width": 2.0, "quiet": False}
    assert result_differences(run, parse_run(tree, {}, {(): "config.yaml"})) == []
    other = run_of(optimizer="wobbly", wobbly={"width": 4.0, "quiet": True})
    assert result_differences(run, other) == ["train.wobbly.width: 2.0 -> 4.0"]
    assert result_differences(run_of(), run)[-1].startswith("train.wobbly: (not set) -> ")
    assert not any("wobbly" in key for key in yaml.safe_load(dump_run(run_of()))["train"])


def test_settings_of_formats_and_objectives_are_in_the_key_of_a_store():
    def key(width):
        source = {"format": "wobbly", "wobbly": {"width": width}}
        return store_key(RunConfig.model_validate({"data": {"sources": [source]}}))

    assert key(1.0) != key(2.0)


def test_settings_of_an_entry_that_nobody_names_are_noted():
    note = "train.wobbly has no effect: train.optimizer is adamw"
    assert note in find_unused_settings(run_of(wobbly={"width": 2.0}))
    assert find_unused_settings(run_of(optimizer="adamw")) == []


def test_an_entry_with_the_name_of_a_key_is_refused():
    OPTIMIZERS.register("clip", settings=Wobble)(object())
    assert "register the plugin's entry under another name" in str(problems_of(optimizer="clip")["train"])


def test_the_schema_for_editors_has_them():
    section = run_file_schema()["$defs"]["TrainConfig"]
    assert section["properties"]["wobbly"]["description"] == "optimizer wobbly: how it wobbles."
    assert section["properties"]["wobbly"]["properties"]["width"]["exclusiveMinimum"] == 0
    assert section["additionalProperties"] is False
    assert "train.wobbly.width" in all_keys(RunConfig)


def test_help_lists_those_of_a_plugin(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from pydantic import Field\nfrom artel.config import Section\nfrom artel.registry import SCHEDULES\n"
        "class Mine(Section):\n    depth: int = Field(default=7, description='How deep.')\n"
        "SCHEDULES.register('mine', settings=Mine)(print)\n"
    )
    shown = artel("config", "explain", "train.mine", "--plugin", "mine", cwd=tmp_path)
    assert "train.mine.depth = 7\n    How deep." in shown.stdout, shown.stderr
    schema = json.loads(artel("config", "schema", "--plugin", "mine", cwd=tmp_path).stdout)
    assert "mine" in schema["$defs"]["TrainConfig"]["properties"]
    assert "did you mean train.decay?" in artel("config", "explain", "train.deca", cwd=tmp_path).stderr


def test_asking_all_entries_for_their_settings_imports_no_torch():
    code = (
        "import sys; from artel.config.json_schema import run_file_schema; run_file_schema()\n"
        "print([name for name in ('torch', 'transformers', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout.strip() == "[]"


def test_settings_of_a_tracker_do_not_shape_the_result():
    """It can be added to a run under way."""
    before, now = (parse_run({**copy.deepcopy(TINY), **changes}, {}, {}) for changes in ({}, {"track": ["wobbly"]}))
    assert result_differences(before, now) == []
