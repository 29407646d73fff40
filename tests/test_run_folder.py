"""In a run's folder artel writes over and removes what is its own alone: each file of the folder before and after."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import artel as api
from artel.config import load_run
from artel.errors import WorkError
from artel.parallel import join_world
from artel.preparing import prepare
from artel.preparing.run_mark import MARK, NAMES
from artel.training.loop import Run, train
from artel.training.run_folder import RunFolder
from support.runs import write_run

# What somebody has in a folder: a base model, curves of another program, notes.
THEIRS = {
    "model/model.safetensors": b"theirs",
    "checkpoints/step-000000001/x": b"theirs",
    "tensorboard/events": b"x",
    "metrics.jsonl": b"{}\n",
    "config.yaml": b"run: x\n",
    "notes.txt": b"notes",
    ".lock": b"another's",
}


def contents(folder: Path) -> dict[str, bytes | str]:
    """Every file and link of a folder, by name: what it holds, or where it points."""
    results: dict[str, bytes | str] = {}
    for root, folders, files in os.walk(folder):
        for name in [*files, *(each for each in folders if Path(root, each).is_symlink())]:
            path = Path(root, name)
            link = path.is_symlink()
            results[str(path.relative_to(folder))] = str(path.readlink()) if link else path.read_bytes()
    return results


def lay(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.fixture
def artel(tmp_path, monkeypatch, command):
    """The command in this process, in an empty working folder: (exit status, what it said)."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("ARTEL_CACHE", str(tmp_path / "cache"))

    def run(*arguments: str) -> tuple[int, str]:
        status, _, said = command(*arguments)
        assert "Traceback" not in said
        return status, said

    return run


def says(answered: tuple[int, str], status: int, text: str = "") -> None:
    """Fail unless the command ended with this status and said this."""
    assert (answered[0], text in answered[1]) == (status, True), answered


def run_file(name: str = "run.yaml", **more) -> Path:
    """A run of six steps whose stores lie beside the working folder."""
    return write_run(Path(name), **{"data": {"store": "../stores"}, **more})


def test_a_folder_with_what_artel_did_not_make_is_refused_and_stays(artel):
    """`run: .`, the run file itself named config.yaml."""
    lay(Path(), THEIRS)
    run_file("config.yaml", run=".")
    before = contents(Path())
    for words in (["train"], ["train", "--restart"], ["prepare"]):
        status, said = artel(words[0], "config.yaml", *words[1:])
        assert status == 2
        for name in ("model", "checkpoints", "tensorboard", "metrics.jsonl", "config.yaml", ".lock"):
            assert f"artel: {name}: exists but is not from artel" in said
        assert "choose another folder (run=…)" in said
        assert contents(Path()) == before


@pytest.mark.slow
def test_what_lies_beside_a_run_stays(artel):
    """Trained, finished and begun anew in a folder with files of somebody's own, and a link to them."""
    file = run_file(run=".")
    lay(Path(), {"notes.txt": b"notes", "models/base/model.safetensors": b"theirs", "step-1/x": b"x"})
    Path("link").symlink_to("models")
    Path("profile").mkdir()  # empty: nothing is lost
    theirs = contents(Path())
    for words in ([], ["--restart"], []):
        status, said = artel("train", file, *words)
        assert status == 0, said
        lay(Path("checkpoints"), {"notes.txt": b"beside checkpoints", "step-of-mine/x": b"x"})
        theirs |= {"checkpoints/notes.txt": b"beside checkpoints", "checkpoints/step-of-mine/x": b"x"}
        after = contents(Path())
        assert {name: after.get(name) for name in theirs} == theirs
        own = {name.split("/")[0] for name in after.keys() - theirs.keys()}
        assert own <= {*NAMES, MARK}
        mark = json.loads(Path(MARK).read_bytes())
        assert (set(mark["names"]), len(mark["id"])) == (set(NAMES), 16)
    assert "is complete" in said


