"""`import artel`: the verbs as functions, in one process that nothing of it changes."""

import ast
import faulthandler
import inspect
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from decimal import Decimal
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import artel
from artel.api.run import table
from artel.api.run_values import as_overrides, as_run_file
from artel.text.sources.find import resolve_local_path
from artel.training.callbacks import StopOnSignal
from support.messages import logged
from support.objectives import objective_run
from support.runs import ENVIRONMENT, TEXT_ALONE, TINY, losses, merged, wait_for_step, write_run


def tiny(**changes) -> dict:
    """A run as a dict: of the paths in it the store's is a Path."""
    return merged(TINY, {"run": "runs/tiny", "data": {"store": Path("stores")}, **changes})


def text_alone(**changes) -> dict:
    """The text of such a run: `artel.prepare` checks no model beside it."""
    return merged(TEXT_ALONE, {"run": "runs/tiny", "data": {"store": "stores"}, **changes})


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> artel.Run:
    folder = tmp_path_factory.mktemp("trained")
    run = tiny(run=str(folder / "run"), data={"store": folder / "stores"}, validate={"prompts": ["The"]})
    return artel.train(run)


# Importing --------------------------------------------------------------------------


def test_importing_is_quick_and_brings_nothing():
    """The names are there, also for `from artel import …`, and heavy libraries are not imported for them."""
    heavy = "('torch', 'transformers', 'numpy', 'pandas', 'plotly', 'pydantic', 'rich', 'IPython')"
    code = f"import sys, artel; print([name for name in {heavy} if name in sys.modules])"
    code += "\nfrom artel import InputError, RunConfig, open, plan, prepare, train, Run, config"
    code += "\nprint([name for name in ('torch', 'transformers', 'numpy', 'pandas') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout.split("\n") == ["[]", "[]", ""]


