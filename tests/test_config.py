"""The run file: quantities, overrides, and errors that name the key, the line and the remedy."""

import os
import re
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

from artel.config import (
    Overrides,
    RunConfig,
    TrainConfig,
    dump_run,
    load_run,
    parse_run,
    recipe_names,
    recipe_text,
    result_differences,
)
from artel.config.other_names import OTHER_NAMES, OTHER_OBJECTIVES
from artel.config.read import read_file
from artel.config.schema.quantities import Interval, Warmup, read_bytes, read_count, read_number
from artel.config.suggest import all_keys
from artel.errors import InputError
from artel.launching.read_run import read_run
from artel.registry import OBJECTIVES
from artel.training.schedule import Length, rate

MINIMAL = "data: {sources: [{path: a.txt}]}\n"


def refused(text: str, *overrides: str) -> InputError:
    """The error of a run file with this text."""
    Path("run.yaml").write_text(text)
    with pytest.raises(InputError) as error:
        load_run("run.yaml", Overrides.parse(overrides))
    return error.value


@pytest.mark.parametrize(
    ("read", "written", "value"),
    [
        (read_number, "5e-5", 5e-5), (read_number, ".5", 0.5), (read_number, 3, 3.0), (read_number, "1_000.5", 1000.5),
        (read_count, "30k", 30_000), (read_count, "1_000", 1000), (read_count, "1e9", 10**9),
        (read_count, "1.5M", 1_500_000),
        (read_bytes, "2G", 2 * 10**9), (read_bytes, "512Ki", 2**19), (read_bytes, "100MB", 10**8),
        (Interval.read, 1500, Interval(steps=1500)), (Interval.read, "1 epoch", Interval(epochs=1)),
        (Interval.read, "90min", Interval(seconds=5400)), (Interval.read, "2h", Interval(seconds=7200)),
        (Interval.read, "never", Interval()), (Interval.read, "30k", Interval(steps=30_000)),
        (Warmup.read, 200, Warmup(steps=200)), (Warmup.read, "0.01", Warmup(fraction=0.01)),
    ],
)  # fmt: skip
def test_quantities_are_read_as_people_mean_them(read, written, value):
    assert read(written) == value


@pytest.mark.parametrize(
    ("read", "written"),
    [(read_number, "abc"), (read_number, True), (read_count, 1.5), (read_count, "3x"), (read_bytes, "2 parsec"),
     (read_count, "1" * 5000), (read_count, 10**400),
     (Interval.read, "0"), (Interval.read, "12 parsec"), (Interval.read, "1e12h"),
     (Interval.read, [1]), (Warmup.read, -1)],
)  # fmt: skip
def test_what_is_no_quantity_is_refused(read, written):
    with pytest.raises(ValueError, match=r"write|below zero|not above|too large"):
        read(written)


def test_all_problems_at_once_each_with_line_and_remedy():
    text = (
        "sed: 3\ndata:\n  sources:\n    - path: x\n      formt: text\n  blok: 12\n"
        "train: {learning_rate: abc, optimizer: adam}\n"
    )
    error = refused(text, "train.warmup=oops", "checkpoint.evry=3")
    for part in ("run.yaml:1: sed", "did you mean seed?", "run.yaml:5: data.sources.0.formt",
                 "did you mean data.sources.0.format?",
                 "run.yaml:6: data.blok", "did you mean data.block?", "run.yaml:7: train.learning_rate", "5e-5",
                 "did you mean adamw?", "override train.warmup=oops", "override checkpoint.evry=3",
                 "did you mean checkpoint.every?"):  # fmt: skip
        assert part in str(error)
    assert len(error.problems) == 7


def test_swapped_letters_are_the_nearest_name():
    error = refused("data: {sources: [{path: x}]}\nobjective: policy\npolicy: {preset: gpro}\n")
    assert "did you mean grpo?" in str(error)


