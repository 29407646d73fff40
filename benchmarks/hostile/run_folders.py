"""Run folders: of others, of users, damaged, removed, linked; what artel did not make stays as it was."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

from mutations import bomb

from hostile.case import Family, Place, Skip, Steps, check, digest_of, ends, refused, works
from hostile.given import add_rows, given
from hostile.results import has_whole_model, logged_losses

family = Family("run folders")
NAMES = (
    "model/config.json", "checkpoints/step-000000001/mine", "tensorboard/events", "config.yaml", "metrics.jsonl",
    "result.json", "ledger.json", "rejected.jsonl", "samples.jsonl", "profile/trace.json", "hangs/mine",
    "micro_batches/mine", "store.json", "bad_steps.jsonl", "before-training.safetensors", "notes/mine.txt",
)  # fmt: skip
AGAIN = ends({0, 2}, "train", "run.yaml", "--restart")
TRAIN = ends({0, 2}, "train", "run.yaml")


def foreign(names: tuple[str, ...], *arguments: str) -> Steps:
    """A folder of a user's with names that a run's folder has: nothing of it changes, with and without --restart."""
    return given(TRAIN.having(arguments=("train", "run.yaml", *arguments)),
                 files={f"run/{name}": f"mine: {name}\n" for name in names})  # fmt: skip


def _linked_model(place: Place) -> None:
    shutil.rmtree(place / "run/model")
    (place / "run/model").symlink_to("../mine")


def _names_another_folder(place: Place) -> None:
    text = (place / "run/config.yaml").read_text()
    (place / "run/config.yaml").write_text(text.replace("run: run\n", "run: victim\n"))


def moved(place: Place) -> None:
    (place / "run").rename(place / "moved")
    place.own(place / "moved")


family.table(
    foreign_of_all_names=foreign(NAMES),
    foreign_of_all_names_restart=foreign(NAMES, "--restart"),
    foreign_model_restart=foreign(NAMES[:1], "--restart"),
    foreign_checkpoints_restart=foreign(NAMES[1:2], "--restart"),
    foreign_tensorboard_restart=foreign(NAMES[2:3], "--restart"),
    foreign_config_yaml_restart=foreign(NAMES[3:4], "--restart"),
    foreign_model=foreign(("model/config.json", "model/mine.txt")),
    foreign_checkpoints=foreign(NAMES[1:2]),
    foreign_notes=foreign(("notes/mine.txt", "read me.txt")),
)
add_rows(family, "with_files_of_a_user", AGAIN)
family.table(
    here_with_a_run_file_called_config_yaml=given(
        ends({0, 2}, "train", "config.yaml"), make=lambda place: place.run({"run": "."}, name="config.yaml"), run=None
    ),
    model_is_a_link_to_a_users_folder=given(
        ends({0, 1, 2}, "train", "run.yaml", "--restart"), take="trained", files={"mine/config.json": "mine"},
        make=_linked_model,
    ),
    config_that_names_another_folder=given(
        ends({0, 2}, "train", "run", "--restart"), take="trained", files={"victim/model/config.json": "mine"},
        make=_names_another_folder,
    ),
    finished_run_moved_elsewhere=given(
        works("generate", "moved", "--prompt", "a", "--max-new-tokens", 3),
        ends({0, 2}, "report", "moved", "--json"), take="trained", make=moved,
    ),
    config_gone_and_another_seed=given(
        refused("train", "run.yaml", "seed=7", says=("the run began with",)), take="trained",
        make=lambda place: (place / "run/config.yaml").unlink(),
    ),
)  # fmt: skip


add_rows(
    family, "named", refused("train", "run.yaml"), refused("train", "run.yaml", "--restart"), name="is-{}",
    files={"file": "mine"}, fifos=["pipe"], links={"loop": "loop"},
)  # fmt: skip

# A file of a finished run is damaged; each verb works, or says so.
_REPORT, _TRAIN, _LONGER, _GENERATE = (
    ends({0, 1, 2}, *words.split())
    for words in ("report run", "train run.yaml", "train run.yaml train.steps=6",
                  "generate run --prompt a --max-new-tokens 3")
)  # fmt: skip
for _file, _verbs in {
    "metrics.jsonl": (_REPORT, _LONGER), "result.json": (_TRAIN, _REPORT), "ledger.json": (_REPORT, _TRAIN),
    "config.yaml": (_GENERATE, _TRAIN, _REPORT), "store.json": (_LONGER, _REPORT),
}.items():  # fmt: skip
    _name = _file.split(".")[0]
    add_rows(family, _name, *_verbs, name=f"{_name}-{{}}", content=f"run/{_file}", take="trained")
family.table(
    config_of_a_bomb=given(_GENERATE, _TRAIN, take="trained", files={"run/config.yaml": bomb()}),
    lock_is_a_fifo=given(_LONGER, take="trained", fifos=["run/.lock"]),
    processes_lock_is_a_fifo=given(_LONGER, take="trained", fifos=["run/.lock-processes"]),
)


def removed(what: str, place: Place) -> Steps:
    """Removed during training: noticed, and no success without a model."""
    away = (lambda err: "steps of" in err, lambda pid: shutil.rmtree(place / what, ignore_errors=True))
    run = place.run({"train": {"steps": 400}, "checkpoint": {"every": 20, "keep": 2}})
    done = yield ends({0, 1}, "train", run, actions=(away,))
    if done.status == 0:
        check(has_whole_model(place), "no model was left")
        check(len(logged_losses(place)) >= 300, f"{len(logged_losses(place))} lines of 400")


family.each("removed-while-training-{}", removed, {"run": "run", "run-checkpoints": "run/checkpoints"}, quick=False)


@family.slow
def replaced_by_a_file_while_training(place: Place) -> Steps:
    def change(pid: int) -> None:
        moved(place)
        place.write("run", "mine")

    run = place.run({"train": {"steps": 400}, "checkpoint": {"every": 20, "keep": 2}})
    yield ends({1}, "train", run, actions=((lambda err: "steps of" in err, change),))


@family.slow
def metrics_replaced_by_a_fifo_while_training(place: Place) -> Steps:
    def change(pid: int) -> None:
        (place / "run/metrics.jsonl").unlink(missing_ok=True)
        os.mkfifo(place / "run/metrics.jsonl")

    actions = ((lambda err: "steps of" in err, change),)
    yield ends({0, 1}, "train", place.run({"train": {"steps": 200}}), actions=actions)


@family.case
def finished_and_given_again(place: Place) -> Steps:
    place.take("trained", ".")
    before = (place / "run/model/model.safetensors").read_bytes()
    yield works("train", "run.yaml")
    check((place / "run/model/model.safetensors").read_bytes() == before, "the model is another")


@family.case
def two_runs_of_one_store_and_other_folders(place: Place) -> Steps:
    yield works("train", place.run())
    yield works("train", place.run({"run": "other"}, name="other.yaml"))
    check(logged_losses(place) == logged_losses(place, "other"), "the same run has other losses")


@family.case
def export_within_itself(place: Place) -> Steps:
    place.take("trained", ".")
    for target in ("run", "run/model", "run/model/deeper", "run.yaml/x"):
        before = sorted(map(str, Path(place / "run").rglob("*")))
        done = yield ends({0, 2}, "export", "run", target)
        if done.status == 2:
            check(sorted(map(str, Path(place / "run").rglob("*"))) == before, f"something was written to {target}")


def copied(name: str, words: tuple[str, ...], left_out: tuple[str, ...], place: Place) -> Steps:
    """A copy is trained by a name of it: it says that it is a copy, and the original does not change."""
    place.take("trained", ".")
    yield works("train", "run.yaml")  # the run's mark now names this folder
    before = files_of(place / "run")
    shutil.copytree(place / "run", place / "copy", symlinks=True, ignore=lambda _, names: {*left_out} & {*names})
    place.own(place / "copy")
    (place / "link").symlink_to("copy")
    yield works("train", name, *words, says=("is a copy of",))
    check(files_of(place / "run") == before, "the original has changed")
    check(has_whole_model(place, "copy"), "the copy has no model")


def files_of(folder: Path) -> dict[str, str]:
    """Digests of a run's files, without locks."""
    paths = (path for path in folder.rglob("*") if not path.name.startswith(".lock"))
    return {str(path): digest_of(path) for path in paths if path.is_symlink() or not path.is_dir()}