def test_the_types_name_what_the_package_has():
    tree = ast.parse(Path(artel.__file__).with_suffix(".pyi").read_text())
    typed = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*typed, "__version__"} == set(artel.__all__) == set(dir(artel))
    for name in artel.__all__:
        assert getattr(artel, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        artel.trian  # noqa: B018


def test_every_public_thing_is_documented():
    for name in ("prepare", "plan", "train", "open"):
        function = getattr(artel, name)
        assert "Raise InputError" in function.__doc__
        parameters = re.findall(r"^    (\w[\w, ]*):", inspect.cleandoc(function.__doc__), re.MULTILINE)
        named = {word for line in parameters for word in line.split(", ")}
        assert set(function.__wrapped__.__code__.co_varnames[: function.__wrapped__.__code__.co_argcount]) <= named
    for kind in (artel.Model, artel.Run, artel.RunPlan, artel.Answer, artel.Entity, artel.Filled):
        assert kind.__doc__
        assert all(
            member.__doc__ for name, member in vars(kind).items() if not name.startswith("_") and callable(member)
        )


# Running ----------------------------------------------------------------------------


@pytest.mark.slow
def test_one_run_as_a_path_a_recipe_keys_and_an_object():
    file = write_run(Path("tiny.yaml").absolute(), TEXT_ALONE, run="runs/tiny")
    keys = text_alone(data={"store": Path(file.parent, "stores")})
    as_object = artel.RunConfig.model_validate(text_alone())
    stores = {artel.prepare(run).folder.name for run in (file, str(file), keys, as_object)}
    assert len(stores) == 1
    changes = {"run": "runs/dummy", "data.store": "stores", "data.sources.0.documents": 30}
    recipe = artel.prepare("nq-dummy", changes)
    assert recipe.ledger()["documents"]["read"] == 30
    assert artel.prepare(keys).is_new is False


def test_training_returns_the_run_and_calls_callbacks():
    steps, lines = [], logged()
    run = artel.train(tiny(), {"train.steps": 3}, callbacks=[lambda state: steps.append(state.step)])
    assert steps == [1, 2, 3]
    assert run.folder == Path("runs/tiny")
    assert any("3 steps are done" in line for line in lines)
    again = artel.train(tiny(), {"train.steps": 3}, callbacks=[steps.append])  # it is complete
    assert (steps, again.result) == ([1, 2, 3], run.result)
    assert artel.train(tiny(), {"train.steps": 2}, restart=True).result["steps"] == 2


def test_a_run_has_metrics_ledger_samples_and_its_config(trained):
    metrics = trained.metrics
    if find_spec("pandas") is not None:
        assert list(metrics["step"]) == [1, 2, 3, 4, 5, 6]
        assert metrics["loss"].iloc[-1] == trained.result["train_loss"]
        assert metrics["validation_loss"].iloc[-1] == trained.result["validation"]["loss"]
        assert metrics["tokens"].is_monotonic_increasing
    assert trained.ledger["documents"]["read"] == 300
    assert trained.ledger == artel.prepare(trained.folder).ledger()
    samples = trained.samples
    assert [(line["step"], line["prompt"], isinstance(line["text"], str)) for line in samples] == [
        (0, "The", True),
        (6, "The", True),
    ]
    assert trained.config.train.steps == 6
    (trained.folder / "samples.jsonl").open("a").write('{"step": 7, "pro')  # is being written
    assert trained.samples == samples
    assert "6 (complete)" in trained._repr_html_()


def test_metrics_are_a_dataframe_of_the_library_that_is_installed():
    columns = {"step": np.array([1, 2]), "loss": np.array([2.0, np.nan]), "validation_loss": np.array([np.nan, 3.0])}
    assert table(columns, None) == [{"step": 1, "loss": 2.0}, {"step": 2, "validation_loss": 3.0}]
    for library in ("pandas", "polars"):
        if find_spec(library) is not None:
            frame = table(columns, library)
            assert (list(frame.columns), frame["step"].sum()) == (["step", "loss", "validation_loss"], 3)


def test_a_run_is_plotted(trained):
    figure = trained.plot()
    curves = {(trace.name, trace.yaxis): trace for trace in figure.data}
    titles = [title.text for title in figure.layout.annotations]
    assert titles[0] == "Loss"
    assert "Gradient norm" in titles
    loss = curves["training", "y"]
    assert list(loss.x) == [1, 2, 3, 4, 5, 6]
    assert loss.y[-1] == trained.result["train_loss"]
    assert list(curves["validation", "y"].y) == [trained.result["validation"]["loss"]]
    assert "text/html" in figure._repr_mimebundle_() or figure.to_html()


def test_a_run_that_has_not_begun():
    artel.prepare(text_alone())
    run = artel.Run("runs/tiny")
    assert run.ledger["documents"]["read"] == 300
    assert run.samples == []
    assert len(run.metrics) == 0
    assert "0 (not complete)" in run._repr_html_()
    assert run.config.run == "runs/tiny"
    with pytest.raises(artel.InputError):
        _ = run.result
    with pytest.raises(artel.InputError, match="nothing is logged yet"):
        run.plot()
    with pytest.raises(artel.InputError, match="there is no such folder"):
        artel.Run("runs/other")
    with pytest.raises(artel.InputError, match="is not the folder of a run"):
        artel.Run("stores")


def test_a_plan_says_what_the_command_says():
    plan = artel.plan(tiny())
    assert plan.fits
    assert plan.to_json()["parameters"]["total"] == plan.plan.parameters["total"]
    assert str(plan).startswith(plan.verdict)
    assert plan.verdict in plan._repr_html_()
    elsewhere = artel.plan(tiny(), hardware="h100-80gb:8")
    assert elsewhere.plan.processes == 8
    assert not Path("runs/tiny").exists()


# Using a model ----------------------------------------------------------------------


def test_a_model_writes_as_the_command_does_and_streams_the_same(trained):
    model = artel.open(trained.folder)
    text = model.generate("The", max_new_tokens=12, seed=3)
    assert "".join(model.stream("The", max_new_tokens=12, seed=3)) == text
    assert model.generate("The", max_new_tokens=12, seed=4) != text
    assert (model.objective, model.tokenizer.eos_token) == ("causal", "<|endoftext|>")
    assert isinstance(model.model, transformers.GPT2LMHeadModel)
    assert "causal" in repr(model)
    for wrong in ({"temperature": -1}, {"max_new_tokens": 0}, {"top_p": 2}):
        with pytest.raises(artel.InputError, match="is out of range"):
            model.generate("The", **wrong)


def test_a_model_is_evaluated_on_its_run_and_on_a_file(trained):
    model = artel.open(trained.folder)
    own = model.evaluate()
    assert own.metrics["loss"] == pytest.approx(trained.result["validation"]["loss"], abs=1e-4)
    assert f"{own.documents} documents" in own._repr_html_()
    Path("other.txt").write_text("The ship waits in the harbour. " * 20)
    other = model.evaluate(Path("other.txt"), {"data.block": 16})
    assert (other.documents, other.metrics["loss"] > 0) == (1, True)
    text = model.generate("The", max_new_tokens=5)
    assert model.generate("The", max_new_tokens=5) == text


def test_a_conversation_has_its_earlier_messages(with_marks):
    model = artel.open(with_marks)
    first = model.chat("hello", temperature=0)
    assert model.chat([{"role": "user", "content": "hello"}], temperature=0) == first
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": first}]
    assert isinstance(model.chat([*turns, {"role": "user", "content": "and?"}], temperature=0), str)
    for wrong in ([], turns, [turns[1]], [*turns, {"role": "system", "content": "x"}]):
        with pytest.raises(artel.InputError, match="alternate user and assistant"):
            model.chat(wrong)


def test_a_conversation_gives_no_advice_of_transformers(trained, monkeypatch, caplog):
    model = artel.open(trained.folder)
    transformers.logging.warning_once.cache_clear()  # each is given once a process
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert model.chat("The", max_new_tokens=3) != ""
    assert caplog.messages == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["masked", "restoring", "span_qa", "tokens", "reward", "rerank", "chat", "dpo"])
