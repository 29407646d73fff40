"""Every example of docs/extending.md, extracted and run: a tiny training with the plugin, and what it leaves behind."""

import importlib
import json
import math
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
import typer
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from artel.config import RewardTerm, SourceConfig, load_run
from artel.config.converters.tools import convert
from artel.errors import InputError
from artel.plugins import load_plugin
from artel.preparing.prepare import store_key
from artel.rewards import Completion, RewardPool
from artel.text.formats.dummy import read_dummy
from artel.tokens import TokenStore, load_tokenizer
from support.runs import artel, largest_difference, losses, metrics, refused, succeed, write_run
from support.waiting import wait_until

PAGE = (Path(__file__).resolve().parents[1] / "docs/extending.md").read_text(encoding="utf-8")
LONGEST = 40


def examples():
    """Heading -> (name of the file, its code, what the run file says)."""
    found = {}
    for section in PAGE.removeprefix("# ").split("\n## "):
        code = re.search(r"```python\n# (\S+\.py)\n(.*?)```", section, re.DOTALL)
        keys = re.search(r"```yaml\n(.*?)```", section, re.DOTALL)
        found[section.partition("\n")[0]] = (code[1], code[2], yaml.safe_load(keys[1]) if keys else {})
    return found


EXAMPLES = examples()


@pytest.fixture
def trained(tmp_path, request):
    """The folder of a run with the plugin of an example."""
    file, code, keys = EXAMPLES[request.param]
    Path(file).write_text(code)
    poems = [record.text for record in read_dummy(SourceConfig(format="dummy", documents=300))]
    Path("texts.poems").write_text("\n~~~\n".join([*poems, ""]))
    write_run(tmp_path / "mine.yaml", **keys)
    succeed("train", "mine.yaml")
    return tmp_path / "mine"


def of(*headings):
    return pytest.mark.parametrize("trained", headings, indirect=True)


def test_there_is_an_example_of_each_and_none_is_long():
    assert list(EXAMPLES) == [
        "Extending artel", "A format", "An objective", "A second trained module", "A metric", "An optimizer",
        "A schedule", "A parallel strategy", "A tracker", "A callback", "A checkpoint item", "A reward",
        "An exporter", "A launcher",
        "A converter", "A command",
    ]  # fmt: skip
    for heading, (_, code, keys) in EXAMPLES.items():
        assert code.count("\n") + len(yaml.safe_dump(keys, default_flow_style=None).splitlines()) <= LONGEST, heading


@of("Extending artel")
def test_the_first_example(trained):
    rates = [line["learning_rate"] for line in metrics(trained) if "loss" in line]
    assert rates == pytest.approx([5e-4, *[1e-3] * 4, 1e-4])


@of("A format")
def test_a_format(trained):
    ledger = orjson.loads((trained / "ledger.json").read_bytes())
    assert ledger["documents"]["read"] == 301
    assert ledger["documents"]["dropped"]["empty"] == 1
    (rejected,) = (trained / "rejected.jsonl").read_text().splitlines()
    assert json.loads(rejected)["origin"].startswith("texts.poems:")


@of("An objective")
def test_an_objective(trained):
    (store,) = [folder for folder in Path("stores").iterdir() if (folder / "manifest.json").is_file()]
    tokenizer = load_tokenizer(str(store / "tokenizer"))
    ids = TokenStore(store).train.read(0, 400).tolist()
    first = ids[: ids.index(tokenizer.end_id)]
    half = len(first) // 2
    assert first[:half] == first[half:][::-1]  # mirror: true
    assert tokenizer.decode(first[half:]).lstrip()[0].isupper()


@pytest.mark.slow
@of("A second trained module")
def test_a_second_trained_module(trained):
    weights = load_file(trained / "model/model.safetensors")
    assert weights["second_head.1.weight"].shape == weights["transformer.wte.weight"].shape
    assert weights["second_head.1.bias"].any()  # it begins as zeros
    (judged,) = [line["validation"]["loss"] for line in metrics(trained) if "validation" in line]
    shown = succeed("evaluate", trained, "--json")  # opens the folder, with the second head
    assert f"{judged:.4f}"[:5] in shown.stdout


@pytest.mark.ci
@pytest.mark.processes
@of("A second trained module")
def test_a_second_trained_module_is_shared_by_processes(trained):
    succeed("train", "mine.yaml", "run=two", "parallel.data=fsdp", "--nproc", "2")
    assert largest_difference(losses(trained), losses(Path("two"))) < 1e-4


