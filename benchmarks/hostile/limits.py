"""Limits of the system: memory, sizes of files, descriptors, disks, folders, variables, standard streams."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hostile.case import Family, Place, Skip, Steps, as_another_user, check, ends, refused, works
from hostile.given import add_rows, read_table
from hostile.results import has_whole_model, ledger, logged_losses

family = Family("limits")


def mounted(folder: Path, *options: str) -> None:
    done = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise Skip("mounting needs root")


def small_disk(place: Place, name: str, size: str) -> Path:
    """A disk of so many bytes in the case's folder."""
    folder = place / name
    folder.mkdir(parents=True)
    mounted(folder, "-t", "tmpfs", "-o", f"size={size}", "none")
    place.ends.append(lambda: subprocess.run(["umount", "-l", str(folder)], check=True))
    return folder


def read_only(place: Place, name: str) -> Path:
    folder = small_disk(place, name, "1m")
    mounted(folder, "-o", "remount,ro")
    return folder


def limited(limits: dict[str, int], verb: str, right: set[int], place: Place) -> Steps:
    """Under an rlimit: works whole, or fails in words."""
    if verb == "generate":
        place.take("model")
        yield ends(right, "generate", "model", "--prompt", "a", "--max-new-tokens", 3, limits=limits)
        return
    done = yield ends(right, verb, place.run(), limits=limits)
    if done.status == 0 and verb == "train":
        check(has_whole_model(place), "no model was left")
    elif done.status == 0:
        check(ledger(place)["kept"] > 0, ledger(place))
    else:
        check(not list((place / "run").glob("model/config.json")), "half a model was left")


for _name, _row in read_table(family, "limits").items():
    family.add(_name, limited, _row["limits"], _row["verb"], set(_row["right"]), quick="slow" not in _row)


@family.slow
def no_more_processes(place: Place) -> Steps:
    """RLIMIT_NPROC does not bind root: as another user."""
    prefix = as_another_user(place, "prlimit", "--nproc=3")
    yield ends({0, 1, 2}, "prepare", place.run({"prepare": {"workers": 4}}), prefix=prefix)


# Disks


def full(size: str, keys: dict[str, Any], verb: str, right: set[int], place: Place) -> Steps:
    """A disk that fills up: words, and no half of anything under a final name."""
    disk = small_disk(place, "disk", size)
    done = yield ends(right, verb, place.run(keys))
    if done.status != 0:
        check(not list(disk.rglob("manifest.json")), "half a store was left")
        check(not list(disk.rglob("model/config.json")), "half a model was left")


for _size in ("4k", "100k"):
    family.add(f"disk-of-{_size}-for-stores", full, _size, {"data": {"store": "disk/stores"}}, "prepare", {0, 1, 2})
    family.add(f"disk-of-{_size}-for-a-run", full, _size, {"run": "disk/run"}, "train", {1, 2}, quick=False)


def in_a_folder(environment: Callable[[Place], dict[str, str | None]], right: set[int], place: Place) -> Steps:
    """The cache, the home or the temporary folder is none."""
    run = place.run({"data": {"store": ""}})
    yield ends(right, "prepare", run, environment=environment(place), fresh=True, seconds=60)


def _file(place: Place) -> str:
    return str(place.write("a-file", "mine"))


_OWN_CACHE = {"ARTEL_CACHE": None, "XDG_CACHE_HOME": None}
"""The cache is then in HOME."""
_FOLDERS: dict[str, Callable[[Place], dict[str, str | None]]] = {
    "cache-is-a-file": lambda place: {"ARTEL_CACHE": _file(place)},
    "cache-read-only": lambda place: {"ARTEL_CACHE": str(read_only(place, "disk"))},
    "cache-is-a-fifo": lambda place: {"ARTEL_CACHE": (os.mkfifo(place / "pipe"), str(place / "pipe"))[1]},
    "home-read-only": lambda place: {**_OWN_CACHE, "HOME": str(read_only(place, "disk"))},
}
family.each("{}", in_a_folder, _FOLDERS, {2})
family.add("cache-full", in_a_folder, lambda place: {"ARTEL_CACHE": str(small_disk(place, "disk", "4k"))}, {1})
family.add("temporary-folder-read-only", in_a_folder, lambda place: {"TMPDIR": str(read_only(place, "disk"))}, {0})
_BRIEFLY: dict[str, Any] = {"fresh": True, "seconds": 60}
_PREPARE, _TRAIN = works("prepare", "run.yaml"), ends({1, 2}, "train", "run.yaml")
add_rows(family, "variables", _PREPARE, run=[{"data": {"store": ""}}], **_BRIEFLY)
# What launchers set, out of all bounds: refused in words, soon.
add_rows(family, "launched", _TRAIN, name="launched-with-{}", slow=True, **_BRIEFLY)