@pytest.mark.slow
def test_a_user_s_file_in_the_model_of_a_run_is_never_removed(artel):
    """--restart and a longer run, which would replace the model, refuse; one that comes meanwhile is kept beside it."""
    file = run_file()
    note = Path("run/model/notes.txt")
    RunFolder(Path("run")).claim()  # as a run that has no model yet
    lay(Path("run"), {"model/notes.txt": b"mine"})
    says(artel("train", file, "--restart"), 2, "artel: run/model/notes.txt: is in the run's model")
    assert note.read_text() == "mine"
    shutil.rmtree("run")
    assert artel("train", file)[0] == 0
    note.write_text("mine")
    before = contents(Path())
    for words in (["--restart"], ["train.steps=9"]):
        told = "artel: run/model/notes.txt: is in the run's model, which is about to be removed"
        says(artel("train", file, *words), 2, told)
        assert {name: content for name, content in contents(Path()).items() if "lock" not in name} == {
            name: content for name, content in before.items() if "lock" not in name
        }
    note.unlink()
    Path("run/result.json").unlink()  # as if the run had been killed while it wrote its model
    note.write_text("mine")
    assert artel("train", file)[0] == 0
    assert note.read_text() == "mine"
    assert Path("run/result.json").is_file()


def test_every_name_of_a_run_s_folder_is_on_the_list():
    folder = RunFolder(Path("x"))
    paths = [getattr(folder, name) for name in dir(RunFolder) if isinstance(getattr(RunFolder, name), property)]
    names = {path.name for path in paths if isinstance(path, Path)}
    assert len(names) > 12
    assert names <= set(NAMES)


@pytest.mark.slow
def test_runs_that_lost_their_mark_go_on(artel):
    file = run_file(run="run")
    assert artel("train", file)[0] == 0
    Path("run", MARK).unlink()
    status, said = artel("train", file)
    assert (status, "is complete" in said) == (0, True)
    assert Path("run", MARK).is_file()

    # Not finished, and with a model that it therefore cannot have written.
    for name in ("result.json", MARK):
        Path("run", name).unlink()
    before = contents(Path())
    status, said = artel("train", file)
    assert (status, said.count("is not from artel"), f"artel: {Path('run/model')}:" in said) == (2, 1, True)
    assert contents(Path()) == before
    shutil.rmtree("run/model")
    shutil.rmtree("run/checkpoints")  # its ledger alone tells, then
    assert artel("train", file)[0] == 0
    assert artel("train", file, "--restart")[0] == 0


@pytest.mark.slow
def test_checkpoints_on_another_disk(artel, tmp_path):
    """A link is followed; begun anew, only checkpoints go from where it points, and the link stays."""
    there = tmp_path / "there"
    there.mkdir()
    Path("run").mkdir()
    Path("run", "checkpoints").symlink_to(there)
    file = run_file(run="run")
    assert artel("train", file)[0] == 0
    lay(there, {"mine.txt": b"mine"})
    says(artel("train", file, "--restart", "train.steps=3"), 0)
    assert Path("run", "checkpoints").readlink() == there
    steps = sorted(name.split("/")[0] for name in contents(there))
    assert (set(steps), contents(there)["mine.txt"]) == ({"step-000000003", "latest", "best", "mine.txt"}, b"mine")

    there.joinpath("latest").unlink()
    lay(there, {"latest/x": b"x"})
    before = contents(tmp_path / "work") | contents(there)
    says(artel("train", file), 2, "latest: is a folder or a file, but artel keeps a link")
    assert contents(tmp_path / "work") | contents(there) == before


@pytest.mark.parametrize("place", ["broken link", "file", "folder"])
def test_what_is_named_as_output_is_not_written_over(artel, place):
    taken = Path("taken")
    if place == "broken link":
        taken.symlink_to("nowhere")
    elif place == "folder":
        lay(Path(), {"taken/model.safetensors": b"theirs", "taken/demo.yaml": b"theirs"})
    else:
        lay(Path(), {"taken": b"theirs"})
    before = contents(Path())
    tokens = ["data", "import", "x.bin", "taken", "--tokenizer", "gpt2"]
    judged = ["evaluate", "runs/x", "--data", "x.txt", "--predictions", "taken"]
    for words in (["recipes", "cp", "demo", "taken"], ["export", "runs/x", "taken"], tokens, judged):
        says(artel(*words), 2, "exists already")
        assert contents(Path()) == before


