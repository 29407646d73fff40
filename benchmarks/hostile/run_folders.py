"""Run folders: of others, of users, damaged, removed, linked; what artel did not make stays as it was."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from functools import partial
from pathlib import Path

from mutations import bomb

from hostile.case import Place, Skip, Steps, add, case, check, digest_of, ends, refused, works
from hostile.results import has_whole_model, logged_losses

NAMES = (
    "model/config.json",
    "checkpoints/step-000000001/mine",
    "tensorboard/events",
    "config.yaml",
    "metrics.jsonl",
    "result.json",
    "ledger.json",
    "rejected.jsonl",
    "samples.jsonl",
    "profile/trace.json",
    "hangs/mine",
    "micro_batches/mine",
    "store.json",
    "bad_steps.jsonl",
    "before-training.safetensors",
    "notes/mine.txt",
)


def foreign(names: tuple[str, ...], arguments: tuple[str, ...], place: Place) -> Steps:
    """A folder of a user's with names that a run's folder has: nothing of it changes, with and without --restart."""
    for name in names:
        place.write(f"run/{name}", f"mine: {name}\n")
    yield ends({0, 2}, "train", place.run(), *arguments)


add("run folders", "foreign-of-all-names", partial(foreign, NAMES, ()))
add("run folders", "foreign-of-all-names-restart", partial(foreign, NAMES, ("--restart",)))
for _name in ("model/config.json", "checkpoints/step-000000001/mine", "tensorboard/events", "config.yaml"):
    add(
        "run folders",
        f"foreign-{_name.split('/')[0].replace('.', '-')}-restart",
        partial(foreign, (_name,), ("--restart",)),
    )
add("run folders", "foreign-model", partial(foreign, ("model/config.json", "model/mine.txt"), ()))
add("run folders", "foreign-checkpoints", partial(foreign, ("checkpoints/step-000000001/mine",), ()))
add("run folders", "foreign-notes", partial(foreign, ("notes/mine.txt", "read me.txt"), ()))


@case("run folders")
def own_folder_with_notes_restart(place: Place) -> Steps:
    place.take("trained", ".")
    place.write("run/notes.txt", "mine")
    place.write("run/model/read me.txt", "mine")
    place.write("run/checkpoints/mine/weights.bin", "mine")
    yield ends({0, 2}, "train", "run.yaml", "--restart")


@case("run folders")
def own_folder_gone_on_with_notes(place: Place) -> Steps:
    place.take("trained", ".")
    place.write("run/notes.txt", "mine")
    place.write("run/checkpoints/mine/weights.bin", "mine")
    place.write("run/model/read me.txt", "mine")
    yield ends({0, 2}, "train", "run.yaml", "train.steps=6")


@case("run folders")
def here_with_the_base_model(place: Place) -> Steps:
    place.take_foreign("model")
    place.write("model/notes.txt", "mine")
    keys = {"run": ".", "model": {"config": None, "from": "./model"}, "tokenizer": {"train": None}}
    yield ends({0, 2}, "train", place.run(keys))


@case("run folders")
def here_with_the_base_model_restart(place: Place) -> Steps:
    place.take_foreign("model")
    keys = {"run": ".", "model": {"config": None, "from": "./model"}, "tokenizer": {"train": None}}
    yield ends({0, 2}, "train", place.run(keys), "--restart")


@case("run folders")
def here_with_a_run_file_called_config_yaml(place: Place) -> Steps:
    run = place.run({"run": "."}, name="config.yaml")
    yield ends({0, 2}, "train", run)


@case("run folders")
def base_model_within_the_run(place: Place) -> Steps:
    place.take_foreign("model", "run/base")
    keys = {"model": {"config": None, "from": "run/base"}, "tokenizer": {"train": None}}
    yield ends({0, 2}, "train", place.run(keys))
    yield ends({0, 2}, "train", "run.yaml", "--restart")


@case("run folders")
def text_within_the_run(place: Place) -> Steps:
    place.write("run/a.txt", "words of it\n" * 400)
    keys = {"data": {"sources": [{"path": "run/a.txt"}], "validation": 0}, "tokenizer": {"train": {"vocab": 258}}}
    yield ends({0, 2}, "train", place.run(keys), "--restart")


@case("run folders")
def behind_a_link_to_a_users_folder(place: Place) -> Steps:
    place.write("mine/model/config.json", "mine")
    (place / "run").symlink_to("mine")
    yield ends({0, 2}, "train", place.run(), "--restart")


@case("run folders")
def model_is_a_link_to_a_users_folder(place: Place) -> Steps:
    place.take("trained", ".")
    place.write("mine/config.json", "mine")
    shutil.rmtree(place / "run/model")
    (place / "run/model").symlink_to("../mine")
    yield ends({0, 1, 2}, "train", "run.yaml", "--restart")


@case("run folders")
def checkpoints_are_a_link_to_a_users_folder(place: Place) -> Steps:
    place.write("mine/step-000000001/weights", "mine")
    (place / "run").mkdir()
    (place / "run/checkpoints").symlink_to("../mine")
    yield ends({0, 2}, "train", place.run(), "--restart")


def named(run: str, place: Place) -> Steps:
    """A folder that can be none."""
    place.write("file", "mine")
    os.mkfifo(place / "pipe")
    (place / "loop").symlink_to("loop")
    yield refused("train", place.run({"run": run}))
    yield refused("train", place.run({"run": run}), "--restart")


for _name in ("file", "file/run", "pipe", "loop", "/dev/null", "s3://bucket/run"):
    add("run folders", f"is-{_name.strip('/').replace('/', '-').replace(':', '')[:20]}", partial(named, _name))


def damaged(name: str, content: bytes | None, verbs: tuple[tuple[str, ...], ...], place: Place) -> Steps:
    """A file of a finished run is damaged (None: a named pipe); each verb works, or says so."""
    place.take("trained", ".")
    path = place / "run" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path) if content is None else path.write_bytes(content)
    for verb in verbs:
        yield ends({0, 1, 2}, *verb)


_REPORT, _TRAIN, _LONGER = ("report", "run"), ("train", "run.yaml"), ("train", "run.yaml", "train.steps=6")
_GENERATE = ("generate", "run", "--prompt", "a", "--max-new-tokens", "3")
_BAD: dict[str, bytes | None] = {
    "cut": b'{"step": 1, "lo', "of-nothing": b"", "of-brackets": b"[" * 100_000, "of-an-array": b"[1, 2]\n",
    "binary": bytes(range(256)), "of-nan": b'{"step": NaN, "loss": Infinity, "steps": 1e999}\n',
    "that-forges": b'{"\\nartel: FORGED\\u001b[2J": 1, "loss": "\\nFORGED\\u001b[2J"}\n', "a-fifo": None,
}  # fmt: skip
_CHOSEN = {
    "metrics.jsonl": ("cut", "of-an-array", "of-nan", "that-forges", "a-fifo"),
    "result.json": ("cut", "of-brackets", "a-fifo"),
    "ledger.json": ("cut", "of-an-array"), "config.yaml": ("cut", "binary", "a-fifo"),
    "store.json": ("of-nothing", "a-fifo"),
}  # fmt: skip
for _file, _verbs in {"metrics.jsonl": (_REPORT, _LONGER), "result.json": (_TRAIN, _REPORT),
                      "ledger.json": (_REPORT, _TRAIN), "config.yaml": (_GENERATE, _TRAIN, _REPORT),
                      "store.json": (_LONGER, _REPORT)}.items():  # fmt: skip
    for _name in _CHOSEN[_file]:
        _content = _BAD[_name]
        add("run folders", f"{_file.split('.')[0]}-{_name}", partial(damaged, _file, _content, _verbs))
add("run folders", "metrics-torn-last-line",
    partial(damaged, "metrics.jsonl", b'{"step": 1, "loss": 5.0, "tokens": 9, "learning_rate": 0.1}\n{"step": 2, "lo',
            (_REPORT, _LONGER)))  # fmt: skip
add("run folders", "config-of-a-bomb", partial(damaged, "config.yaml", bomb().encode(), (_GENERATE, _TRAIN)))
add(
    "run folders",
    "config-with-code",
    partial(damaged, "config.yaml", b"run: !!python/object/apply:os.system ['touch ../executed']\n", (_GENERATE,)),
)
add("run folders", "lock-is-a-fifo", partial(damaged, ".lock", None, (_LONGER,)))
add("run folders", "processes-lock-is-a-fifo", partial(damaged, ".lock-processes", None, (_LONGER,)))


@case("run folders")
def config_that_names_another_folder(place: Place) -> Steps:
    place.take("trained", ".")
    place.write("victim/model/config.json", "mine")
    text = (place / "run/config.yaml").read_text()
    (place / "run/config.yaml").write_text(text.replace("run: run\n", "run: victim\n"))
    yield ends({0, 2}, "train", "run", "--restart")


def removed(what: str, place: Place) -> Steps:
    """Removed during training: noticed, and no success without a model."""
    away = (lambda err: "steps of" in err, lambda pid: shutil.rmtree(place / what, ignore_errors=True))
    run = place.run({"train": {"steps": 400}, "checkpoint": {"every": 20, "keep": 2}})
    done = yield ends({0, 1}, "train", run, actions=(away,))
    if done.status == 0:
        check(has_whole_model(place), "no model was left")
        check(len(logged_losses(place)) >= 300, f"{len(logged_losses(place))} lines of 400")


for _what in ("run", "run/checkpoints"):
    add("run folders", f"removed-while-training-{_what.replace('/', '-')}", partial(removed, _what), quick=False)


@case("run folders", quick=False)
def replaced_by_a_file_while_training(place: Place) -> Steps:
    def change(pid: int) -> None:
        (place / "run").rename(place / "moved")
        place.write("run", "mine")
        place.own(place / "moved")

    run = place.run({"train": {"steps": 400}, "checkpoint": {"every": 20, "keep": 2}})
    yield ends({1}, "train", run, actions=((lambda err: "steps of" in err, change),))


@case("run folders", quick=False)
def metrics_replaced_by_a_fifo_while_training(place: Place) -> Steps:
    def change(pid: int) -> None:
        (place / "run/metrics.jsonl").unlink(missing_ok=True)
        os.mkfifo(place / "run/metrics.jsonl")

    yield ends(
        {0, 1}, "train", place.run({"train": {"steps": 200}}), actions=((lambda err: "steps of" in err, change),)
    )


@case("run folders")
def finished_and_given_again(place: Place) -> Steps:
    place.take("trained", ".")
    before = (place / "run/model/model.safetensors").read_bytes()
    yield works("train", "run.yaml")
    check((place / "run/model/model.safetensors").read_bytes() == before, "the model is another")


@case("run folders")
def of_a_run_file_that_changed(place: Place) -> Steps:
    place.take("trained", ".")
    yield refused("train", "run.yaml", "train.learning_rate=0.5")


@case("run folders")
def report_of_a_users_folder(place: Place) -> Steps:
    place.write("mine/metrics.jsonl", "mine\n")
    yield refused("report", "mine")
    yield refused("report", ".")
    yield refused("report", "/dev")


@case("run folders")
def predictions_over_a_users_file(place: Place) -> Steps:
    place.take("trained", ".")
    place.write("mine.json", "mine")
    yield ends({0, 2}, "evaluate", "run", "--predictions", "mine.json")


@case("run folders")
def chat_saved_over_a_users_file(place: Place) -> Steps:
    place.take("adapter", ".")
    place.write("mine.jsonl", "mine")
    place.write("script.txt", "hello\n/save mine.jsonl\n/save run.yaml\n/save /dev/null/x\n/exit\n")
    yield ends({0, 2}, "chat", "run", "--script", "script.txt", "--new-tokens", 2)


@case("run folders")
def two_runs_of_one_store_and_other_folders(place: Place) -> Steps:
    yield works("train", place.run())
    yield works("train", place.run({"run": "other"}, name="other.yaml"))
    check(logged_losses(place) == logged_losses(place, "other"), "the same run has other losses")


@case("run folders")
def finished_run_moved_elsewhere(place: Place) -> Steps:
    place.take("trained", ".")
    (place / "run").rename(place / "moved")
    place.own(place / "moved")
    yield works("generate", "moved", "--prompt", "a", "--max-new-tokens", 3)
    yield ends({0, 2}, "report", "moved", "--json")


@case("run folders")
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


for _name, _arguments in {
    "copied-and-restarted": ("copy", ("--restart", "train.steps=2"), ()),
    "copied-and-finished": ("copy", ("log.every=2",), ()),
    "copied-and-named-by-its-config": ("copy/config.yaml", ("--restart",), ()),
    "copied-and-named-by-a-link": ("link", ("--restart", "train.steps=2"), ()),
    "copied-without-its-mark": ("copy", ("--restart",), (".artel-run.json",)),
}.items():
    add("run folders", _name, partial(copied, *_arguments))


@case("run folders")
def moved_and_trained_further(place: Place) -> Steps:
    place.take("trained", ".")
    yield works("train", "run.yaml")
    (place / "run").rename(place / "moved")
    place.own(place / "moved")
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
for _name, _arguments in {
    "checkpoint": ("checkpoints/step-000000004", "checkpoints/step-000000099",
                   (("train", "run.yaml", "train.steps=100"),), "is a checkpoint of another run"),
    "weights": ("model/model.safetensors", "", _OPENED, "is not what this run wrote"),
    "config": ("config.yaml", "", (("train", "run"),), "the run began with seed"),
}.items():  # fmt: skip
    add("run folders", f"{_name}-of-another-run", partial(of_another_run, *_arguments))


@case("run folders")
def config_gone_and_another_seed(place: Place) -> Steps:
    place.take("trained", ".")
    (place / "run/config.yaml").unlink()
    yield refused("train", "run.yaml", "seed=7", says=("the run began with",))


@case("run folders")
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


def damaged_cache(content: bytes, place: Place) -> Steps:
    """Told with its name, and the run goes through."""
    (place.cache / "hardware.json").write_bytes(content)
    yield works("plan", place.run(), says=("hardware.json: is damaged",))
    yield works("train", "run.yaml")


for _name, _content in {"a-list": b"[]", "half": b'{"processes": {"1"'}.items():
    add("run folders", f"hardware-of-{_name}", partial(damaged_cache, _content))


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
    add("run folders", f"report-to-a-{_kind}", partial(output, _kind, ("report", "run", "--html", "out")))
    add("run folders", f"recipe-to-a-{_kind}", partial(output, _kind, ("recipes", "cp", "demo", "out")))
add("run folders", "export-to-a-device", partial(output, "device", ("export", "run", "out")))
add("run folders", "new-to-a-device", partial(output, "device", _NEW), quick=False)