@family.case
def folder_read_only(place: Place) -> Steps:
    read_only(place, "disk")
    yield refused("prepare", place.run({"data": {"store": "disk/stores"}}))
    yield refused("train", place.run({"run": "disk/run"}))
    yield refused("recipes", "cp", "demo", "disk/mine.yaml")


# Standard input, output and error

add_rows(family, "full_disk", name="full-disk-behind-{}", stdout="/dev/full")


def closed(redirection: str, verb: tuple[str, ...], right: set[int], place: Place) -> Steps:
    """A standard stream that is closed, or takes nothing."""
    place.run()
    prefix = ("sh", "-c", f'exec "$@" {redirection}', "-")
    done = yield ends(right, *verb, prefix=prefix, unheard="2>" in redirection)
    if done.status == 0 and verb[0] == "prepare":
        check(ledger(place)["kept"] > 0, ledger(place))


for _name, _redirection in {"input": "<&-", "output": ">&-", "error": "2>&-", "all": "<&- >&- 2>&-"}.items():
    family.add(f"closed-{_name}-prepare", closed, _redirection, ("prepare", "run.yaml"), {0})
family.add("closed-output-json", closed, ">&-", ("prepare", "run.yaml", "--json"), {0, 1})
family.add("closed-error-refused", closed, "2>/dev/full", ("prepare", "nowhere.yaml"), {2})


@family.case
def folder_that_is_gone(place: Place) -> Steps:
    yield ends(
        {1, 2}, "prepare", "run.yaml", prefix=("sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$@"', "-")
    )


@family.case
def no_network_at_all(place: Place) -> Steps:
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode:
        raise Skip("a network namespace needs root")
    yield works("train", place.run(), prefix=("unshare", "-n"), fresh=True)
    check(has_whole_model(place), "no model was left")
    check(len(logged_losses(place)) == 3, logged_losses(place))


@family.case
def clock_of_1970(place: Place) -> Steps:
    """What lies in the folder is of another age than now."""
    run = place.run()
    os.utime(place / run, (0, 0))
    place.write("a.txt", "words of it\n" * 400)
    os.utime(place / "a.txt", (2**33, 2**33))
    keys = {"data": {"sources": [{"path": "a.txt"}], "validation": 0}, "tokenizer": {"train": {"vocab": 258}}}
    yield works("prepare", place.run(keys))
    check(ledger(place)["kept"] == 1, ledger(place))


@family.case
def mask_that_lets_nobody_read(place: Place) -> Steps:
    right = {0} if os.getuid() == 0 else {1, 2}
    yield ends(right, "prepare", place.run(), prefix=("sh", "-c", 'umask 0777; exec "$@"', "-"))


def host_of_two(environment: dict[str, str], word: str, place: Place) -> Steps:
    """A host or process whose others never come says within seconds for what it waits."""
    waits = (lambda err: word in err, lambda pid: os.kill(pid, signal.SIGTERM))
    with socket.create_server(("127.0.0.1", 0)) as free:
        meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    done = yield ends({1, 130, 143, -15}, "train", place.run(), environment=meets | environment, actions=(waits,),
                      says=(word,))  # fmt: skip
    check(done.silence < 15, f"{done.silence:.0f} s without a word")


family.each("pod-of-two-{}", host_of_two, {
    "by-its-rank": ({"RANK": "0", "WORLD_SIZE": "2"}, "waits for the other"),
    "of-kubeflow": ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "waiting for the first host"),
}, quick=False)  # fmt: skip


@family.case
def pod_of_two_with_nproc(place: Place) -> Steps:
    pod = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    yield refused("train", place.run(), "--nproc", "2", environment=pod, says=("remove --nproc",))
