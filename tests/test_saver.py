"""Checkpoints are written beside training, stay as told, and training outlives a disk that is full."""

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from artel.config import Overrides, load_run
from artel.config.schema.run import CheckpointConfig
from artel.errors import ArtelError
from artel.parallel import World
from artel.preparing import prepare
from artel.training.checkpoint.format import list_checkpoints, read_progress
from artel.training.checkpoint.retention import retain
from artel.training.loop import train
from support.messages import logged
from support.runs import assert_same_models, small_disk, succeed, write_run

pytest_plugins = ["support.services"]

ALONE = World(0, 1, 0, torch.device("cpu"))


def trained(file: Path, *callbacks, overrides=()) -> tuple[dict, list[str]]:
    """(the result, what was said)."""
    run, said = load_run(str(file), Overrides.parse(list(overrides))), logged()
    return train(run, prepare(run), ALONE, callbacks), said


def checkpoints(folder: Path, *names: int, latest: int, best: int | None = None, size: int = 1000) -> Path:
    for name in names:
        path = folder / f"step-{name:09d}"
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(bytes(size))
    for pointer, step in (("latest", latest), ("best", best)):
        if step is not None:
            (folder / pointer).symlink_to(f"step-{step:09d}")
    return folder


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in list_checkpoints(folder)]


@pytest.mark.slow
def test_written_beside_training_is_what_is_written_while_it_waits(tmp_path):
    threads = []

    def look(run) -> None:
        if run.step == 4:  # the last is written before the run goes on
            threads.append(run.saver._pending is not None)

    found = {}
    for name, asynchronous in (("beside", True), ("waits", False)):
        file = write_run(tmp_path / f"{name}.yaml", checkpoint={"every": 3, "keep": 9, "asynchronous": asynchronous},
                         train={"steps": 7})  # fmt: skip
        trained(file, look)
        folder = tmp_path / name / "checkpoints"
        assert steps(folder) == [3, 6, 7]
        found[name] = [
            {**load_file(path / "model.safetensors"), **load_file(path / "optimizer.safetensors")}
            for path in list_checkpoints(folder)
        ]
    assert threads == [True, False]
    for one, other in zip(found["beside"], found["waits"], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    first, second, _ = found["beside"]
    assert not any(torch.equal(first[name], second[name]) for name in first if name.endswith("attn.c_attn.weight"))


def test_a_checkpoint_holds_the_run_file_and_the_versions(tmp_path):
    file = write_run(tmp_path / "run.yaml", train={"steps": 2})
    trained(file)
    path = tmp_path / "run" / "checkpoints" / "latest"
    assert yaml.safe_load((path / "run.yaml").read_text())["train"]["steps"] == 2
    assert torch.__version__ in (path / "versions.json").read_text()
    assert not [thread for thread in threading.enumerate() if "checkpoints" in thread.name]


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ({"keep": 2}, [10, 50, 60]),
        ({"keep": 1}, [10, 60]),
        ({"keep": 9}, [10, 20, 30, 40, 50, 60]),
    ],
)
def test_what_stays(tmp_path, wanted, left):
    folder = checkpoints(tmp_path / "checkpoints", 10, 20, 30, 40, 50, 60, latest=60, best=10)
    retain(folder, CheckpointConfig(**wanted))
    assert steps(folder) == left
    assert {path.name for path in folder.iterdir() if not path.name.startswith("step-")} == {"latest", "best"}


def test_the_newest_of_a_run_that_fell_back_stays(tmp_path):
    folder = checkpoints(tmp_path / "checkpoints", 10, 20, 90, latest=20)  # 90 is damaged, and was not gone on from
    retain(folder, CheckpointConfig(keep=1))
    assert 20 in steps(folder)


@pytest.mark.slow
def test_a_commit_that_a_kill_cut_short_is_finished(tmp_path):
    """Killed when the last checkpoint had its name, and before `latest` and `best` pointed to it."""
    file = write_run(tmp_path / "run.yaml", checkpoint={"every": 2, "keep": 2}, train={"steps": 6})
    trained(file)
    run = tmp_path / "run"
    pointers = {name: (run / "checkpoints" / name).resolve() for name in ("latest", "best")}
    model = load_file(run / "model" / "model.safetensors")
    for name in pointers:
        (run / "checkpoints" / name).unlink()
        (run / "checkpoints" / name).symlink_to("step-000000004")
    shutil.copytree(run / "checkpoints" / "step-000000004", run / "checkpoints" / "step-000000002")
    shutil.rmtree(run / "model")
    (run / "result.json").unlink()
    assert trained(file)[0]["model_step"] == 6
    assert {name: (run / "checkpoints" / name).resolve() for name in pointers} == pointers
    assert steps(run / "checkpoints") == [4, 6]
    again = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(model[name], again[name]) for name in model)


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "4m") as folder:
        yield folder


