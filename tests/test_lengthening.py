"""The length of a run changed after it began: it goes on where that is the run of the new length, else is refused."""

import json
import math
import shlex
import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from artel.config import Overrides, load_run
from artel.inference import export
from artel.training.callbacks import compare_with_best
from artel.training.checkpoint.format import Progress
from artel.training.lengthening import _length_error, _reason_to_refuse
from artel.training.schedule import Length
from support.runs import artel, losses, refused, succeed, write_run

SHORT = {"batch": 8, "compile": "off"}


def weights(folder):
    return {name: tensor.tolist() for name, tensor in load_file(folder / "model" / "model.safetensors").items()}


def contents(folder):
    """Of each file but the locks, which name the process that held them last."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and ".lock" not in path.name}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "steps", "longer", "kept"),
    [("constant", 6, 12, 6), ("wsd", 10, 20, 4), ("constant", 12, 6, 4)],
    ids=["a complete run", "before its decay", "made shorter"],
)
def test_a_run_of_another_length_is_the_run_that_began_so_long(tmp_path, schedule, steps, longer, kept):
    """Bit for bit, its warmup a fraction of the length that it began with."""
    train = {**SHORT, "schedule": schedule, "decay": 0.5}
    changed = write_run(
        tmp_path / "changed.yaml", train={**train, "steps": steps, "warmup": 0.34}, checkpoint={"every": 4}
    )
    warmup = round(0.34 * steps)
    whole = write_run(tmp_path / "whole.yaml", train={**train, "steps": longer, "warmup": warmup})
    folder, other = changed.with_suffix(""), whole.with_suffix("")
    succeed("train", changed)
    if kept < steps:  # as if it had been stopped there
        for path in folder.glob("checkpoints/step-*"):
            if int(path.name.removeprefix("step-")) > kept:
                shutil.rmtree(path)
        (folder / "result.json").unlink()
        shutil.rmtree(folder / "model")
    assert f"resuming from step {kept}" in succeed("train", changed, f"train.steps={longer}").stderr
    succeed("train", whole)
    assert losses(folder) == losses(other)
    assert weights(folder) == weights(other)
    assert json.loads((folder / "result.json").read_text())["steps"] == longer
    again = artel("train", changed, f"train.steps={longer}")
    assert (again.returncode, "is complete" in again.stderr) == (0, True)
    if kept == steps:  # as if it were at work still: what is exported is its checkpoint
        expected = weights(folder)
        (folder / "result.json").unlink()
        (folder / "model" / "model.safetensors").write_bytes(b"of a shorter run")
        export(str(folder), tmp_path / "out" / "model")
        assert weights(tmp_path / "out") == expected


def test_the_command_that_trains_on_leaves_out_a_tokenizer_that_took_the_place_of_another(tmp_path):
    begun = ["model.from=x", "tokenizer.replace=true"]
    run = load_run("tolstoy-scratch", Overrides.parse(begun))
    length = Length(samples=100, batch=4, total_samples=36)
    fix = _length_error(tmp_path / "a" / "config.yaml", run, run, 2, length, "why", tmp_path).problems[0].fix
    _, _, _, *values = shlex.split(fix.partition("a new schedule: ")[2])
    again = load_run("tolstoy-scratch", Overrides.parse([*begun, *values]))
    assert (again.tokenizer.train, again.tokenizer.replace, again.train.steps) == (None, False, 7)


def test_a_validation_at_the_end_alone_does_not_count_toward_patience(tmp_path):
    """A run that began so long would not have had it."""
    config = load_run("novel-small", Overrides.parse(["checkpoint.best=loss", "validate.patience=3"]))
    progress = Progress(step=5, best=1.0, best_figure="loss", validations_since_best=1)
    run = SimpleNamespace(config=config, progress=progress, step=5, finished=True)
    counts = []
    for is_due in (True, False):
        compare_with_best(run, 2.0, {"loss": 2.0}, higher_is_better=False, counts=is_due)
        counts.append(progress.validations_since_best)
    assert counts == [2, 2]


@pytest.mark.slow
def test_a_schedule_that_has_run_out_is_refused_with_a_command_that_trains_on(tmp_path):
    run = write_run(tmp_path / "a run.yaml", train={**SHORT, "steps": None, "epochs": 0.2})
    succeed("train", run)
    folder = run.with_suffix("")
    before = contents(folder)
    done = refused("train", run, "train.epochs=0.6")
    assert "train.schedule: cosine" in done.stderr
    assert contents(folder) == before
    command = done.stderr.partition("with a new schedule: artel ")[2]
    succeed(*shlex.split(command))
    longer = tmp_path / "a run-longer"
    first, second = (losses(each) for each in (folder, longer))
    assert second[1][0] < first[1][0]  # it begins with what was learned
    assert json.loads((longer / "result.json").read_text())["steps"] > len(first)
    for each in folder.glob("checkpoints/*"):
        each.unlink() if each.is_symlink() else shutil.rmtree(each)
    gone = artel("train", run, "train.epochs=0.6")
    assert (gone.returncode, "its checkpoints are gone" in gone.stderr) == (2, True)


@pytest.mark.parametrize(
    ("changes", "lengths", "progress", "says"),
    [
        ({"schedule": "constant", "warmup": 0.1}, (40, 80), {"step": 10, "warmup": 1}, None),
        ({"schedule": "constant", "warmup": 0.1}, (40, 80), {"step": 10, "warmup": None}, "learning rate"),
        ({"schedule": "constant", "warmup": 0.1}, (40, 80), {"step": 0}, None),
        ({"schedule": "constant"}, (42, 80), {"step": 10}, None),
        ({"schedule": "constant"}, (42, 80), {"step": 11}, "had fewer samples"),
        ({"schedule": "constant"}, (80, 40), {"step": 11}, "already taken 11 steps"),
        ({"schedule": "constant"}, (80, 42), {"step": 11}, "finished step 11 would have fewer samples"),
        ({"schedule": "constant"}, (40, 80), {"step": 8, "stopped_early": True}, "validate.patience"),
        ({"schedule": "wsd", "decay": 0.5}, (80, 160), {"step": 10}, None),
        ({"schedule": "wsd", "decay": 0.5}, (80, 160), {"step": 11}, None),  # the rate of step 11 is still 1
        ({"schedule": "wsd", "decay": 0.5}, (80, 160), {"step": 12}, "train.schedule: wsd"),
        ({"schedule": "linear"}, (40, 80), {"step": 4}, "train.schedule: linear"),
    ],
)
def test_which_lengths_a_run_may_have(changes, lengths, progress, says):
    run = load_run(
        "novel-small",
        Overrides.parse([f"train.{key}={value}" for key, value in {"batch": 4, "warmup": 2, **changes}.items()]),
    )
    old, new = (Length(samples=1000, batch=4, total_samples=total) for total in lengths)
    reason = _reason_to_refuse(run, run, old, new, Progress(**{"warmup": 2, **progress}))
    assert (reason is None) if says is None else (says in reason)


@pytest.mark.parametrize(
    ("noted", "figures", "best"), [("accuracy", {"accuracy": 0.5}, 0.5), ("loss", {"accuracy": 1.0}, 0.4)]
)
def test_the_best_of_another_figure_is_no_best(noted, figures, best):
    config = load_run("novel-small", Overrides.parse(["checkpoint.best=accuracy"]))
    (earlier,) = figures.values()
    progress = Progress(step=5, best=earlier, best_figure=noted, best_validation=figures)
    run = SimpleNamespace(config=config, progress=progress, step=5, finished=True)
    compare_with_best(run, 0.4, {"accuracy": 0.4}, higher_is_better=True, counts=True)
    assert (progress.best, progress.best_figure) == (best, "accuracy" if best == 0.4 else noted)


def test_a_figure_that_is_not_a_number_is_never_the_best():
    config = load_run("novel-small", Overrides.parse(["checkpoint.best=loss"]))
    run = SimpleNamespace(config=config, progress=Progress(step=5), step=5, finished=False)
    for value in (math.nan, 3.0, math.nan, 2.0):
        compare_with_best(run, value, {"loss": value}, higher_is_better=False, counts=True)
    assert (run.progress.best, run.progress.validations_since_best) == (2.0, 0)
