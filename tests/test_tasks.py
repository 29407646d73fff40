"""`validate.tasks`: lm-evaluation-harness during training, into the same curves."""

from __future__ import annotations

import json
import shutil

import pytest

from artel.config import load_run
from artel.errors import InputError
from artel.inference import open_model, run_tasks
from artel.reports.curves import CurveReader
from artel.training.task_harness import check_data, check_tasks, task_directions, task_metrics
from support.runs import artel, metrics, refused, succeed, torchrun, write_run
from support.tasks import counting, passages

pytest.importorskip("lm_eval")

DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def tasks_by_step(folder):
    return {line["step"]: line["tasks"] for line in metrics(folder) if "tasks" in line}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with tasks, the same without, and the names of the tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    tasks = [counting(folder), passages(folder)]
    validate = {"every": 3, "tasks": tasks, "tasks_every": 4}
    shared = {"model": {"config": {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, **DROPOUT}}}
    runs = [write_run(folder / "with.yaml", validate=validate, **shared), write_run(folder / "without.yaml", **shared)]
    for run in runs:
        succeed("train", run)
    return folder / "with", folder / "without", tasks


@pytest.mark.slow
def test_figures_join_the_curves_and_are_those_of_the_saved_model(trained):
    folder, _, tasks = trained
    figures = tasks_by_step(folder)
    assert list(figures) == [4, 6]  # and the validations of their own: 3 and 6
    assert [line["step"] for line in metrics(folder) if "validation" in line] == [3, 6]
    names = {"counting/acc", "counting/acc_norm", "passages/byte_perplexity"}
    assert {*figures[4]} == {*figures[6]} == names
    assert figures[4]["passages/byte_perplexity"] != figures[6]["passages/byte_perplexity"]
    results = run_tasks(open_model(str(folder)), tasks, None, None)
    assert task_metrics(results) == figures[6]
    assert task_directions(results) == {name: name != "passages/byte_perplexity" for name in names}
    result = json.loads((folder / "result.json").read_text())
    assert {name: result["validation"][name] for name in names} == figures[6]
    curves = CurveReader(folder / "metrics.jsonl").read()
    assert curves.validation["passages/byte_perplexity"].step.tolist() == [4, 6]
    assert curves.newest_validation == curves.validation_line["validation"] | figures[6]


def test_training_does_not_notice(trained):
    """Dropout, order and weights are those of a run without tasks."""
    one, other = (folder / "model/model.safetensors" for folder in trained[:2])
    assert one.read_bytes() == other.read_bytes()


def test_a_report_shows_them(trained):
    shown = artel("report", trained[0], "--json")
    assert json.loads(shown.stdout)["tasks"] == tasks_by_step(trained[0])[6]
    assert "counting/acc" in shown.stderr