@pytest.mark.parametrize("words", [["a.path", "=", "x y"], ["a.path", "=x y"], ["a.path=", "x y"]])
def test_spaces_around_the_equals_sign_are_one_error(words):
    overrides = Overrides.parse(["train.steps=3", *words, "seed=1"])
    ((problem,),) = overrides.problems.values()
    assert problem.fix == "no spaces around =: write 'a.path=x y'"
    assert overrides == {"train.steps": 3, "seed": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "not valid YAML"), ("- 1", "is not a mapping"), ("seed: 1\nseed: 2\n" + MINIMAL, "given twice"),
     ("data: 3", "is not a section"), ("", "has no text"), (MINIMAL + "train: {steps: 1, epochs: 2}", "keep one"),
     (MINIMAL + "seed: true", "not a number"), (MINIMAL + "model: {config: {n_layer: 2}}", "no model_type"),
     (MINIMAL + "run: s3://bucket/run", "checkpoint.copy_to"),
     (MINIMAL + "tokenizer: {train: {special: ['']}}", "at least 1 character"),
     (MINIMAL.ljust(10_000_001, "#"), "has 10,000,001 bytes")],
    ids=lambda value: value[:60],
)  # fmt: skip
def test_broken_files(text, message):
    assert message in str(refused(text))