@pytest.mark.slow
def test_a_damaged_result_or_mark_is_told(artel):
    file = run_file(run="run")
    assert artel("train", file)[0] == 0
    for content in (b'{"run"', b"[]", b"\xff"):
        Path("run", "result.json").write_bytes(content)
        says(artel("train", file), 2, f"artel: {Path('run/result.json')}: is damaged")
    Path("run", "result.json").unlink()  # as the message says
    assert artel("train", file)[0] == 0
    of_other_types = (b'{"id": 3, "names": []}', b'{"id": "a", "names": [], "model": 5}')
    for content in (b"", b"{}", b"[" * 100000, b"[]", *of_other_types):
        Path("run", MARK).write_bytes(content)
        says(artel("train", file), 2, f"{MARK}: is not the mark that artel wrote")


@pytest.mark.parametrize("what", ["removed", "moved", "made anew"])
def test_a_folder_that_is_gone_while_a_run_is_at_work_ends_it(artel, what):
    """At the next line: nothing is made anew in its place, or written into another run's."""
    config = load_run(str(run_file(run="run", checkpoint={"every": 1})), {})
    prepared, folder = prepare(config), Path("run")

    def take_away(run) -> None:
        if run.step == 3:
            run.saver.wait()
            folder.rename("moved")
            if what != "moved":
                shutil.rmtree("moved")
            if what == "made anew":
                RunFolder(folder).claim()

    with join_world(1) as processes, pytest.raises(WorkError, match="was removed or moved") as raised:
        train(config, prepared, processes, callbacks=[take_away])
    assert raised.value.exit_code == 1
    assert (set(contents(folder)) if folder.exists() else None) == ({MARK} if what == "made anew" else None)


