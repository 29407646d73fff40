"""What a run records for its report: wall time and memory in each line, its starts, and that each process lives."""

import json
import os
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from artel.errors import InputError, Interrupted, WorkError
from artel.preparing.run_mark import claim_folder
from artel.reports.run_data import read_run
from artel.reports.status import RankStatus, SignsOfLife, determine_status
from artel.training.faults.rank_status import rank_status
from artel.training.rank_file import mark_start, start_status
from artel.training.run_folder import RunFolder
from support.runs import artel, metrics, write_run


@pytest.mark.slow
def test_a_run_and_its_second_start(tmp_path):
    run = write_run(tmp_path / "run.yaml", train={"steps": 4, "schedule": "constant"}, checkpoint={"every": 2})
    for more in ([], ["train.steps=6"]):
        done = artel("train", run, *more)
        assert done.returncode == 0, done.stderr
    lines = [line for line in metrics(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert all(0.01 < line["memory_gib"] < 100 for line in lines)
    read = read_run(tmp_path / "run")
    assert (read.status.state, read.status.step, read.steps) == ("complete", 6, 6)
    assert [start.step for start in read.starts] == [0, 4]
    assert [start.chosen["train.steps"] for start in read.starts] == [4, 6]
    assert read.starts[0].chosen["train.micro_batch"] == 64
    assert read.starts[0].chosen["model"] == "gpt2, 39,296 parameters"
    assert {"artel", "python", "torch", "transformers", "device"} <= set(read.starts[0].environment)
    assert [(rank.rank, rank.state, rank.step) for rank in read.ranks] == [(0, "complete", 6)]
    again = artel("train", run, "--restart")
    assert again.returncode == 0, again.stderr
    assert [start.step for start in read_run(tmp_path / "run").starts] == [0]


@pytest.mark.slow
def test_the_folder_of_a_run_repeats_it(tmp_path):
    """By the command that the report prints."""
    run = write_run(tmp_path / "run.yaml")
    assert artel("train", run).returncode == 0
    again = artel("train", "run", "run=run-again")
    assert again.returncode == 0, again.stderr
    losses = [[line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("run", "run-again")]
    assert losses[0] == losses[1]


@pytest.fixture
def process(tmp_path):
    """What `rank_status` asks of a run, of a process on a CPU, without a training."""
    import torch

    folder = RunFolder(tmp_path / "run")
    claim_folder(folder.path)
    world = SimpleNamespace(rank=0, size=1, first=True, device=torch.device("cpu"), barrier=lambda: None)
    trackers = SimpleNamespace(doing="writing answers")
    return SimpleNamespace(folder=folder, world=world, step=7, trackers=trackers)


def written(process) -> dict:
    return json.loads((process.folder.ranks / "rank-00000.json").read_text())


@pytest.mark.parametrize(
    ("error", "state", "message"),
    [
        (None, "complete", ""),
        (Interrupted.at("", "stopped"), "stopped", ""),
        (WorkError.at("step 7", "is bad", "look"), "failed", "step 7: is bad; look"),
        (RuntimeError("odd"), "failed", "RuntimeError: odd"),
        (KeyboardInterrupt(), "stopped", ""),
    ],
)
def test_how_a_process_ends_is_written(process, error, state, message):
    raises = nullcontext() if error is None else pytest.raises(type(error))
    with raises, rank_status(process.folder, process.world) as status:
        assert written(process)["step"] == 0  # while the model is loaded
        status.follow(process)
        assert (written(process)["state"], written(process)["pid"]) == ("running", os.getpid())
        process.step = 9
        if error is not None:
            raise error
    assert (written(process)["state"], written(process)["message"], written(process)["step"]) == (state, message, 9)
    assert written(process)["doing"] == "writing answers"


@pytest.mark.parametrize(
    ("error", "then"),
    [
        (None, ("running", "")),
        (WorkError.at("text", "is gone", "look"), ("failed", "text: is gone; look")),
        (KeyboardInterrupt(), ("stopped", "")),
    ],
)
def test_a_run_that_is_started_again_is_at_work_before_its_first_step(process, error, then):
    """What an earlier start left says that it failed, and of its second rank that it lives: no process is there."""
    with pytest.raises(RuntimeError), rank_status(process.folder, process.world):
        raise RuntimeError("earlier")
    (process.folder.ranks / "rank-00001.json").write_text("{}")
    assert status_now(process) == ("failed", "RuntimeError: earlier")
    with nullcontext() if error is None else pytest.raises(type(error)), start_status(process.folder):
        assert status_now(process) == ("running", "")
        assert [file.name for file in process.folder.ranks.iterdir()] == ["rank-00000.json"]
        if error is not None:
            raise error
    assert status_now(process) == then


@pytest.mark.parametrize("earlier", [False, True])
def test_a_start_that_is_refused_leaves_what_was_there(process, earlier):
    if earlier:
        with pytest.raises(RuntimeError), rank_status(process.folder, process.world):
            raise RuntimeError("earlier")
    with pytest.raises(InputError), start_status(process.folder):
        raise InputError.at("model.from", "is nowhere", "look")
    assert process.folder.ranks.exists() == earlier
    if earlier:
        assert status_now(process) == ("failed", "RuntimeError: earlier")


def test_a_start_that_was_killed_is_dead(process):
    """Its process is gone, though it said that it would not write again for long."""
    mark_start(process.folder)
    line = written(process) | {"pid": 2**22 + 1, "time": 0.0}
    status = determine_status([RankStatus.read(line)], SignsOfLife(), complete=False, step=0, has_started=True)
    assert status.state == "dead"


def test_what_a_rank_wrote_of_its_end_stays(process):
    starting, training = start_status(process.folder), rank_status(process.folder, process.world)
    with pytest.raises(WorkError), starting, training:
        raise WorkError.at("step 7", "is bad", "look")
    assert status_now(process) == ("failed", "step 7: is bad; look")


def test_a_start_writes_nothing_over_a_run_that_is_complete(process):
    """It may be refused."""
    process.folder.result.write_text("{}")
    process.folder.model.mkdir()
    (process.folder.model / "model.safetensors").write_bytes(b"")
    with pytest.raises(WorkError), start_status(process.folder):
        raise WorkError.at("model", "is the user's", "move it")
    assert not process.folder.ranks.exists()


def status_now(process) -> tuple[str, str]:
    """The state of the run, and why it failed, as `artel watch` and the report tell it."""
    status = determine_status(
        [RankStatus.read(written(process))], SignsOfLife(), complete=False, step=0, has_started=True
    )
    return status.state, status.message


def test_files_of_ranks_that_are_no_more_are_removed(process):
    process.folder.ranks.mkdir()
    (process.folder.ranks / "rank-00001.json").write_text("{}")
    (process.folder.ranks / "notes.txt").write_text("theirs")
    with rank_status(process.folder, process.world):
        pass
    assert sorted(file.name for file in process.folder.ranks.iterdir()) == ["notes.txt", "rank-00000.json"]


@pytest.mark.parametrize("made_anew", [False, True])
def test_nothing_is_written_where_the_folder_is_gone_or_another(process, made_anew):
    with rank_status(process.folder, process.world):
        shutil.rmtree(process.folder.path)
        if made_anew:
            claim_folder(process.folder.path)
            process.folder.ranks.mkdir()
    assert not process.folder.ranks.exists() or list(process.folder.ranks.iterdir()) == []
    assert process.folder.path.exists() == made_anew