def test_each_objective_says_what_it_cannot(name):
    run = artel.train(objective_run(Path("run.yaml").absolute(), name, train={"steps": 1, "batch": 8}))
    model = artel.open(run.folder)
    text = f"The ship {model.tokenizer.mask_token} here." if name == "masked" else "He said that"
    calls = {
        "generate": lambda: model.generate("Where", max_new_tokens=3),
        "stream": lambda: "".join(model.stream("Where", max_new_tokens=3)),
        "chat": lambda: model.chat("Where?", max_new_tokens=3),
        "answer": lambda: model.answer("where is Anna ?", "Anna is in the forest . " * 30),
        "fill": lambda: model.fill(text),
        "score": lambda: model.score("Where is Anna?", ["Anna is in the forest.", "No."]),
        "rerank": lambda: model.rerank("Where is Anna?", ["Anna is in the forest.", "No."]),
        "entities": lambda: model.entities(["Anna Berg lives in New York.", " "]),
    }
    encoders = {"masked": ["fill"], "restoring": ["fill"], "span_qa": ["answer"], "tokens": ["entities"],
                "reward": ["score"], "rerank": ["score", "rerank"]}  # fmt: skip
    able = encoders.get(name, ["generate", "stream", "chat"])
    for what, call in calls.items():
        if what not in able:
            with pytest.raises(artel.InputError, match=r"is a model for|it is a model for") as error:
                call()
            assert all(problem.fix for problem in error.value.problems)
            continue
        result = call()
        if what == "fill":
            assert str(result) == result.text
            assert [len(mask) for mask in result.masks] == ([5] if name == "masked" else [])
        elif what == "entities":
            assert [entity.text for entity in result[0]] == [
                "Anna Berg lives in New York."[entity.start : entity.end] for entity in result[0]
            ]
            assert result[1] == []
        elif what == "score":
            assert len(result) == 2
        elif what == "rerank":
            assert {one.document for one in result} == {"Anna is in the forest.", "No."}
        elif what == "answer":
            assert result.text == ("Anna is in the forest . " * 30)[result.start : result.end]
            assert sum(result.classes.values()) == pytest.approx(1)
    assert model.evaluate().metrics
    if name == "masked":
        with pytest.raises(artel.InputError, match=r"^prompt: holds no ") as error:
            model.fill("no mask")
        assert "--" not in str(error.value)


# Errors -----------------------------------------------------------------------------


def test_all_that_is_wrong_is_told_together_with_keys_as_they_are_written():
    with pytest.raises(artel.InputError) as error:
        artel.train({"trin": {"steps": 3}, "data": {"sources": [{"format": "dumy"}]}}, {"train.stps": 3})
    assert {problem.where for problem in error.value.problems} == {
        "override train.stps=3: train.stps", "trin", "data.sources.0.format"}  # fmt: skip
    Path("tiny.yaml").write_text("trin: 3\n")
    with pytest.raises(artel.InputError, match=r"tiny.yaml:1: trin: there is no such key"):
        artel.prepare("tiny.yaml")
    with pytest.raises(artel.InputError) as error:  # in a notebook the problem and no traceback
        artel.prepare("nosuch")
    assert error.value._render_traceback_() == ["InputError:", *error.value.problems[0].lines]


