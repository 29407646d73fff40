"""Signals at odd moments: what was asked to stop stops soon, in words, and the same command resumes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hostile.case import Family, Place, Steps, check, ends, works
from hostile.results import has_whole_model, ledger, logged_losses

family = Family("signals")

LONG: dict[str, Any] = {"train": {"steps": 300}, "checkpoint": {"every": 50, "keep": 2}}
ENDED = {130, 143, 1, 0, -2, -15, -1}
Action = tuple[Callable[[str], bool], Callable[[int], None]]


def send(number: int) -> Callable[[int], None]:
    def act(pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    return act


def when(word: str, number: int) -> Action:
    return (lambda err: word in err, send(number))


def at_file(path: Path, number: int) -> Action:
    """As soon as a file is there; looked at with each poll."""
    return (lambda err: path.exists(), send(number))


def stopped(name: str, word: str, right: set[int], place: Place) -> Steps:
    """During training, or the text before it; then the same command ends with a whole model."""
    run = place.run(LONG)
    yield ends(right, "train", run, actions=(when(word, getattr(signal, f"SIG{name}")),))
    yield works("train", run)
    check(has_whole_model(place), "no model was left")
    check(len(logged_losses(place)) >= 300, f"{len(logged_losses(place))} lines of 300")


for _name in ("INT", "TERM", "HUP", "KILL", "USR1"):
    right = {0, 1, 130, -2} if _name == "INT" else {0, 1, 130, *(-number for number in range(1, 32))}
    for _when, _word in (("text", "turning text"), ("steps", "steps of")):
        family.add(f"{_name.lower()}-during-{_when}", stopped, _name, _word, right, quick=False)


def while_preparing(name: str, word: str, place: Place) -> Steps:
    """Then the same command makes the store that an undisturbed one makes."""
    place.write("a.txt", "".join(f"a line of words, number {number}\n" for number in range(40_000)))
    keys = {"data": {"sources": [{"path": "a.txt", "document": "line"}], "validation": 0, "block": 8},
            "prepare": {"part": 200_000}}  # fmt: skip
    run = place.run(keys)
    right = {0, 1, 130, 143, *(-number for number in range(1, 32))}
    yield ends(right, "prepare", run, actions=(when(word, getattr(signal, f"SIG{name}")),))
    yield works("prepare", run)
    check(ledger(place)["kept"] == 40_000, ledger(place))
    check(not list((place / "stores").glob("*.parts*")), "unfinished work was left")


for _name in ("INT", "KILL"):
    for _when, _word in (
        ("tokenizer", "training the tokenizer"),
        ("tokens", "turning text"),
        ("store", "writing the store"),
    ):
        family.add(f"{_name.lower()}-while-preparing-{_when}", while_preparing, _name, _word)


def at_once(name: str, place: Place) -> Steps:
    """While Python still imports: no traceback of half an import."""
    run = place.run()
    begun = (lambda err: True, send(getattr(signal, f"SIG{name}")))
    yield ends({*ENDED, *(-number for number in range(1, 32))}, "train", run, actions=(begun,), fresh=True)
    yield works("train", run)
    check(has_whole_model(place), "no model was left")


for _name in ("INT", "TERM"):
    family.add(f"{_name.lower()}-at-once", at_once, _name, quick=False)


@family.slow
def int_twice(place: Place) -> Steps:
    run = place.run(LONG)
    actions = (when("steps of", signal.SIGINT), when("steps of", signal.SIGINT))
    yield ends({0, 1, 130, -2}, "train", run, actions=actions)
    yield works("train", run)
    check(has_whole_model(place), "no model was left")


@family.slow
def int_while_a_checkpoint_is_written(place: Place) -> Steps:
    run = place.run(LONG, {"checkpoint": {"every": 5, "keep": 2}})
    yield ends({0, 1, 130}, "train", run, actions=(at_file(place / "run/checkpoints/latest", signal.SIGINT),))
    yield works("train", run)
    check(has_whole_model(place), "no model was left")


@family.slow
def term_while_the_model_is_written(place: Place) -> Steps:
    run = place.run({"train": {"steps": 5}})
    yield ends({0, 1, 130, 143}, "train", run, actions=(at_file(place / "run/checkpoints/latest", signal.SIGTERM),))
    yield works("train", run)
    check(has_whole_model(place), "no model was left")


@family.slow
def stopped_and_let_go_on(place: Place) -> Steps:
    def pause(pid: int) -> None:
        send(signal.SIGSTOP)(pid)
        threading.Timer(3.0, send(signal.SIGCONT), [pid]).start()

    yield works("train", place.run(LONG), actions=((lambda err: "steps of" in err, pause),))
    check(len(logged_losses(place)) == 300, f"{len(logged_losses(place))} lines of 300")


def using(verb: tuple[str, ...], number: int, place: Place) -> Steps:
    """A verb that uses a model is interrupted: soon over, nothing left."""
    place.take("trained", ".")
    place.write("script.txt", "hello\n" * 500)
    first: Action = (lambda err: True, lambda pid: threading.Timer(1.0, send(number), [pid]).start())
    yield ends({0, 1, 2, 130, 143, -number}, *verb, actions=(first,))


for _name in ("INT", "TERM"):
    number = getattr(signal, f"SIG{_name}")
    for _verb in (("generate", "run", "--prompt", "a", "--max-new-tokens", "100000"),
                  ("evaluate", "run"), ("export", "run", "exported"), ("report", "run"), ("data", "show", "run"),
                  ("chat", "run", "--script", "script.txt")):  # fmt: skip
        family.add(f"{_name.lower()}-under-{_verb[0]}", using, _verb, number)


def reader_gone(arguments: str, place: Place) -> Steps:
    """What reads our output went away."""
    place.take("trained", ".")
    yield ends({0, 1}, *arguments.split(), prefix=("sh", "-c", '"$@" | true', "-"), unheard=True)
    pipe = ("bash", "-c", 'set -o pipefail; "$@" | head -c 1', "-")
    yield ends({0, 1, 141}, *arguments.split(), prefix=pipe, unheard=True)


for _arguments in (
    "config explain",
    "recipes ls",
    "generate run --prompt a --max-new-tokens 200",
    "report run",
    "data show run --count 100",
    "config check run.yaml",
    "--help",
    "prepare run.yaml --json",
):
    family.add(f"reader-gone-{'-'.join(_arguments.strip('-').split()[:2])}", reader_gone, _arguments)


@family.slow
def two_processes_interrupted(place: Place) -> Steps:
    run = place.run(LONG)
    yield ends(
        {0, 1, 130}, "train", run, "--nproc", 2, actions=(when("steps of", signal.SIGINT),), fresh=True, seconds=200
    )
    yield works("train", run, fresh=True)
    check(has_whole_model(place), "no model was left")


@family.slow
def launcher_killed(place: Place) -> Steps:
    run = place.run(LONG)
    yield ends({-9}, "train", run, "--nproc", 2, actions=(when("steps of", signal.SIGKILL),), fresh=True, seconds=200)
    yield works("train", run, fresh=True)
    check(has_whole_model(place), "no model was left")


@family.slow
def started_twice_at_once(place: Place) -> Steps:
    run = place.run(LONG)
    both = (
        "sh",
        "-c",
        '"$@" & a=$!; "$@"; one=$?; wait $a; two=$?; echo "$one $two"; [ $one = 0 ] || [ $two = 0 ]',
        "-",
    )
    yield ends({0}, "train", run, prefix=both)
    check(has_whole_model(place), "no model was left")
    check(len(logged_losses(place)) == 300, f"{len(logged_losses(place))} lines of 300")