def test_problems_come_in_the_order_of_the_file_with_what_to_write(tmp_path):
    """Also the model type, which is looked at however much else is wrong."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "data: {sources: [{format: dummy}], blok: 3}\n"
        "model: {config: {model_type: gpt3}}\nobjective: causl\n"
        "train:\n  steps: ten\n  batch: -3\n  learning_rate: x\nevry: 3\n"
    )
    with pytest.raises(InputError) as error:
        read_run(str(file), {})
    problems = [(int(problem.where.split(":")[1]), problem.fix) for problem in error.value.problems]
    assert problems == [
        (1, "did you mean data.block?"),
        (2, "did you mean gptj or gpt2 or gpt-sw3?"),
        (3, "did you mean causal?"),
        (5, "write, for example, 512 or 30k"),
        (6, "write 1 or more"),
        (7, "write, for example, 5e-5"),
        (8, "did you mean validate.every?"),
    ]


def test_what_is_dumped_is_read_back_equal(tmp_path):
    run = load_run(
        "novel-small",
        Overrides.parse(["train.warmup=0.1", "checkpoint.every=90min", "train.batch=1k", "data.validation=0"]),
    )
    file = tmp_path / "config.yaml"
    file.write_text(dump_run(run))
    assert load_run(str(file)) == run
    assert load_run(str(tmp_path)) == run.model_copy(update={"run": str(tmp_path)})  # a folder that is named is the run


def test_only_keys_that_shape_the_result_count_as_differences():
    before = load_run("novel-small")
    same = load_run(
        "novel-small",
        Overrides.parse(["checkpoint.keep=9", "track=[jsonl]", "train.micro_batch=2", "validate.every=7"]),
    )
    other = load_run("novel-small", Overrides.parse(["train.learning_rate=1", "data.block=99"]))
    assert result_differences(before, same) == []
    assert [line.split(":")[0] for line in result_differences(before, other)] == ["data.block", "train.learning_rate"]


def test_a_difference_names_the_value_within_a_section_a_list_or_a_mapping():
    model = {"model_type": "llama", "hidden_size": 64}
    sources = [{"path": "a.txt"}, {"path": "b.txt"}]
    before = RunConfig.model_validate({"data": {"sources": sources}, "model": {"config": model}})
    moved = [sources[0], {"path": "c.txt"}]
    config = {"data": {"sources": moved}, "model": {"config": model | {"hidden_size": 32, "vocab_size": 9}}}
    assert set(result_differences(before, RunConfig.model_validate(config))) == {
        "data.sources.1.path: ['b.txt'] -> ['c.txt']",
        "model.config.hidden_size: 64 -> 32",
        "model.config.vocab_size: (not set) -> 9",
    }
    fewer = RunConfig.model_validate({"data": {"sources": sources[:1]}, "model": {"config": model}})
    (line,) = result_differences(before, fewer)
    assert line.startswith("data.sources: [{")


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_loads_and_its_header_says_what_for_what_it_needs_what_it_reached_and_how(name):
    assert isinstance(load_run(name), RunConfig)
    header = list(takewhile(lambda line: line.startswith("#"), recipe_text(name).splitlines()))
    assert header[0].startswith(f"# {name}: ")
    assert any(line.startswith("# Needs") for line in header)
    assert any(line.startswith("# Reached") for line in header)
    assert any(line.startswith(f"#   artel train {name}") for line in header)


def test_schedules():
    def rates(**keys):
        train = TrainConfig.model_validate({"warmup": 10, **keys})
        return [rate(train, step, 100) for step in range(100)]

    for schedule in ("linear", "cosine", "constant", "wsd"):
        result = rates(schedule=schedule, minimum_learning_rate=0.1)
        assert result[0] == pytest.approx(0.1)
        assert result[9] == result[10] == 1
        assert all(after <= before for before, after in pairwise(result[10:]))
    assert rates(schedule="constant")[-1] == 1
    assert rates(schedule="linear")[55] == pytest.approx(0.5)
    assert rates(schedule="cosine")[55] == pytest.approx(0.5)
    assert rates(schedule="wsd")[79] == 1
    assert rates(schedule="wsd")[90] == pytest.approx(0.5)
    assert rates(schedule="linear")[-1] == pytest.approx(1 / 90)


def test_length_and_intervals():
    length = Length.from_config(TrainConfig.model_validate({"epochs": 3, "batch": 4}), samples=10, tokens=8)
    assert (length.total_samples, length.steps) == (30, 8)
    assert [step for step in range(1, 9) if length.is_due(Interval(epochs=1), step)] == [3, 5, 8]
    assert [step for step in range(1, 9) if length.is_due(Interval(steps=3), step)] == [3, 6]
    assert Length.from_config(TrainConfig.model_validate({"tokens": 100, "batch": 4}), 10, 8).steps == 4
    assert Length.from_config(TrainConfig.model_validate({"steps": 5, "batch": 4}), 10, 8).total_samples == 20


# What no run can mean, by kind: each is refused with its bound, or its lower one, before anything is begun.
OUT_OF_BOUNDS = {
    "train.batch": ["10**18", 10**9, 0], "train.micro_batch": [10**9, 0], "train.threads": [10**6, 0],
    "tokenizer.train.vocab": [10**12, 5], "seed": [2**63, -1], "data.block": [10**12, 1], "train.steps": [10**18, 0],
    "train.tokens": [10**18], "train.epochs": [1e300, 0], "train.learning_rate": [1e9, 0], "train.betas": [[0.9, 1.0]],
    "train.weight_decay": [1e30, -1], "train.hang_timeout": ["1e9h", 0], "train.warmup": [10**18],
    "validate.every": ["1e300h", 10**18], "validate.new_tokens": [10**12], "checkpoint.keep": [10**18, 0],
    "parallel.tensor": [10**9, 0], "parallel.data": [10**9, 0],
    "parallel.shard": [0], "prepare.workers": [10**9, 0], "model.lora.rank": [10**9, 0], "log.every": [10**18, 0],
    "data.store": ["x" * 300, "x/" * 3000], "run": ["x" * 300], "model.from": ["x" * 300], "chat.template": ["x" * 300],
    "tokenizer.from": ["y/" + "x" * 300], "parallel.deepspeed": ["x" * 300], "data.from_store": ["x" * 300],
    "span_qa.question": [10**12], "masked.rate": [2], "preference.beta": [1e12], "data.sources.0.documents": [10**18],
}  # fmt: skip


@pytest.mark.parametrize("key", OUT_OF_BOUNDS)
def test_what_no_run_can_mean_is_refused_with_its_bound(key):
    for value in OUT_OF_BOUNDS[key]:
        text = str(refused("data: {sources: [{format: dummy}]}\n", f"{key}={value}"))
        assert key in text
        assert re.search(r"write|greater|less|longer|whole number|too large|0 to", text), text
        assert len(text) < 1000


def test_every_number_has_an_upper_bound():
    """Of each key: 10**300 is refused, where it is a number."""
    refused = set()
    for key in all_keys(RunConfig):
        try:
            run = parse_run(
                {"data": {"sources": [{"format": "dummy"}]}}, Overrides.parse([f"{key}=1e300"]), {(): "run.yaml"}
            )
        except InputError as error:
            refused |= {key} if "over" in str(error) or "less than" in str(error) else set()
        else:
            assert "e+300" not in dump_run(run), key
    assert {"train.batch", "data.block", "seed", "train.decay", "prepare.part"} <= refused
    assert len(refused) > 60


def test_large_seeds_are_kept_to_the_last_digit():
    for written in (2**63 - 1, str(2**63 - 1)):
        assert parse_run({"seed": written, "data": {"sources": [{"format": "dummy"}]}}, {}, {(): ""}).seed == 2**63 - 1


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("data.blocks", "did you mean data.block?"), ("data.blok", "did you mean data.block?"),
        ("validate.block", "blocks?"),
        ("learning_rate", "did you mean train.learning_rate?"), ("train.block", "did you mean data.block?"),
        ("lr", "artel calls it train.learning_rate"), ("train.lr", "artel calls it train.learning_rate"),
        ("train.learning-rate", "did you mean train.learning_rate?"), ("batch_size", "artel calls it train.batch"),
        ("train.max_length", "artel calls it data.block"), ("max_seq_length", "artel calls it data.block"),
        ("train.num_train_epochs", "artel calls it train.epochs"), ("train.Max_Steps", "artel calls it train.steps"),
        ("train.per_device_train_batch_size", "artel calls it train.micro_batch"),
        ("train.gradient_accumulation_steps", "artel calls it train.batch"), ("tokenizer.vocab_size", "train.vocab"),
        ("model.lora.r", "artel calls it model.lora.rank"), ("output_dir", "artel calls it run"),
        ("data.sources.0.text_field", "artel calls it data.sources.0.field"),
        ("data.sources.1.label_column", "artel calls it data.sources.1.label"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_shown_what_is_meant(key, says):
    with pytest.raises(InputError) as error:
        parse_run({"data": {"sources": [{"format": "dummy"}] * 2}}, Overrides.parse([f"{key}=1"]), {(): "run.yaml"})
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("objective", "says"),
    [("sft", "chat"), ("DPO", "preference, and preference.loss: dpo"), ("token_classification", "tokens"),
     ("mlm", "masked"), ("GRPO", "policy, and policy.preset: grpo")],
)  # fmt: skip
def test_another_tools_name_of_an_objective_is_the_only_problem(objective, says):
    tree = {"data": {"sources": [{"format": "chat", "path": "a.jsonl"}]}, "objective": objective}
    with pytest.raises(InputError) as error:
        parse_run(tree, {}, {(): "run.yaml"})
    (problem,) = error.value.problems
    assert problem.fix == f"artel calls it {says}"


def test_other_tools_names_lead_to_keys_and_objectives_that_there_are_and_are_none_themselves():
    objectives, keys = set(OBJECTIVES.names), set(all_keys(RunConfig))
    assert {name.partition(",")[0] for name in OTHER_OBJECTIVES.values()} <= objectives
    assert set(OTHER_NAMES.values()) <= keys
    assert not set(OTHER_OBJECTIVES) & objectives
    assert not set(OTHER_NAMES) & keys


def test_keys_that_yaml_takes_for_something_else():
    error = refused(MINIMAL + "2020-01-01: 3\non: 4\n~: 5\nmodel: {config: {model_type: gpt2, 2021-02-03: 1}}\n")
    for says in ("run.yaml:2: YAML reads the key 2020-01-01 as a date", "run.yaml:3: YAML reads the key on as",
                 "the key ~", "run.yaml:5: YAML reads the key 2021-02-03"):  # fmt: skip
        assert says in str(error)


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("data: {sources: [{path: a.txt, weight: -1}], souces: 3}\nmodel: {form: x, lora: {rank: 4}}\n"
         "train: {batch: x, steps: 3, epochs: 2}\nmasked: {mask: 0.9, random: 0.9}\nobjectiv: masked\n",
         ["train.stps=3", "data.sources.7.path=x", "seed"],
         ["weight", "souces", "form", "train.batch", "train.stps", "masked", "is over 1", "objectiv",
          "count from 0", "override seed"]),
        (MINIMAL + "train: {steps: 3, epochs: 3, schedul: x, batch: -1}\n", [],
         ["epochs and steps cannot be combined", "train.schedul: there is no such key", "train.batch: -1"]),
    ],
    ids=["sections", "lengths"],
)  # fmt: skip
def test_all_that_is_wrong_is_said_in_one_round_and_nothing_that_follows_from_it(text, overrides, said):
    error = str(refused(text, *overrides))
    assert all(each in error for each in said), error
    for follows in ("lora adapts", "the run has no text", "needs a path"):
        assert follows not in error


@pytest.mark.parametrize(
    ("written", "overrides", "reads"),
    [
        ({"model": {"config": {"model_type": "gpt2"}}}, ["model.from=x"], {"from_": "x", "config": None}),
        ({"model": {"from": "x"}}, ["model.config.model_type=gpt2"], {"from_": None, "config": {"model_type": "gpt2"}}),
        ({"model": {"from": "x"}}, ["model.config={model_type: bert}"], {"from_": None}),
        ({"model": {"config": {"model_type": "gpt2"}}}, ["model.from=null"], {"config": {"model_type": "gpt2"}}),
    ],
)
def test_an_override_takes_the_place_of_what_cannot_stand_beside_it(written, overrides, reads):
    run = parse_run(
        written | {"data": {"sources": [{"format": "dummy"}]}}, Overrides.parse(overrides), {(): "run.yaml"}
    )
    for name, value in reads.items():
        assert getattr(run.model, name) == value


def test_a_length_on_the_command_line_takes_the_place_of_the_recipes():
    assert load_run("tolstoy-finetune", Overrides.parse(["train.steps=3"])).train.epochs is None
    with pytest.raises(InputError, match="keep one"):  # both are the user's own
        load_run("tolstoy-finetune", Overrides.parse(["train.steps=3", "train.epochs=2"]))
    with pytest.raises(InputError, match="keep one"):
        load_run("tolstoy-scratch", Overrides.parse(["model.config.n_layer=3", "model.from=x", "tokenizer.train=null"]))


def test_a_tokenizer_trained_anew_for_a_pretrained_model_is_asked_for_by_name():
    with pytest.raises(InputError, match=r"tokenizer\.train.*newly trained.*\n.*tokenizer\.replace: true"):
        load_run("tolstoy-scratch", Overrides.parse(["model.from=x"]))
    assert load_run("tolstoy-scratch", Overrides.parse(["model.from=x", "tokenizer.train=null"])).model.from_ == "x"
    replaced = load_run("tolstoy-scratch", Overrides.parse(["model.from=x", "tokenizer.replace=true"]))
    assert replaced.tokenizer.train is not None
    with pytest.raises(InputError, match="requires both"):
        load_run("tolstoy-scratch", Overrides.parse(["tokenizer.replace=true"]))


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()])
def test_what_is_no_regular_file_is_no_configuration(tmp_path, make):
    make(tmp_path / "old.yaml")
    with pytest.raises(InputError, match="is not a regular file"):
        read_file(tmp_path / "old.yaml")


def test_overrides_are_a_mapping_and_words():
    overrides = Overrides.parse(["train.steps=3", "model.config.eps=1e-5", "train.steps=4"])
    assert overrides["train.steps"] == 4
    assert overrides.words == ["model.config.eps=1e-5", "train.steps=4"]
    assert Overrides({"train.betas": [0.9, 1e-05], "run": "a b"}).words == ["train.betas=[0.9, 1.0e-05]", "run=a b"]
    assert overrides.with_arguments(["seed=1"]).words == [*overrides.words, "seed=1"]
    assert load_run("novel-small", {"train.steps": 4, "data.sources.0.path": "x"}).train.steps == 4


@pytest.mark.parametrize(
    ("text", "where", "fix"),
    [
        ("model: gpt2", "model", "write model: {from: gpt2}"),
        ("tokenizer: gpt2", "tokenizer", "write tokenizer: {from: gpt2}"),
        ("data: novel.txt", "data", "write data: {sources: [{path: novel.txt}]}"),
        ("data: {sources: novel.txt}", "data.sources", "write sources: [{path: novel.txt}]"),
        ("data: {sources: [novel.txt]}", "data.sources.0", "write {path: novel.txt}"),
        ("model: {from: gpt2, lora: true}", "model.lora", "write lora: {rank: 16, alpha: 32}"),
        ("tokenizer: {train: true}", "tokenizer.train", "write train: {vocab: auto}"),
        ("train: 30min", "train", "write train: {budget: 30min}"),
        ("train: 3", "train", "write train: {…} with keys inside"),
        ("data:\n\tsources: [a]", "", "indent with spaces"),
    ],
)
def test_what_to_write_is_shown_for_a_value_in_place_of_a_section(text, where, fix):
    problem = next(problem for problem in refused(text).problems if problem.where.endswith(where))
    assert problem.fix == fix
    if fix.startswith(("write model:", "write tokenizer:", "write data:")):
        Path("run.yaml").write_text(("" if fix.startswith("write data") else MINIMAL) + fix[6:])
        assert load_run("run.yaml")


def test_a_recipe_is_suggested_before_a_run_of_its_name(tmp_path):
    (tmp_path / "runs/novel-small").mkdir(parents=True)
    (tmp_path / "runs/novel-small/config.yaml").write_text("")
    with pytest.raises(InputError, match=r"did you mean novel-small\?"):
        load_run("novel-smal")