@of("A metric")
def test_a_metric(trained):
    (judged,) = [line["validation"] for line in metrics(trained) if "validation" in line]
    assert judged["units_per_token"] == pytest.approx(judged["loss"] / math.log(10))
    assert (trained / "checkpoints/best").exists()


@of("An optimizer")
def test_an_optimizer(trained):
    from safetensors.numpy import load_file

    by_step = losses(trained)
    assert by_step[6][0] < by_step[1][0]
    state = load_file(trained / "checkpoints/latest/optimizer.safetensors")
    assert {name.rpartition("|")[2] for name in state} == {"sign"}


@pytest.mark.processes
@of("An optimizer")
def test_every_process_has_the_plugins(trained):
    succeed("train", "mine.yaml", "run=two", "parallel.data=2", "prepare.workers=2")
    assert largest_difference(losses(trained), losses(Path("two"))) < 1e-4


@pytest.mark.processes
@of("A parallel strategy")
def test_a_parallel_strategy(trained):
    succeed("train", "mine.yaml", "run=two", "--nproc", "2")
    succeed("train", "mine.yaml", "run=plain", "parallel.data=ddp", "--nproc", "2")
    assert 0 < largest_difference(losses(Path("plain")), losses(Path("two"))) < 1e-2  # gradients were rounded


@of("A schedule")
def test_a_schedule(trained):
    rates = [line["learning_rate"] for line in metrics(trained) if "loss" in line]
    assert rates == pytest.approx([1e-3 * share for share in (0.5, 1, 1, 1, 0.5, 0.5)])


@of("A tracker")
def test_a_tracker(trained):
    lines = (trained / "ticker.txt").read_text().splitlines()
    rows = [(int(step), float(loss)) for step, loss in (line.split(",") for line in lines)]
    assert rows == [(line["step"], line["loss"]) for line in metrics(trained) if "loss" in line]


def norms(run: Path) -> dict[int, float]:
    lines = (run / "norms.txt").read_text().splitlines()
    return {int(step): float(norm) for step, norm in (line.split() for line in lines)}


@of("A callback")
def test_a_callback(trained):
    weights = load_file(trained / "model/model.safetensors").values()
    assert list(norms(trained)) == [2, 4, 6]
    assert norms(trained)[6] == pytest.approx(math.sqrt(sum(float(each.double().square().sum()) for each in weights)))


@pytest.mark.ci
@pytest.mark.processes
@of("A callback")
def test_a_callback_on_two_processes(trained):
    for name in ("ddp", "fsdp"):
        succeed("train", "mine.yaml", f"run={name}", f"parallel.data={name}", "--nproc", "2")
        assert norms(Path(name)) == pytest.approx(norms(trained), rel=1e-5)


@pytest.mark.slow
@of("A checkpoint item")
def test_a_checkpoint_item(trained):
    weights, peaks = load_file(trained / "model/model.safetensors"), load_file(trained / "peaks.safetensors")
    (name,) = peaks
    assert (peaks[name] >= weights[name].abs()).all()
    assert (peaks[name] > weights[name].abs()).any()
    shutil.rmtree(trained / "checkpoints/step-000000006")
    for file in ("peaks.safetensors", "result.json"):
        (trained / file).unlink()
    done = artel("train", "mine.yaml")
    assert "resuming from step 4 of 6" in done.stderr, done.stderr
    assert torch.equal(load_file(trained / "peaks.safetensors")[name], peaks[name])


def test_a_reward():
    file, code, keys = EXAMPLES["A reward"]
    Path(file).write_text(code)
    importlib.invalidate_caches()
    load_plugin(keys["plugins"])
    terms = [RewardTerm.model_validate(term) for term in keys["policy"]["rewards"]]
    completions = [Completion("Who?", text, {}, 1, False) for text in ("Anna in the forest", "Anna", "")]
    with RewardPool(terms, plugins=[keys["plugins"]], seconds=60, memory_bytes=2**28, workers=1) as pool:
        scores = pool.score(completions)
    assert scores.names == ["short"]
    np.testing.assert_array_equal(scores.values[:, 0], [0.5, 1, np.nan])
    np.testing.assert_array_equal(scores.totals, [1, 2, np.nan])