_COPIES = {
    "restarted": ("copy", ("--restart", "train.steps=2"), ()),
    "finished": ("copy", ("log.every=2",), ()),
    "named-by-its-config": ("copy/config.yaml", ("--restart",), ()),
    "named-by-a-link": ("link", ("--restart", "train.steps=2"), ()),
}
family.each("copied-and-{}", copied, _COPIES)
family.add("copied-without-its-mark", copied, "copy", ("--restart",), (".artel-run.json",))


@family.case
def moved_and_trained_further(place: Place) -> Steps:
    place.take("trained", ".")
    yield works("train", "run.yaml")
    moved(place)
    yield works("train", "moved", says=("moved is complete",))
    check(not (place / "run").exists(), "a run began under the old name")


def of_another_run(name: str, to: str, commands: tuple[tuple[str, ...], ...], says: str, place: Place) -> Steps:
    """A file or folder of a run of the same shape and another seed in this one's place."""
    place.take("trained", ".")
    yield works("train", "run.yaml", "run=other", "seed=7")
    copy = shutil.copytree if (place / "other" / name).is_dir() else shutil.copyfile
    copy(place / "other" / name, place / "run" / (to or name))
    for command in commands:
        yield refused(*command, says=(says,))


_OPENED = (("train", "run"), ("generate", "run", "--prompt", "a"), ("export", "run", "exported"))
family.each("{}-of-another-run", of_another_run, {
    "checkpoint": ("checkpoints/step-000000004", "checkpoints/step-000000099",
                   (("train", "run.yaml", "train.steps=100"),), "is a checkpoint of another run"),
    "weights": ("model/model.safetensors", "", _OPENED, "was not written by this run"),
    "config": ("config.yaml", "", (("train", "run"),), "the run began with seed"),
})  # fmt: skip


