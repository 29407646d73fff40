"""The average of the weights, `train.ema`: it is judged, kept, resumed, shared and exported."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from artel.training.checkpoint.format import full_weights
from support.runs import artel, metrics, succeed, write_run


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained(folder, *arguments, name="run", **changes):
    run = write_run(folder / f"{name}.yaml", train={"ema": 0.5}, checkpoint={"every": 2, "keep": 3}, **changes)
    succeed("train", run, *arguments)
    return run.with_suffix("")


def test_the_average_is_judged_exported_and_resumed_to_the_bit(tmp_path):
    run = trained(tmp_path)
    latest = run / "checkpoints/latest"
    model, raw = load_file(run / "model/model.safetensors"), load_file(latest / "model.safetensors")
    averages = {name: tensor for name, tensor in full_weights(latest).items() if name in model}
    assert same(model, averages)
    assert not same(model, {name: raw[name] for name in model})
    (judged,) = [line["validation"]["loss"] for line in metrics(run) if "validation" in line]
    shown = artel("evaluate", run, "--json")
    assert f"{judged:.4f}"[:5] in shown.stdout, shown.stdout + shown.stderr
    shutil.rmtree(run / "checkpoints/step-000000006")
    shutil.rmtree(run / "model")
    (run / "result.json").unlink()
    again = artel("train", run)
    assert "resuming from step 4 of 6" in again.stderr, again.stderr
    assert same(model, load_file(run / "model/model.safetensors"))


def test_an_export_for_deepspeed_has_the_weights_and_a_model_of_their_averages(tmp_path):
    run = trained(tmp_path)
    succeed("export", run, tmp_path / "out", "--deepspeed")
    raw = load_file(run / "checkpoints/latest/model.safetensors")
    assert same(load_file(tmp_path / "out/model.safetensors"), load_file(run / "model/model.safetensors"))
    parameters = {path.parent.name: torch.load(path)["param"] for path in (tmp_path / "out").glob("*/zero/*/fp32.pt")}
    assert same(parameters, {name: raw[name] for name in parameters})
    assert len(parameters) > 10


@pytest.mark.processes
def test_the_average_is_shared_by_processes(tmp_path):
    one = load_file(trained(tmp_path) / "model/model.safetensors")
    shared = trained(tmp_path, "--nproc", "2", name="shared", parallel={"data": "fsdp"})
    two = load_file(shared / "model/model.safetensors")
    assert one.keys() == two.keys()
    for name, average in one.items():
        torch.testing.assert_close(average, two[name], rtol=0, atol=1e-5)
    losses = [
        [line["validation"]["loss"] for line in metrics(folder) if "validation" in line]
        for folder in (tmp_path / "run", shared)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