def test_flags_of_the_command_are_arguments_here(trained):
    with pytest.raises(artel.InputError, match="start over with restart"):
        artel.train(trained.folder, {"train.learning_rate": 1})
    with pytest.raises(artel.InputError) as error:
        artel.open("no-such-folder/model").evaluate()
    assert "--" not in str(error.value)


# The process is left as it was ------------------------------------------------------


def changes_since(before: dict) -> dict:
    """What of the process has changed, but for loggers of libraries that were imported meanwhile."""
    after = state()
    after["loggers"] = {name: after["loggers"].get(name) for name in before["loggers"]}
    return {name: (before[name], value) for name, value in after.items() if value != before[name]}


def state() -> dict:
    """What of the process a user may have set."""
    loggers = logging.root.manager.loggerDict.items()
    random_state = torch.get_rng_state().sum()
    return {
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)},
        "warnings": list(warnings.filters),
        "loggers": {
            name: (each.level, list(each.filters)) for name, each in loggers if isinstance(each, logging.Logger)
        },
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed(), random_state),
        "transformers": (transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()),
        "faulthandler": faulthandler.is_enabled(),
        "hooks": (sys.excepthook, threading.excepthook),
        "path": list(sys.path),
        "kernels": sys.modules.get("kernels", "not imported"),
    }


@pytest.mark.slow
def test_nothing_of_the_process_is_changed(trained):
    torch.manual_seed(5)
    model, changes = artel.open(trained.folder), {"train.steps": 2, "train.threads": 2}
    for call in (
        lambda: artel.prepare(text_alone()),
        lambda: artel.plan(tiny()),
        lambda: artel.train(tiny(), changes),
        lambda: artel.train(tiny(), changes, restart=True),
        lambda: artel.open(trained.folder),
        lambda: model.generate("The", max_new_tokens=3),
        lambda: model.chat("The", max_new_tokens=3),
        lambda: model.evaluate(),
    ):
        before = state()
        call()
        assert changes_since(before) == {}


def test_nothing_is_changed_where_a_call_fails():
    before = state()
    with pytest.raises(ZeroDivisionError):
        artel.train(tiny(), callbacks=[lambda run: 1 / 0])
    with pytest.raises(artel.InputError):
        artel.train(tiny(), {"train.learning_rate": -1})
    assert changes_since(before) == {}


@pytest.mark.processes
def test_without_torch_imported_before_too():
    """In a process of its own, where artel imports the libraries."""
    code = (
        "import logging, os, sys\n"
        "import artel\n"
        f"run = {tiny(data={'store': 'stores'})!r}\n"
        "before, path = dict(os.environ), list(sys.path)\n"
        "artel.train(run)\n"
        "import transformers\n"
        "assert dict(os.environ) == before and sys.path == path\n"
        "assert transformers.logging.get_verbosity() == logging.WARNING\n"
        "assert transformers.logging.is_progress_bar_enabled()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_call_resumes():
    def stop(run) -> None:
        if run.step == 3:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(artel.Interrupted, match="stopped and saved after step 4 of 6"):
        artel.train(tiny(), callbacks=[stop])
    assert signal.getsignal(signal.SIGINT) is before
    lines = logged()
    run = artel.train(tiny())
    assert "resuming from step 4 of 6" in lines
    whole = artel.train(tiny(), {"run": "runs/whole"})
    assert losses(run.folder) == losses(whole.folder)


def test_a_second_ctrl_c_raises_in_place_of_ending_the_process():
    """Where a caller has set a handler, as artel.train does, it is asked."""
    heard = []
    own = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    stop = StopOnSignal(clock=itertools.count(step=10).__next__)
    stop.finishes_step = True
    try:
        signal.raise_signal(signal.SIGINT)
        assert (stop.requested, heard) == (True, [])
        signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]
    finally:
        stop.close()
        signal.signal(signal.SIGINT, own)