def test_training_outlives_a_full_disk(tmp_path, disk):
    file = write_run(tmp_path / "run.yaml", run=str(disk / "run"), train={"steps": 9}, checkpoint={"every": 2},
                     validate={"every": "never"})  # fmt: skip

    def fill(run) -> None:
        if run.step == 3:
            run.saver.wait()
            (disk / "fill").write_bytes(bytes(shutil.disk_usage(disk).free))
        if run.step == 7:
            run.saver.wait()
            (disk / "fill").unlink()

    result, said = trained(file, fill)
    assert result["steps"] == 9
    refused = [line for line in said if "the disk is full" in line]
    assert [line.split(" could")[0] for line in refused] == [
        f"the checkpoint of step {step}" for step in (4, 6, 4, 6)
    ]  # at once, and again at the end
    folder = disk / "run" / "checkpoints"
    assert steps(folder) == [2, 8, 9]
    assert not list(folder.glob(".*"))
    assert read_progress(folder / "latest").step == 9
    lines = (disk / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum('"loss"' in line and '"gradient_norm"' in line for line in lines) == 9


@pytest.mark.ci
@pytest.mark.processes
def test_a_copy_on_s3_outlives_the_machine(tmp_path, bucket):
    pytest.importorskip("s3fs")
    copies = {"every": 2, "keep": 2, "copy_to": "s3://texts/runs/one"}
    file = write_run(tmp_path / "run.yaml", checkpoint=copies, train={"steps": 7})

    def stop(run) -> None:
        if run.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(file, stop)
    assert copied(bucket, "runs/one") == {2, 4}
    shutil.rmtree(tmp_path / "run")
    bucket.delete_object(Bucket="texts", Key="runs/one/step-000000004/checksums.json")  # as if cut while it was copied
    result, said = trained(file)
    assert any(line.startswith("resuming from step 2 of") for line in said)
    assert result["steps"] == 7
    assert copied(bucket, "runs/one") == {*steps(tmp_path / "run" / "checkpoints")}
    whole = write_run(tmp_path / "whole.yaml", train={"steps": 7})
    trained(whole)
    assert_same_models(file, whole)


def copied(bucket, prefix: str) -> set[int]:
    """Steps of the copies there."""
    found = bucket.list_objects_v2(Bucket="texts", Prefix=f"{prefix}/").get("Contents", [])
    names = [entry["Key"].removeprefix(f"{prefix}/") for entry in found]
    return {int(name[5:14]) for name in names if name.endswith("/checksums.json")}


def damage(bucket, copy: str) -> None:
    """Change the last byte of the weights in a copy."""
    weights = {"Bucket": "texts", "Key": f"{copy}/model.safetensors"}
    body = bytearray(bucket.get_object(**weights)["Body"].read())
    body[-1] ^= 1
    bucket.put_object(**weights, Body=bytes(body))


@pytest.mark.processes
def test_copies_outlive_a_machine_without_those_that_it_never_had(tmp_path, bucket):
    """A damaged one is named, and the one before it fetched; --restart removes all."""
    pytest.importorskip("s3fs")
    wanted = {"every": 2, "keep": 2, "best": None, "copy_to": "s3://texts/two"}
    file = write_run(tmp_path / "run.yaml", checkpoint=wanted, train={"steps": 9})

    def stop(run) -> None:
        if run.step == 7:
            run.saver.wait()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(file, stop)
    assert copied(bucket, "two") == {4, 6}
    shutil.rmtree(tmp_path / "run")
    damage(bucket, "two/step-000000006")
    with pytest.raises(ArtelError, match=r"(?s)began with train\.learning_rate.*another address for copies"):
        trained(file, overrides=["train.learning_rate=1"])
    _, said = trained(file)
    assert any("step-000000006 is damaged (model.safetensors does not have its checksum)" in line for line in said)
    assert any(line.startswith("resuming from step 4 of") for line in said)
    assert copied(bucket, "two") == {8, 9}
    shutil.rmtree(tmp_path / "run")
    _, said = trained(file)
    assert any(line.startswith("resuming from step 9 of") for line in said)
    assert copied(bucket, "two") == {8, 9}
    succeed("train", file, "train.steps=2", "--restart", env=dict(os.environ))
    assert copied(bucket, "two") == {2}


@pytest.mark.processes
def test_a_run_goes_on_without_a_damaged_copy_of_the_best(tmp_path, bucket):
    pytest.importorskip("s3fs")
    wanted = {"every": 2, "keep": 1, "best": "loss", "copy_to": "s3://texts/three"}
    file = write_run(tmp_path / "run.yaml", checkpoint=wanted, validate={"every": 2}, train={"steps": 6})

    def stop(run) -> None:
        if run.step == 3:
            run.progress.best = -1.0  # whatever comes, step 2 stays the best
        if run.step == 5:
            run.saver.wait()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(file, stop)
    assert copied(bucket, "three") == {2, 4}
    shutil.rmtree(tmp_path / "run")
    damage(bucket, "three/step-000000002")
    result, said = trained(file)
    assert any("step-000000002, the best, is damaged" in line and "continues without it" in line for line in said)
    assert any(line.startswith("resuming from step 4 of") for line in said)
    assert result["steps"] == 6
    assert not (tmp_path / "run" / "checkpoints" / "step-000000002").exists()


@pytest.mark.slow
def test_a_place_for_copies_that_fails_does_not_stop_a_run(tmp_path, bucket):
    file = write_run(tmp_path / "run.yaml", checkpoint={"every": 2, "copy_to": "s3://texts/one"}, train={"steps": 5})

    def remove(run) -> None:
        if run.step == 3:
            run.saver.wait()
            for entry in bucket.list_objects_v2(Bucket="texts")["Contents"]:
                bucket.delete_object(Bucket="texts", Key=entry["Key"])
            bucket.delete_bucket(Bucket="texts")

    result, said = trained(file, remove)
    assert result["steps"] == 5
    assert any("step 4 could not be copied to s3://texts/one" in line for line in said)
    assert steps(tmp_path / "run" / "checkpoints") == [2, 4, 5]
