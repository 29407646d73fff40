"""`artel train` begins with a plan, refuses what cannot fit, and compares the plan with what it measures."""

import json

import pytest
import torch

from artel.config import load_run
from artel.config.schema.quantities import read_seconds
from artel.errors import InputError
from artel.host import memory, swap_bytes
from artel.launching.plan_run import plan_at_start
from artel.parallel import World
from artel.planning.rates import Rates, measurement_identity, save_rates
from artel.preparing import prepare
from artel.training.loop import train
from artel.training.micro_batch import MicroBatchPlan
from artel.training.plan_file import planned_micro_batch
from artel.training.run_folder import RunFolder
from support.messages import logged
from support.runs import refused, succeed, write_run

ALONE = World(0, 1, 0, torch.device("cpu"))
PLAN = {
    "verdict": "fits",
    "memory_share": 0.1,
    "micro_batch": 16,
    "activation_checkpointing": "none",
    "tokens_per_second": {"low": 900.0, "mid": 1000.0, "high": 1100.0},
    "per_rank_gib": {"reserved": 0.5, "framework": 0.1},
    "host_gib": 0.5,
}


@pytest.mark.slow
def test_a_run_that_cannot_fit_is_refused_before_it_begins(tmp_path):
    """Its weights are small, so that only the plan knows: the activations of a micro-batch exceed the memory."""
    room = (memory().limit or memory().total) + swap_bytes()
    rows = room * 3 // (1024 * 14_000)  # about 14 kB for each token of a row
    write_run(
        tmp_path / "run.yaml",
        data={"block": 1024},
        train={"batch": rows, "micro_batch": rows, "steps": 1000, "activation_checkpointing": "none"},
    )
    ended = refused("train", "run.yaml")
    assert "does not fit: " in ended.stderr
    assert "activations" in ended.stderr
    assert "--force tries it" in ended.stderr
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["memory_share"] > 1.15
    assert len(plan["summary"]) == 3
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_of_a_moment_is_not_planned(tmp_path):
    write_run(tmp_path / "run.yaml", train={"steps": 2})
    (tmp_path / "run").mkdir()
    assert "plan" not in succeed("train", "run.yaml").stderr
    assert not (tmp_path / "run" / "plan.json").exists()


@pytest.mark.long
def test_a_budget_that_the_planned_steps_outlast_is_refused_with_the_shortest(tmp_path, monkeypatch):
    """On a machine that was measured to be a million times slower than any."""
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))
    products = [f"product fp32 {layout}" for layout in ("nn", "nt", "tn")]
    keys = [*products, "attention fp32 forward", "attention fp32 backward", "memory aten.add", "fused", "exponentials"]
    save_rates(measurement_identity(torch.device("cpu")), [Rates(1, {key: [(1000, 1.0)] for key in keys})])
    run = load_run(str(write_run(tmp_path / "run.yaml", train={"steps": None, "budget": 60})))
    prepared, said = prepare(run), logged()
    RunFolder(tmp_path / "run").claim()
    with pytest.raises(InputError, match=r"60s is too short: 4 steps take at least") as error:
        plan_at_start(run, prepared, 1, 1, False)
    shortest = read_seconds(error.value.problems[0].fix.split()[1])
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert 60 < plan["shortest_budget_seconds"] <= shortest
    assert "too short: 4 steps take" in said[-1]
    plan_at_start(run, prepared, 1, 1, True)


@pytest.mark.slow
def test_plan_and_measurement_are_compared_once(tmp_path):
    file = write_run(tmp_path / "run.yaml")
    run, said = load_run(str(file)), logged()
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    folder.plan.write_text(json.dumps(PLAN))
    train(run, prepare(run), ALONE)
    lines = [line for line in said if line.startswith("measured after step ")]
    assert len(lines) == 1
    assert "tokens/s, planned 1,000 (" in lines[0]
    assert "GiB of all processes, planned 0.5 (" in lines[0]
    measured = json.loads(folder.plan.read_text())["measured"]
    assert measured["tokens_per_second"] > 0
    assert measured["host_gib"] > 0.05


def test_the_search_for_a_micro_batch_starts_from_the_plan(tmp_path):
    folder, cpu = RunFolder(tmp_path), torch.device("cpu")
    assert planned_micro_batch(folder, cpu) is None
    for share, verdict, expected in ((0.1, "fits", True), (0.8, "fits", False), (0.95, "tight", False)):
        folder.plan.write_text(json.dumps(PLAN | {"memory_share": share, "verdict": verdict}))
        planned = planned_micro_batch(folder, cpu)
        assert planned == (MicroBatchPlan(16, "none") if expected else None)
    folder.plan.write_text("{")
    assert planned_micro_batch(folder, cpu) is None


def test_a_text_of_less_than_a_block_is_refused_as_such(tmp_path):
    write_run(tmp_path / "run.yaml", data={"block": 1024, "sources": [{"format": "dummy", "documents": 10}]},
              train={"steps": None, "epochs": 1})  # fmt: skip
    assert "less than a block" in refused("train", "run.yaml").stderr


@pytest.mark.long
def test_a_refused_restart_keeps_the_earlier_run_and_a_plan_is_of_all_processes(tmp_path):
    small = {"steps": 2}
    write_run(tmp_path / "run.yaml", train=small)
    succeed("train", "run.yaml")
    room = (memory().limit or memory().total) + swap_bytes()
    rows = room * 3 // (1024 * 14_000)
    words = ["data.block=1024", f"train.batch={rows}", f"train.micro_batch={rows}", "train.steps=1000"]
    refused("train", "run.yaml", "--restart", *words, "train.activation_checkpointing=none")
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    run = load_run("run.yaml")
    prepared, said = prepare(run), logged()
    large = run.model_copy(update={"train": run.train.model_copy(update={"steps": 10**7})})
    plan_at_start(large, prepared, 2, 2, False)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["processes"] == 4
    assert "each of 4 processes" in said[2]
