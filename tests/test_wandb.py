"""Weights & Biases, offline: a run goes where wandb's own variables say."""

import pytest

from artel.config import parse_run
from artel.training.metrics.wandb import WandbTracker
from artel.training.run_folder import RunFolder
from support.trackers import wandb_folders, wandb_records

pytestmark = pytest.mark.processes  # wandb starts one of its own


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, ("artel", "first")), ({"WANDB_PROJECT": "poets", "WANDB_NAME": "tuesday"}, ("poets", "tuesday"))],
    ids=["without", "with"],
)
def test_project_and_name_are_those_of_wandbs_variables(variables, expected, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # it reads its variables once in a process
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "WANDB_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"WANDB_MODE": "offline"} | variables).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "runs/first").mkdir(parents=True)
    (tmp_path / "runs/first/config.yaml").write_text("run: runs/first\n")
    keys = {"run": "runs/first", "data": {"sources": [{"path": "a.txt"}]}, "model": {"config": {"model_type": "gpt2"}}}
    tracker = WandbTracker(parse_run(keys, {}, {(): "run.yaml"}), RunFolder(tmp_path / "runs/first"), 0, 3)
    tracker.log_training({"step": 1, "loss": 2.0})
    tracker.close()
    (offline,) = wandb_folders(tmp_path / "runs/first")
    (begins,) = [record["run"] for record in wandb_records(offline) if record["type"] == "run"]
    assert (begins["project"], begins["display_name"]) == expected
