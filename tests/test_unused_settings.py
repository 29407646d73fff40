"""Settings that cannot act in a run of known length: refused where the run would hardly learn, else noted."""

from pathlib import Path

import pytest

from artel.config import Overrides, load_run
from artel.errors import InputError
from artel.planning import check_run, find_length_notes
from artel.training.schedule import Length, rate
from artel.training.unused_settings import find_unused_settings
from support.runs import artel, refused, write_run

TRAIN = {"steps": 30, "warmup": 3, "schedule": "cosine"}


def run_of(folder, train=None, overrides=(), **sections):
    file = write_run(folder / "run.yaml", train={**TRAIN, **(train or {})}, **sections)
    return load_run(str(file), Overrides.parse(list(overrides)))


@pytest.mark.parametrize("warmup", [61, 2000])
def test_a_warmup_far_beyond_the_end_is_refused_with_its_line(tmp_path, warmup):
    run = run_of(tmp_path, {"warmup": warmup})
    with pytest.raises(InputError) as raised:
        check_run(run)
    (problem,) = [problem for problem in raised.value.problems if "train.warmup" in problem.where]
    assert problem.where.startswith(str(tmp_path / "run.yaml:"))
    assert f"{warmup:,} steps of warmup in a run of 30" in problem.what
    assert problem.fix.startswith("write 3,")
    assert max(rate(run.train, step, 30) for step in range(30)) < 0.5


def test_a_run_cut_short_on_the_command_line_is_only_told(tmp_path):
    (note, *_) = find_unused_settings(run_of(tmp_path, {"warmup": 60}, ["train.steps=5"]))
    assert "60 steps of warmup in a run of 5" in note


@pytest.mark.parametrize(
    ("train", "sections", "told"),
    [
        ({"warmup": 40}, {}, "train.warmup: 40 steps of warmup in a run of 30: at most 0.75 of"),
        ({"warmup": 30}, {}, "train.schedule: cosine never lowers the learning rate: the warmup takes the entire run"),
        ({"schedule": "wsd", "decay": 0.01}, {}, "wsd never lowers the learning rate: the run is too short for"),
        ({"decay": 0.5}, {}, "train.decay has no effect with train.schedule: cosine"),
        ({"optimizer": "lion", "momentum": 0.9}, {}, "train.momentum has no effect: train.optimizer is lion"),
        ({"optimizer": "sgd", "betas": [0.8, 0.9]}, {}, "train.betas has no effect: train.optimizer is sgd"),
        ({"schedule": "constant", "minimum_learning_rate": 0.1}, {}, "train.minimum_learning_rate has no effect"),
        ({}, {"validate": {"every": 31}}, "validate.every: 31 is longer than the run of 30 steps"),
        ({}, {"checkpoint": {"every": 500}}, "checkpoint.every: 500 is longer than the run of 30 steps"),
        ({}, {"log": {"every": 31}}, "log.every: 31 is longer than the run of 30 steps"),
        ({}, {"validate": {"every": 10, "patience": 2}}, "validate.patience: 2 cannot end the run early: only 2 valid"),
        ({}, {"validate": {"prompts": ["a"]}, "data": {"validation": 0.0}}, "only before the first step"),
        ({}, {"validate": {"every": 5}, "data": {"validation": 0.0}}, "validate.every has no effect"),
        ({}, {"checkpoint": {"best": "loss"}, "data": {"validation": 0.0}}, "checkpoint.best has no effect"),
        ({}, {"validate": {"patience": 2}, "data": {"validation": 0.0}}, "validate.patience has no effect"),
    ],
)  # fmt: skip
def test_what_cannot_act_is_noted(tmp_path, train, sections, told):
    notes = find_unused_settings(run_of(tmp_path, train, **sections))
    assert [told in note for note in notes] == [True], notes


@pytest.mark.parametrize(
    ("train", "sections"),
    [
        ({"warmup": 28}, {}),
        ({"schedule": "wsd", "decay": 0.2}, {}),
        ({"schedule": "constant"}, {}),
        ({"minimum_learning_rate": 0.1}, {}),
        ({}, {"validate": {"every": 30}, "checkpoint": {"every": 30}, "log": {"every": 30}}),
        ({}, {"validate": {"every": 9, "patience": 2}}),
        ({}, {"checkpoint": {"best": None}, "data": {"validation": 0.0}}),
        ({}, {"checkpoint": {"every": "never"}, "validate": {"every": "never", "prompts": ["a"]}}),
        ({"steps": None, "budget": "30min", "warmup": 1000}, {}),
    ],
)
def test_what_can_act_is_not_noted(tmp_path, train, sections):
    run = run_of(tmp_path, train, **sections)
    assert find_unused_settings(run) == []


def test_epochs_are_counted_where_the_text_is_known(tmp_path):
    run = run_of(tmp_path, {"steps": None, "epochs": 2, "batch": 8, "warmup": 3}, validate={"every": "3 epochs"})
    assert find_unused_settings(run) == []
    (note, *_) = find_unused_settings(run, Length(80, 8, 160))
    assert "validate.every: 3 epoch is longer than the run of 20 steps" in note
    assert find_unused_settings(run, Length(80, 8, 320)) == []
    with pytest.raises(InputError, match="3 steps of warmup in a run of 1"):
        find_unused_settings(run, Length(80, 8, 8))


@pytest.mark.slow
def test_the_length_in_epochs_is_known_once_the_text_is_prepared(tmp_path):
    """`prepare` first: config check then counts, and so does the start of training."""
    train = {"steps": None, "epochs": 1, "warmup": 100_000}
    file = write_run(tmp_path / "run.yaml", train=train)
    assert find_length_notes(load_run(str(file))) == []
    assert "100,000 steps of warmup in a run of" in refused("train", file).stderr
    assert not list(Path(load_run(str(file)).run).glob("checkpoints/*"))
    checked = artel("config", "check", file)  # the text is prepared now
    assert checked.returncode == 2
    assert "100,000 steps of warmup in a run of" in checked.stderr
