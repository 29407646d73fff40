"""benchmarks/hostile.py in short: a few quick cases of each family; and the harness finds what is wrong."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from hostile.case import Case, check, ends, refused, works
from hostile.families import FAMILIES, all_cases
from hostile.judging import judge_all, short_form


@pytest.mark.processes
def test_a_few_of_each_family():
    verdicts = judge_all(short_form(19477), 2, patience=300, seconds=300)
    assert {verdict.family for verdict in verdicts} == set(FAMILIES)
    assert not {verdict.case: (verdict.faults, verdict.commands) for verdict in verdicts if verdict.faults}


def test_there_are_150_and_more_of_every_kind():
    cases = all_cases()
    assert len(cases) > 400
    assert all(sum(case.family == family for case in cases) > 20 for family in FAMILIES)


def shell(line, command=None, **more):
    """Instead of artel."""
    return (command or ends({0}, "--help")).having(prefix=("sh", "-c", line, "-"), **more)


def another_status(place):
    yield refused("config", "check", place.run())


def wrong_in_silence(place):
    yield works("config", "check", place.run())
    check((place / "run").exists(), "there is no run")


def a_file_removed(place):
    place.write("mine.txt", "mine")
    yield shell("rm mine.txt")


def a_file_changed(place):
    place.write("mine.txt", "mine")
    yield shell("echo more >> mine.txt")


def a_traceback(place):
    yield shell("echo 'Traceback (most recent call last):' >&2; exit 1", ends({1}, "--help"))


def a_forged_line(place):
    yield shell("echo; echo 'artel: FORGED' >&2")


def an_escape(place):
    yield shell("printf '\\033[2J' >&2")


def code_that_ran(place):
    yield shell(f"touch {place.trap}")


def one_that_hangs(place):
    yield shell("sleep 100", seconds=0.5)


def one_that_is_silent(place):
    yield shell("sleep 4")


def much_memory(place):
    yield shell(
        f'exec {sys.executable} -c "import time; a = bytearray(300_000_000); time.sleep(1)"', memory=200_000_000
    )


def without_a_word(place):
    yield shell("exit 2", refused("--help"))


@pytest.fixture(scope="module")
def verdicts():
    steps = [another_status, wrong_in_silence, a_file_removed, a_file_changed, a_traceback, a_forged_line, an_escape,
             code_that_ran, one_that_hangs, one_that_is_silent, much_memory, without_a_word]  # fmt: skip
    cases = [Case("self", each.__name__, each, quick=True) for each in steps]
    return {verdict.case: verdict for verdict in judge_all(cases, 4, patience=2, seconds=60)}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "kind"),
    [("another_status", "status"), ("wrong_in_silence", "in silence"), ("a_file_removed", "lost"),
     ("a_file_changed", "lost"), ("a_traceback", "traceback"), ("a_forged_line", "let in"), ("an_escape", "let in"),
     ("code_that_ran", "let in"), ("one_that_hangs", "hang"), ("one_that_is_silent", "hang"),
     ("much_memory", "memory"), ("without_a_word", "words")],
)  # fmt: skip
def test_the_harness_finds(verdicts, name, kind):
    assert kind in {fault for fault, _ in verdicts[name].faults}