def test_a_host_that_did_not_see_the_mark_leaves_looking_to_the_others(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    Run.check_folder(SimpleNamespace(folder=folder, folder_identity=""))
    Run.check_folder(SimpleNamespace(folder=folder, folder_identity=folder.identity()))
    with pytest.raises(WorkError, match="was removed or moved"):
        Run.check_folder(SimpleNamespace(folder=folder, folder_identity="another"))


def state_of(folder: Path) -> dict[str, bytes | str]:
    """Files of a run, without what changes as it is opened."""
    return {name: content for name, content in contents(folder).items() if not name.startswith((".lock", "ranks/"))}


@pytest.mark.slow
def test_the_folder_that_is_named_is_the_run(artel, tmp_path):
    """Copied and moved folders: relative and absolute paths, links, their config.yaml, Python, with --restart."""
    assert artel("train", run_file(run="runs/a"))[0] == 0
    before = state_of(Path("runs/a"))
    copies = [Path(f"runs/{name}") for name in "bcdefg"]
    for copy in copies[1:]:
        shutil.copytree("runs/a", copy, symlinks=True)
    shutil.copytree("runs/a", "runs/b", symlinks=True, ignore=lambda _, names: {*names} & {MARK})  # cp -r runs/a/*
    Path("link").symlink_to("runs/e")
    outside = Path.cwd()
    named = [("runs/b", "--restart"), (outside / "runs/c",), ("runs/d/config.yaml",), ("link", "--restart")]
    for (name, *words), copy in zip(named, copies, strict=False):
        original = "runs/a" if copy.name == "b" else outside / "runs/a"
        told = f"{name if name != 'runs/d/config.yaml' else copy} is a copy of {original}; from now on"
        says(artel("train", name, *words, "train.steps=2" if words else "log.every=2"), 0, told)
        result = json.loads((copy / "result.json").read_bytes())
        assert result["steps"] == (2 if words else 6)
        status, said = artel("train", name, "log.every=3")
        assert (status, "is a copy of" in said, "is complete" in said) == (0, False, True), said
    api.train("runs/f", {"train.steps": 2}, restart=True)
    assert api.Run("runs/f").result["steps"] == 2
    assert load_run("runs/g").run == "runs/g"
    assert len({RunFolder(folder).identity() for folder in [Path("runs/a"), *copies]}) == len(copies)  # g is not begun
    mark = Path("runs/g", MARK).read_bytes()
    for words in (["train.learning_rate=0.5"], ["data.max_bad=2"], ["model.from=nowhere", "--restart"]):
        status, said = artel("train", "runs/g", *words)
        assert (status, "runs/g is a copy" in said, Path("runs/g", MARK).read_bytes() == mark) == (2, False, True), said
    assert state_of(Path("runs/a")) == before

    Path("runs/a").rename("moved")  # the same run in another place: not a copy
    status, said = artel("train", "moved")
    assert (status, "moved is complete" in said, "moved is a copy" in said) == (0, True, False), said
    assert not Path("runs/a").exists()


@pytest.mark.slow
def test_checkpoints_model_and_config_of_another_run_are_refused(artel):
    """Exchanged between two runs of the same shape; and those of a run that was begun anew."""
    file = run_file(run="a")
    assert artel("train", file)[0] == 0
    assert artel("train", file, "run=b", "seed=7")[0] == 0
    shutil.copytree("a", "saved", symlinks=True)
    checkpoint, other = (next(Path(name, "checkpoints").glob("step-*")) for name in "ab")

    shutil.copytree(other, checkpoint.with_name("step-000000099"))
    says(artel("train", file, "train.steps=100"), 2, "step-000000099: is a checkpoint of another run")
    shutil.rmtree(checkpoint.with_name("step-000000099"))

    shutil.copyfile("b/model/model.safetensors", "a/model/model.safetensors")
    for words in (["train", "a"], ["generate", "a", "--prompt", "x"], ["export", "a", "out"]):
        says(artel(*words), 2, "a/model/model.safetensors: was not written by this run")
    Path("a/model/model.safetensors").unlink()  # the weights are gone: the run is not complete, and writes them again
    status, said = artel("train", file)
    assert (status, "is complete" in said) == (0, False), said
    assert contents(Path("a/model")) == contents(Path("saved/model"))

    Path("a/config.yaml").unlink()
    for words in (["seed=7"], ["train.learning_rate=0.5"], ["seed=7", "train.learning_rate=0.5"]):
        status, said = artel("train", file, *words)
        counts = (said.count("the run began with"), said.count("change it back"))
        assert (status, counts) == (2, (len(words), 1)), said
    shutil.copyfile("b/config.yaml", "a/config.yaml")
    says(artel("train", "a"), 2, "the run began with seed: 42 -> 7")

    shutil.copyfile("saved/config.yaml", "a/config.yaml")
    shutil.rmtree("a/checkpoints")
    Path("a/model/model.safetensors").unlink()
    says(artel("train", "a"), 2, "a/model: lacks the weights of this run")

    assert artel("train", "a", "--restart")[0] == 0
    shutil.copytree(Path("saved/checkpoints", checkpoint.name), checkpoint, dirs_exist_ok=True)
    says(artel("train", "a"), 2, f"{checkpoint}: is a checkpoint of another run")


@pytest.mark.slow
def test_a_run_that_never_trained_and_one_that_is_unfinished_say_so(artel):
    file = run_file(run="run", checkpoint={"every": 2})
    generate, push = ["generate", "run", "--prompt", "x"], ["push", "run", "me/x", "--dry-run", "pushed"]
    assert artel("prepare", file)[0] == 0
    for words in (generate, push, ["export", "run", "out"]):
        says(artel(*words), 2, "run: has not been trained yet: there is no checkpoint")
    says(artel("report", "run"), 2, "artel: run: has not been trained yet: no step is logged\n    train it:")

    assert artel("train", file)[0] == 0
    Path("run/result.json").unlink()  # as if it had been stopped after step 4
    shutil.rmtree("run/model")
    shutil.rmtree("run/checkpoints/step-000000006")
    for name in ("latest", "best"):
        Path("run/checkpoints", name).unlink()
        Path("run/checkpoints", name).symlink_to("step-000000004")
    for words in (generate, ["export", "run", "out"]):
        says(artel(*words), 0, "run is not complete: using its newest checkpoint, step 4")
    says(artel(*push), 2, "the run is not complete")
    says(artel("report", "run"), 0, "at step 6; artel train run resumes")

    shutil.rmtree("run/checkpoints")
    for words in (generate, ["export", "run", "other"]):
        says(artel(*words), 2, "artel: run: has not been trained yet: there is no checkpoint")
