"""What a choice of a model expected of its run, beside what was reached: said at the end, kept, and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from artel.config import dump_run, load_run, parse_run
from artel.parallel import World
from artel.preparing import prepare
from artel.training.comparison import choice_comparison, read_choice, record_results
from artel.training.loop import train
from artel.training.run_folder import RunFolder
from support.messages import logged
from support.runs import artel, succeed, write_run

ALONE = World(0, 1, 0, torch.device("cpu"))
EXPECTED = {"bits_per_byte": 2.0, "tokens_per_second": 1000.0, "minutes": 0.5}
RESULT = {"validation": {"loss": 3.0, "bits_per_byte": 2.2}, "tokens_per_second": 900.0, "wall_seconds": 30.0}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Of a run whose model was chosen for 30 seconds."""
    run = load_run(str(write_run(tmp_path / "run.yaml", train={"steps": None, "budget": 30})))
    folder = RunFolder(Path(run.run))
    folder.claim()
    folder.config.write_text(dump_run(run))
    folder.choice.write_text(json.dumps({"model": run.model.config, "expected": EXPECTED}))
    return folder


@pytest.mark.slow
def test_a_run_says_at_its_end_what_it_reached_and_its_report_too(folder):
    run, lines = load_run(str(folder.config), {"train.budget": None, "train.steps": 4}), logged()
    result = train(run, prepare(run), ALONE)
    (line,) = [line for line in lines if line.startswith("reached: ")]
    bits = result["validation"]["bits_per_byte"]
    assert f"reached: {bits:.3f} bits per byte of validation, expected 1.80 to 2.20; " in line
    assert "tokens/s, planned 1,000 (" in line
    assert " min, planned 0.5 (" in line
    kept = json.loads(folder.choice.read_text())
    assert kept["expected"] == EXPECTED
    assert kept["reached"]["tokens_per_second"] == result["tokens_per_second"]
    assert kept["reached"]["minutes"] == result["wall_seconds"] / 60
    done = artel("report", folder.path, "--json")
    assert line in done.stderr
    assert json.loads(done.stdout)["choice"]["reached"] == kept["reached"]


@pytest.mark.parametrize(
    ("overrides", "changes", "line"),
    [
        ({}, {}, "reached: 2.200 bits per byte of validation, expected 1.80 to 2.20; 900 tokens/s, planned 1,000 "
         "(-10%); 0.5 min, planned 0.5 (+0%)"),
        ({"train.budget": 60}, {},  # under another budget no bits per byte were expected
         "reached: 2.200 bits per byte of validation; 900 tokens/s, planned 1,000 (-10%); 0.5 min, planned 1.0 (-50%)"),
        ({"model.config.n_layer": 3}, {}, None),  # not the model that was chosen
        ({}, {"validation": None}, "reached: 900 tokens/s, planned 1,000 (-10%); 0.5 min, planned 0.5 (+0%)"),
    ],
)  # fmt: skip
def test_figures_stand_beside_the_expected_ones(folder, overrides, changes, line):
    assert record_results(folder, load_run(str(folder.config), overrides), RESULT | changes) == line
    assert (choice_comparison(read_choice(folder) or {}) if line else None) == line
    assert ("reached" in json.loads(folder.choice.read_text())) == (line is not None)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"expected": 3}', '{"expected": {"minutes": "x"}}', '{"expected": {"minutes": 1}}']
)
def test_a_damaged_file_tells_nothing(folder, content):
    folder.choice.write_text(content)
    assert read_choice(folder) is None
    assert record_results(folder, load_run(str(folder.config)), RESULT) is None


def test_a_restart_keeps_its_plan_without_what_the_earlier_run_measured(folder):
    folder.plan.write_text(json.dumps({"verdict": "fits", "measured": {"host_gib": 1.0}}))
    folder.empty()
    assert json.loads(folder.plan.read_text()) == {"verdict": "fits"}
    assert not folder.choice.exists()


@pytest.mark.long
def test_the_choice_of_a_run_is_kept_until_it_is_done():
    """The rates are too small to change a weight, so patience soon ends the run; what it has begun with resumes it."""
    rates = {"learning_rate": 1e-30, "muon_learning_rate": 1e-30}
    tree = {
        "run": "runs/auto",
        "data": {"sources": [{"format": "dummy", "documents": 2000}], "store": "stores"},
        "tokenizer": {"train": {"vocab": 400}},
        "model": {"auto": True},
        "train": {"budget": "3min", "batch": 8, "compile": "off", **rates},
        "validate": {"every": 1, "patience": 1, "blocks": 8},
        "track": ["jsonl"],
    }
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    done = succeed("train", "run.yaml")
    assert "bits per byte of held-out text, estimated from small runs on a novel" in done.stderr
    assert " min, planned 3.0 (" in done.stderr
    assert "plan: the model was chosen by " in done.stderr
    choice = json.loads(Path("runs/auto/choice.json").read_text())
    assert choice["model"] == parse_run(yaml.safe_load(Path("runs/auto/config.yaml").read_text()), {}, {}).model.config
    assert choice["reached"].keys() == choice["expected"].keys()