def test_a_task_that_fails_is_said_and_the_run_goes_on(tmp_path):
    broken = counting(tmp_path, doc_to_text="{{ 1 / (0 if 'or' in question else 1) }}")
    run = write_run(tmp_path / "run.yaml", validate={"tasks": [broken], "tasks_every": "never"})
    done = succeed("train", run)
    assert "step 6: validate.tasks could not be evaluated: " in done.stderr
    assert "division by zero" in done.stderr
    assert tasks_by_step(tmp_path / "run") == {}


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ({"validate": {"tasks": ["nothing.yaml"]}}, "validate.tasks", "there is no file nothing.yaml"),
        ({"objective": "masked", "model": {"config": {"model_type": "bert"}}}, "validate.tasks", "generates text"),
        ({"checkpoint": {"best": "counting/acc_nrm"}}, "checkpoint.best", "'counting/acc_nrm' is not a metric of"),
        ({"checkpoint": {"best": "count/acc"}}, "checkpoint.best", "'count/acc' is not a metric of"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_the_texts(tmp_path, changes, where, what):
    run = write_run(tmp_path / "run.yaml", **{"validate": {"tasks": [counting(tmp_path)]}} | changes)
    with pytest.raises(InputError) as error:
        check_tasks(load_run(str(run)))
    assert [problem.where for problem in error.value.problems] == [where]
    assert what in error.value.problems[0].what


def test_the_refusal_names_figures_that_are_near(tmp_path):
    changes = {"validate": {"tasks": [counting(tmp_path)]}, "checkpoint": {"best": "count/acc"}}
    checked = refused("config", "check", write_run(tmp_path / "run.yaml", **changes))
    assert "write one of: counting/acc, counting/acc_norm" in checked.stderr
    alone = refused("config", "check", write_run(tmp_path / "alone.yaml", checkpoint={"best": "counting/acc"}))
    assert "TASK/METRIC of a task in validate.tasks" in alone.stderr


@pytest.mark.slow
def test_the_best_checkpoint_goes_by_a_task(tmp_path):
    """By perplexity the lowest; resumed, by accuracy, the first of the highest from there on."""
    validate = {"every": "never", "tasks": [counting(tmp_path), passages(tmp_path)], "tasks_every": 2}
    name, checkpoints = "passages/byte_perplexity", tmp_path / "run/checkpoints"
    run = write_run(tmp_path / "run.yaml", validate=validate, checkpoint={"best": name, "every": 2})
    succeed("train", run)
    values = {step: figures[name] for step, figures in tasks_by_step(tmp_path / "run").items()}
    step, state = best_of(checkpoints)
    assert step == min(values, key=lambda step: values[step])
    assert (state["best"], state["best_validation"][name]) == (values[step], values[step])

    for later in (4, 6):
        shutil.rmtree(checkpoints / f"step-{later:09d}")
    (tmp_path / "run/result.json").unlink()
    resumed = artel("train", run, "checkpoint.best=counting/acc")
    assert "resuming from step 2" in resumed.stderr.lower()
    accuracy = {step: figures["counting/acc"] for step, figures in tasks_by_step(tmp_path / "run").items() if step > 2}
    step, state = best_of(checkpoints)
    assert (step, state["best_figure"]) == (max(accuracy, key=lambda step: accuracy[step]), "counting/acc")


@pytest.mark.slow
def test_a_run_stops_where_a_task_no_longer_improves(tmp_path):
    tasks = {"tasks": [counting(tmp_path)], "tasks_every": 1}
    unlearned = {"learning_rate": 1e-9}
    best = {"best": "counting/acc"}
    run = write_run(tmp_path / "run.yaml", validate={"patience": 1, **tasks}, checkpoint=best, train=unlearned)
    done = artel("train", run)
    assert "step 2: counting/acc has not improved since step 1; stopping" in done.stderr
    assert json.loads((tmp_path / "run/result.json").read_text())["model_step"] == 1


def best_of(checkpoints):
    """The step of the best checkpoint, and its state."""
    best = (checkpoints / "best").resolve()
    return int(best.name.removeprefix("step-")), json.loads((best / "state.json").read_text())


def test_no_stage_of_a_pipeline_is_asked(tmp_path):
    run = write_run(tmp_path / "run.yaml", validate={"tasks": [counting(tmp_path)]}, parallel={"pipeline": 2})
    done = refused("config", "check", run)
    assert "validate.tasks: a pipeline stage holds only a part" in done.stderr


@pytest.mark.parametrize("wrong", ["data", "yaml"])
def test_tasks_that_cannot_be_read_are_refused_before_the_first_step(tmp_path, wrong):
    name = counting(tmp_path)
    (tmp_path / ("counting.jsonl" if wrong == "data" else "counting.yaml")).write_text("{")
    with pytest.raises(InputError, match=r"validate\.tasks.*cannot be read"):
        check_data([name])


@pytest.mark.processes
@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_several_processes_give_the_figures_of_their_model(trained, tmp_path, data):
    folder, _, tasks = trained
    run = folder.with_suffix(".yaml")
    name = "passages/byte_perplexity"
    overrides = [f"run={tmp_path / data}", f"parallel.data={data}", f"checkpoint.best={name}"]
    done = torchrun(2, "-m", "artel", "train", run, *overrides)
    assert done.returncode == 0, done.stderr
    figures = tasks_by_step(tmp_path / data)
    assert list(figures) == [4, 6]
    step, state = best_of(tmp_path / data / "checkpoints")
    assert (step, state["best"]) == min((values[name], step) for step, values in figures.items())[::-1]
    alone = task_metrics(run_tasks(open_model(str(tmp_path / data)), tasks, None, None))
    assert figures[6] == pytest.approx(alone, rel=1e-5)