def test_a_call_in_a_thread():
    """No signals are handled there, and none are needed."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(artel.train, tiny()).result()
    assert run.result["steps"] == 6


# Several processes ------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.processes
def test_several_processes_train_the_same():
    one = artel.train(tiny())
    before = state()
    two = artel.train(tiny(), {"run": "runs/two"}, nproc=2)
    assert changes_since(before) == {}
    assert two.result["train_loss"] == pytest.approx(one.result["train_loss"], abs=1e-4)
    assert artel.open("runs/two").generate("The", max_new_tokens=3)


@pytest.mark.processes
def test_ctrl_c_at_a_script_that_trains_saves():
    script = (
        "import artel\n"
        f"run = {tiny(data={'store': 'stores'}, train={'steps': 100000})!r}\n"
        "try: artel.train(run)\n"
        "except artel.Interrupted as stopped: print(stopped)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    wait_for_step(process, Path("runs/tiny"), 1)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate()
    assert re.match(r"stopped and saved after step [\d,]+", shown)
    assert process.returncode == 0
    step = int(re.search(r"step ([\d,]+)", shown)[1].replace(",", ""))
    assert json.loads(Path("runs/tiny/checkpoints/latest/state.json").read_bytes())["step"] == step


# Rows and overrides that Python holds -------------------------------------------------


QUESTIONS = [{"role": "user", "content": f"Who is {number}?"} for number in range(12)]
ANSWERS = [{"role": "assistant", "content": f"  {number}\n\n!"} for number in range(12)]
TALKS = [{"messages": list(turns)} for turns in zip(QUESTIONS, ANSWERS, strict=True)]


def rows_read(rows, **source) -> list[dict]:
    """The JSON lines that rows become, read back."""
    run = as_run_file({"data": {"sources": [{"rows": rows, **source}]}})
    (path,) = run.tree["data"]["sources"][0]["path"]
    return [json.loads(line) for line in resolve_local_path(path, "path").read_text().splitlines()]


def test_rows_of_every_kind_are_the_same_file():
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    columns = {"text": ["a b", "в г"], "label": ["x", "y"]}
    expected = [{"text": "a b", "label": "x"}, {"text": "в г", "label": "y"}]
    frame, dataset = pandas.DataFrame(columns), datasets.Dataset.from_dict(columns)
    for rows in (expected, tuple(expected), columns, frame, dataset, {**columns, "label": np.array(["x", "y"])}):
        assert rows_read(rows) == expected
    for rows in (columns["text"], frame["text"], np.array(columns["text"])):
        assert rows_read(rows, field="body") == [{"body": "a b"}, {"body": "в г"}]
    classes = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"]),
         "tags": datasets.List(datasets.ClassLabel(names=["O", "B-PER"]))}
    )  # fmt: skip
    of_classes = datasets.Dataset.from_dict(
        {"text": ["a", "b"], "label": [1, -1], "tags": [[0, 1], []]}, features=classes
    )
    assert rows_read(of_classes) == [
        {"text": "a", "label": "yes", "tags": ["O", "B-PER"]}, {"text": "b", "label": None, "tags": []}
    ]  # fmt: skip
    missing = pandas.DataFrame({"text": ["a", None], "day": pandas.to_datetime(["2026-01-02", None]), "n": [1.5, None]})
    assert rows_read(missing) == [
        {"text": "a", "day": "2026-01-02T00:00:00", "n": 1.5}, {"text": None, "day": None, "n": None}
    ]  # fmt: skip
    for sources in (frame, [frame]):  # the object itself
        assert "rows" not in as_run_file({"data": {"sources": sources}}).tree["data"]["sources"][0]


def test_a_run_of_rows_is_resumed_without_them(tmp_path, monkeypatch):
    """They are read by the formats of files, and written once: the store and the run are found again."""
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))
    texts = [f"The number {number} is followed by another one." for number in range(60)]
    sources = [{"rows": texts}, {"rows": np.array(texts[:30]) + "!", "name": "more"}]
    run = tiny(data={"sources": sources}, tokenizer={"train": {"vocab": 300}})
    first = artel.train(run, ["train.batch=2"], steps=np.int64(2))
    assert {name: counts["read"] for name, counts in first.ledger["sets"].items()} == {"rows": 60, "more": 30}
    for again, more in ((run, {"overrides": ["train.batch=2"], "steps": 2}), ("runs/tiny", {})):
        assert artel.train(again, **more).result == first.result
    shutil.rmtree(tmp_path / "cache")  # the token store is in it, too
    with pytest.raises(
        artel.InputError, match=r"there is no file \{rows\}/[0-9a-f]+\.jsonl\n.*with the same rows again"
    ):
        artel.train("runs/tiny", restart=True)
    assert artel.train(run, ["train.batch=2"], steps=2, restart=True).result["train_loss"] == first.result["train_loss"]
    talks = artel.prepare(
        text_alone(data={"sources": [{"rows": TALKS, "format": "chat"}], "validation": 0}, objective="chat",
                   tokenizer={"train": {"vocab": 270, "special": ["<|im_start|>", "<|im_end|>"]}})
    )  # fmt: skip
    assert "  3\n\n!<|im_end|>" in "".join(
        talks.tokenizer().decode(ids) for _, ids in talks.open().train.iter_samples()
    )


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        ([1], {}, r"rows\[0\]: is an int, neither text nor dict"),
        ([], {}, "there are no rows"),
        ({"text": ["a"], "label": ["b", "c"]}, {}, r"unequal lengths \(text: 1, label: 2\)"),
        ({"text": "abc"}, {}, "is a str, not a column"),
        (7, {}, "is an int"),
        ([{"text": object()}], {}, r"rows\[0\]: has a value that JSON cannot store"),
        (["\ud800"], {}, r"rows\[0\]: has a value"),
        ([{1: "a"}], {}, "has the field 1, int"),
        (["a"], {"path": "a.txt"}, "has both rows and path"),
        (["a"], {"format": "csv"}, "csv reads files, not rows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_rows_are_refused_by_their_place(rows, more, said):
    with pytest.raises(artel.InputError, match=rf"^data\.sources\.0.*{said}"):
        rows_read(rows, **more)


def test_values_of_python_are_taken_where_they_are_meant():
    given = {
        "train.steps": np.int64(3), "train.learning_rate": Decimal("5e-5"), "run": Path("a/b"),
        "train.weight_decay": np.float32(0.5), "train.betas": (np.float64(0.5), Fraction(3, 4)), "seed": Decimal(4),
    }  # fmt: skip
    plain = as_overrides(given)
    assert plain == {
        "train.steps": 3, "train.learning_rate": 5e-5, "run": "a/b", "train.weight_decay": 0.5,
        "train.betas": [0.5, 0.75], "seed": 4,
    }  # fmt: skip
    assert {type(value) for value in plain.values()} == {int, float, str, list}
    assert as_overrides(["train.steps=3", "run=x"]) == as_overrides({"train.steps": 3, "run": "x"})
    assert as_overrides("train.steps=3", {"batch": 4}) == {"train.steps": 3, "train.batch": 4}


RING: dict = {}
RING["data"] = RING
RING["data"] = RING


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: artel.train(RING), "data: contains itself"),
        (lambda: artel.train({}, {1: 2}), "overrides: have the key 1, an int"),
        (lambda: artel.train({}, 3), "overrides: are an int"),
        (lambda: artel.train({}, {"train.steps": {1, 2}}), r"train\.steps: is a set, which no key accepts"),
        (lambda: artel.train({"train": {"steps": b"3"}}), r"train\.steps: is a bytes"),
        (lambda: artel.train({}, lr=1e-3), r"lr: is not a key of train.*\n.*train\.learning_rate"),
        (lambda: artel.train({}, block=8), r"block: is not a key of train.*\n.*data\.block"),
        (lambda: artel.train({}, {"train.steps": 2}, steps=3), "steps: is given twice"),
        (lambda: artel.train(tiny(), callbacks=[print], nproc=2), "are objects of this process"),
        (lambda: artel.plan(3), "is an int, not a run"),
        (lambda: artel.open("runs/none", device="gpu"), "is not a device"),
        (lambda: artel.open("runs/none", device="cuda:99"), "cuda:99 does not exist"),
        (lambda: artel.open("runs/none", device="meta"), "meta is not"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_meant_is_refused_in_words_of_python(call, said):
    with pytest.raises(artel.InputError, match=said) as error:
        call()
    assert "YAML" not in str(error.value)
