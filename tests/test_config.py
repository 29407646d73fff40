"""The run file: quantities, overrides, and errors that name the key, the line and the remedy."""

from itertools import pairwise

import pytest

from artel.config import RunConfig, TrainConfig, dump_run, load_run, recipe_names, result_differences
from artel.config.quantities import Interval, Warmup, read_bytes, read_count, read_number
from artel.errors import InputError
from artel.training.schedule import Length, rate

MINIMAL = "data: {sources: [{path: a.txt}]}\n"


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
     (Interval.read, "0"), (Interval.read, "12 parsec"), (Interval.read, [1]), (Warmup.read, -1)],
)  # fmt: skip
def test_what_is_no_quantity_is_refused(read, written):
    with pytest.raises(ValueError, match=r"write|below zero|not above"):
        read(written)


def test_all_problems_at_once_each_with_line_and_remedy(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "sed: 3\ndata:\n  sources:\n    - path: x\n      formt: text\n  blok: 12\n"
        "train: {learning_rate: abc, optimizer: adam}\n"
    )
    with pytest.raises(InputError) as error:
        load_run(str(file), ["train.warmup=oops", "checkpoint.evry=3"])
    text = str(error.value)
    for part in ("run.yaml:1: sed", "did you mean seed?", "run.yaml:5: data.sources.0.formt", "did you mean format?",
                 "run.yaml:6: data.blok", "did you mean block?", "run.yaml:7: train.learning_rate", "5e-5",
                 "did you mean adamw?", "override train.warmup=oops", "override checkpoint.evry=3",
                 "did you mean every?"):  # fmt: skip
        assert part in text
    assert len(error.value.problems) == 7


def test_a_misplaced_key_is_shown_its_place(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(MINIMAL + "learning_rate: 1\n")
    with pytest.raises(InputError, match=r"did you mean train\.learning_rate\?"):
        load_run(str(file))


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1", "not valid YAML"), ("- 1", "is not a mapping"), ("seed: 1\nseed: 2\n" + MINIMAL, "given twice"),
     ("data: 3", "is not a section"), ("", "names no text"), (MINIMAL + "train: {steps: 1, epochs: 2}", "keep one"),
     (MINIMAL + "seed: true", "not a number"), (MINIMAL + "model: {config: {n_layer: 2}}", "no model_type")],
)  # fmt: skip
def test_broken_files(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        load_run(str(file))


def test_what_is_dumped_is_read_back_equal(tmp_path):
    run = load_run("demo", ["train.warmup=0.1", "checkpoint.every=90min", "train.batch=1k", "data.validation=0"])
    file = tmp_path / "config.yaml"
    file.write_text(dump_run(run))
    assert load_run(str(file)) == run
    assert load_run(str(tmp_path)) == run


def test_only_keys_that_shape_the_result_count_as_differences():
    before = load_run("demo")
    same = load_run("demo", ["checkpoint.keep=9", "track=[jsonl]", "train.micro_batch=2", "validate.every=7"])
    other = load_run("demo", ["train.learning_rate=1", "data.block=99"])
    assert result_differences(before, same) == []
    assert [line.split(":")[0] for line in result_differences(before, other)] == ["data.block", "train.learning_rate"]


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_load(name):
    assert isinstance(load_run(name), RunConfig)


def test_schedules():
    def rates(**keys):
        train = TrainConfig.model_validate({"warmup": 10, **keys})
        return [rate(train, step, 100) for step in range(100)]

    for schedule in ("linear", "cosine", "constant", "wsd"):
        found = rates(schedule=schedule, minimum_learning_rate=0.1)
        assert found[0] == pytest.approx(0.1)
        assert found[9] == found[10] == 1
        assert all(after <= before for before, after in pairwise(found[10:]))
    assert rates(schedule="constant")[-1] == 1
    assert rates(schedule="linear")[55] == pytest.approx(0.5)
    assert rates(schedule="cosine")[55] == pytest.approx(0.5)
    assert rates(schedule="wsd")[79] == 1
    assert rates(schedule="wsd")[90] == pytest.approx(0.5)
    assert rates(schedule="linear")[-1] == pytest.approx(1 / 90)


def test_length_and_intervals():
    length = Length.of(TrainConfig.model_validate({"epochs": 3, "batch": 4}), samples=10, tokens=8)
    assert (length.total, length.steps) == (30, 8)
    assert [step for step in range(1, 9) if length.is_due(Interval(epochs=1), step)] == [3, 5, 8]
    assert [step for step in range(1, 9) if length.is_due(Interval(steps=3), step)] == [3, 6]
    assert Length.of(TrainConfig.model_validate({"tokens": 100, "batch": 4}), 10, 8).steps == 4
    assert Length.of(TrainConfig.model_validate({"steps": 5, "batch": 4}), 10, 8).total == 20
