"""Signals at odd moments: what was asked to stop stops soon, in words, and the same command resumes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from hostile.case import Family, Place, Steps, check, ends, merged, works
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


def at_latest(number: int) -> Callable[[Place], Action]:
    """As soon as a checkpoint is `latest`; looked at with each poll."""
    return lambda place: (lambda err: (place / "run/checkpoints/latest").exists(), send(number))


def stopped(
    right: set[int], acts: list[Any], place: Place, keys: dict[str, Any] = LONG, logged: int = 0, **more: Any
) -> Steps:
    """Ended during training, or the text before it; then the same command ends with a whole model.

    `acts`: (condition, act) as a Command has them, or what gives one for the place. `logged`: losses at the least.
    """
    run, words = place.run(keys), ("--nproc", 2) if more else ()
    actions = tuple(act(place) if callable(act) else act for act in acts)
    yield ends(right, "train", run, *words, actions=actions, **more)
    yield works("train", run, fresh=bool(more))
    check(has_whole_model(place), "no model was left")
    check(len(logged_losses(place)) >= logged, f"{len(logged_losses(place))} lines of {logged}")


for _name in ("INT", "TERM", "HUP", "KILL", "USR1"):
    right = {0, 1, 130, -2} if _name == "INT" else {0, 1, 130, *(-number for number in range(1, 32))}
    for _when, _word in (("text", "turning text"), ("steps", "steps of")):
        acts = [when(_word, getattr(signal, f"SIG{_name}"))]
        family.add(f"{_name.lower()}-during-{_when}", partial(stopped, right, acts, logged=300), quick=False)
_INT, _KILL = when("steps of", signal.SIGINT), when("steps of", signal.SIGKILL)
_OFTEN, _SHORT = merged(LONG, {"checkpoint": {"every": 5, "keep": 2}}), {"train": {"steps": 5}}
for _name, _stop in {
    "int-twice": partial(stopped, {0, 1, 130, -2}, [_INT, _INT]),
    "int-while-a-checkpoint-is-written": partial(stopped, {0, 1, 130}, [at_latest(signal.SIGINT)], keys=_OFTEN),
    "term-while-the-model-is-written": partial(stopped, {0, 1, 130, 143}, [at_latest(signal.SIGTERM)], keys=_SHORT),
    "two-processes-interrupted": partial(stopped, {0, 1, 130}, [_INT], fresh=True, seconds=200),
    "launcher-killed": partial(stopped, {-9}, [_KILL], fresh=True, seconds=200),
}.items():
    family.add(_name, _stop, quick=False)


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