@family.case
def weights_gone(place: Place) -> Steps:
    """They are written again from the last checkpoint, and without one the run is refused."""
    place.take("trained", ".")
    weights = place / "run/model/model.safetensors"
    before = digest_of(weights)
    weights.unlink()
    yield works("train", "run.yaml")
    check(digest_of(weights) == before, "the weights are others")
    weights.unlink()
    shutil.rmtree(place / "run/checkpoints")
    yield refused("train", "run", says=("lacks the weights of this run",))


def damaged_cache(content: bytes) -> Steps:
    """Told with its name, and the run goes through."""
    told = works("plan", "run.yaml", says=("hardware.json: is damaged",))
    return given(
        told, works("train", "run.yaml"), make=lambda place: (place.cache / "hardware.json").write_bytes(content)
    )


family.table(hardware_of_a_list=damaged_cache(b"[]"), hardware_of_half=damaged_cache(b'{"processes": {"1"'))


def output(kind: str, arguments: tuple[str, ...], place: Place) -> Steps:
    """A device, a FIFO, a link or a folder as output is written to as it is, or refused; it is never replaced."""
    place.take("trained", ".")
    out = place / "out"
    if kind == "device":  # as /dev/null, but of this case
        if os.getuid() != 0:
            raise Skip("making a device needs root")
        os.mknod(out, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    elif kind == "fifo":
        os.mkfifo(out)
        reader = subprocess.Popen(["cat", out], stdout=subprocess.DEVNULL)
        place.ends += [reader.wait, reader.kill]
    elif kind == "link":
        place.write("target", "old")
        place.changing.add("target")
        out.symlink_to("target")
    else:
        place.write("out/mine.txt", "mine")
    before = digest_of(out), out.lstat().st_ino
    yield ends({0, 2}, *arguments)
    check((digest_of(out), out.lstat().st_ino) == before, "it was replaced")


_NEW = ("new", "out", "--force", "--text", "run.yaml", "--learn", "write", "--from", "scratch", "--time", "1min")
for _kind in ("device", "fifo", "link", "folder"):
    family.add(f"report-to-a-{_kind}", output, _kind, ("report", "run", "--html", "out"))
    family.add(f"recipe-to-a-{_kind}", output, _kind, ("recipes", "cp", "demo", "out"))
family.add("export-to-a-device", output, "device", ("export", "run", "out"))
family.add("new-to-a-device", output, "device", _NEW, quick=False)
