"""`artel config convert` converts all that artel has, and calls missing only what it lacks."""

import re

import pytest
from transformers import TrainingArguments

from artel.config.converters.command_line import is_command_line
from artel.config.converters.grpo import build_table
from artel.config.converters.tools import convert
from artel.config.converters.trainer import find_optimizer
from artel.config.converters.trl import TABLE
from artel.config.other_names import OTHER_NAMES
from artel.errors import InputError
from artel.registry import OBJECTIVES, OPTIMIZERS, SCHEDULES, TRACKERS

COMMAND = "python run_clm.py --model_name_or_path m --train_file a"


def test_an_optimizer_that_is_named_as_missing_is_missing():
    from transformers.training_args import OptimizerNames

    ours = {name.replace("_", "") for name in OPTIMIZERS.names}
    others = [name.value for name in OptimizerNames]
    for name in [*others, *OPTIMIZERS.names, "muon", "dion", "adopt_adamw", "came_pytorch", "PagedAdamW8bit", "Lion"]:
        optimizer, difference = find_optimizer(name)
        assert optimizer in OPTIMIZERS
        if "no such optimizer" in difference:
            assert re.sub(r"_|paged|bnb", "", name.lower()) not in ours
            assert all(each in difference for each in OPTIMIZERS.names)
    for name in OPTIMIZERS.names:
        assert find_optimizer(name)[0] == name
    assert find_optimizer("adafactor")[0] == "adafactor"
    assert "no such optimizer" in find_optimizer("rmsprop")[1]


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


def test_each_objective_of_another_tool_that_artel_has_is_named_in_its_refusal():
    """axolotl and LLaMA-Factory train reward models."""
    for text, objective in (
        ("base_model: m\nreward_model: true\ndatasets: [{path: a, type: b}]\n", "reward"),
        ("model_name_or_path: m\nstage: rm\ndo_train: true\ndataset: a\n", "reward"),
    ):
        with pytest.raises(InputError, match=f"objective: {objective}"):
            convert(text, "old")


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
def test_a_name_of_something_that_artel_has_is_not_called_unknown(name):
    try:
        result = convert(f"{COMMAND} --{name} 3", "old")
    except InputError:  # 3 is no value of it
        return
    lines = [line for line in result.not_carried + result.differs if f": {name} = " in line]
    assert not any("artel has no equivalent" in line for line in lines)


def test_every_argument_of_trls_script_is_known_and_defaults_are_its_own():
    trl = pytest.importorskip("trl", reason="trl is not installed")
    import dataclasses

    from trl.scripts.grpo import GRPOScriptArguments

    classes = (GRPOScriptArguments, trl.GRPOConfig, trl.ModelConfig, trl.DatasetMixtureConfig)
    fields = {field.name: field for kind in classes for field in dataclasses.fields(kind)}
    own = {field.name for field in dataclasses.fields(trl.GRPOConfig)} - {
        field.name for field in dataclasses.fields(TrainingArguments)
    }
    known = own | {field.name for kind in (classes[0], *classes[2:]) for field in dataclasses.fields(kind)}
    text = "model_name_or_path: m\nreward_funcs: [a.b]\ndataset_name: a.jsonl\n"
    for name in known - {"model_name_or_path", "reward_funcs", "dataset_name", "datasets"}:
        for value in ("3", "true"):
            try:
                result = convert(f"{text}{name}: {value}\n", "old")
            except InputError as error:  # it is no value of this argument
                assert f"old:4: {name}" in str(error)  # noqa: PT017
                continue
            assert not any("artel has no equivalent" in line for line in result.not_carried), name
    for table in (build_table(), TABLE):
        for name, default in table.defaults.items():
            if name in fields and fields[name].default is not dataclasses.MISSING:
                assert fields[name].default == default, name


def test_addresses_of_the_hub_are_read():
    result = convert(f"{COMMAND.replace('--train_file a', '--dataset_name OWNER/NAME')}", "old")
    assert result.run["data"]["sources"][0]["path"].startswith("hf://datasets/OWNER/NAME@refs/convert/parquet/")


def test_a_run_file_that_names_a_script_is_a_run_file():
    assert is_command_line(COMMAND)
    assert not is_command_line("# made after run_clm.py\nrun: a\ndata:\n  sources: [{path: code/run_mlm.py}]\n")