@of("An exporter")
def test_an_exporter(trained):
    succeed("export", "mine", "exported", "--to", "numpy_zip", "compress=true")
    assert "transformer.wte.weight" in np.load("exported/weights.npz")
    for words, says in (
        (("numpy_zap",), "did you mean numpy_zip?"),
        (("numpy_zip", "compres=1"), "its settings: compress"),
    ):
        assert says in refused("export", "mine", "other", "--to", *words).stderr


def test_a_converter():
    file, code, _ = EXAMPLES["A converter"]
    Path(file).write_text(code)
    runpy.run_path(file)
    written = "base: m\ncorpus: a.txt\nrows: 4\nparts: 2\nshuffle: true\ngpu_count: 2\nrat: 3\n"
    result = convert(written, "old")
    assert result.run == {
        "data": {"sources": [{"path": "a.txt"}]}, "model": {"from": "m"},
        "train": {"learning_rate": 1e-3, "batch": 8},
    }  # fmt: skip
    assert (list(result.same), list(result.carried)) == (["shuffle"], ["base", "corpus", "rows", "parts"])
    assert [line.partition(" = ")[0] for line in result.not_carried] == ["old:6: gpu_count", "old:7: rat"]
    assert result.not_carried[1].endswith("did you mean rate?")


@of("A schedule")
def test_a_command(trained):
    file, code, _ = EXAMPLES["A command"]
    Path(file).write_text(code)
    app = typer.Typer()
    app.command("vocabulary")(runpy.run_path(file)["vocabulary"])
    shown = CliRunner().invoke(app, [str(trained), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output) == {"vocabulary": load_tokenizer(str(trained / "model")).vocabulary}


def test_the_code_of_a_plugin_is_in_the_key_of_a_store_that_it_shapes(tmp_path):
    plain = store_key(load_run(str(write_run(tmp_path / "plain.yaml"))))
    Path("key_formats.py").write_text(EXAMPLES["A format"][1].replace('"poems"', '"key_poems"'))
    Path("a.poems").write_text("one\n***\ntwo")
    unused = load_run(str(write_run(tmp_path / "unused.yaml", plugins=["key_formats"])))
    assert store_key(unused) == plain
    source = {"sources": [{"path": "a.poems", "format": "key_poems"}]}
    used = load_run(str(write_run(tmp_path / "used.yaml", plugins=["key_formats"], data=source)))
    before = store_key(used)
    with Path("key_formats.py").open("a") as file:
        file.write("\n# another comment\n")
    assert store_key(used) != before


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (None, r"plugins.0: 'wrong_plugin' cannot be imported: ModuleNotFoundError"),
        ("raise ValueError('out of order')", r"plugins.0: 'wrong_plugin' cannot be imported: ValueError: out of order"),
        ("from artel.registry import TRACKERS\nTRACKERS.register('jsonl')(object)", r"'jsonl' is registered already"),
    ],
)
def test_a_plugin_that_cannot_be_imported(code, message, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    if code is not None:
        Path("wrong_plugin.py").write_text(code)
    importlib.invalidate_caches()
    with pytest.raises(InputError, match=message) as error:
        load_run(str(write_run(tmp_path / "run.yaml", plugins="wrong_plugin")))
    assert all(problem.fix for problem in error.value.problems)


def test_a_callback_that_nobody_registered(tmp_path):
    with pytest.raises(InputError, match=r"callbacks.0: 'mine' is not one of the entries of plugins"):
        load_run(str(write_run(tmp_path / "run.yaml", callbacks=["mine"])))


def test_a_launcher(tmp_path):
    file, code, keys = EXAMPLES["A launcher"]
    Path(file).write_text(code)
    write_run(tmp_path / "mine.yaml", **keys)
    shown = succeed("launch", "background", "mine.yaml", "--dry-run", "--max-restarts", "0").stdout
    assert shown == ("renice -n 19 $$ > /dev/null\nset -e\nexec artel train mine.yaml --nproc 1 --max-restarts 0\n")
    Path("artel").write_text('#!/bin/sh\necho "$@" > words\nexec sleep 600\n')
    Path("artel").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    number = json.loads(succeed("launch", "background", "mine.yaml", "--json", env=path).stdout)["job"]
    wait_until(lambda: Path("words").exists(), lambda: Path("mine/background.log").read_text())
    assert succeed("launch", "status", "mine").stdout == f"{number}: running\n"
    succeed("launch", "cancel", "mine")
    wait_until(lambda: not Path("/proc", number).exists(), lambda: "it still runs")
    assert succeed("launch", "status", "mine").stdout == f"{number}: ended\n"
