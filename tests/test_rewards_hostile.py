"""Reward functions that hang, die, leak, print, fork or return nonsense: each costs its limit and nothing else."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from artel.config import RewardTerm
from artel.errors import InputError
from artel.host import process_exists
from artel.rewards import Completion, RewardPool
from support.runs import ENVIRONMENT
from support.waiting import wait_until, wait_until_gone

pytestmark = pytest.mark.slow

FUNCTIONS = """
import asyncio, os, signal, sys, time
import numpy as np

leaked = []

def good(completion):
    return float(len(completion))

def hang(completion):
    while completion == "bad":
        time.sleep(1)
    return 1.0

def spin(completion):
    while completion == "bad":
        pass
    return 1.0

def leak(completion):
    leaked.append(bytearray(40 * 2**20))
    return 1.0

def too_large(completion):
    return float(len(bytearray(2**34 if completion == "bad" else 1)))

def loud(completion):
    print("x" * 100_000)
    print("y" * 100_000, file=sys.stderr)
    os.write(1, b'{"id": 1, "results": [[99.0, null]]}\\n')
    return 1.0

def raises(completion):
    if completion == "bad":
        raise ValueError("no such answer")
    return 1.0

class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError

def raises_unprintable(completion):
    if completion == "bad":
        raise Unprintable
    return 1.0

def not_a_number(completion):
    return float("nan") if completion == "bad" else 1.0

def infinite(completion):
    return np.float32("inf") if completion == "bad" else np.float32(1)

def text(completion):
    return "1.0" if completion == "bad" else True

def exits(completion):
    if completion == "bad":
        sys.exit(3)
    return 1.0

def hard_exit(completion):
    if completion == "bad":
        os._exit(3)
    return 1.0

def kills_itself(completion):
    if completion == "bad":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

def forks(completion):
    os.fork()
    return 1.0

def orphan(completion):
    if completion == "bad":
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        with open("orphan", "w") as file:
            file.write(str(child))
        os._exit(1)
    return 1.0

def closes_all(completion):
    if completion == "bad":
        os.closerange(3, 1000)
    return 1.0

def writes_to_all(completion):
    if completion == "bad":
        for number in range(3, 20):
            try:
                os.write(number, b"nonsense\\n")
            except OSError:
                pass
    return 1.0

async def hangs_softly(completion):
    if completion == "bad":
        await asyncio.sleep(1000)
    return 1.0

async def hangs_hard(completion):
    while completion == "bad":
        time.sleep(1)
    return 1.0

def batch_raises(completions, **kwargs):
    raise ValueError("a batch")

def batch_short(completions, **kwargs):
    return [1.0]

def batch_text(completions, **kwargs):
    return "many"

def batch_number(completions, **kwargs):
    return 1.0

def batch_one_nan(completions, **kwargs):
    return np.array([float("nan") if each == "bad" else 1.0 for each in completions])

def batch_hangs(completions, **kwargs):
    time.sleep(1000)
"""
TEXTS = ["fine", "fine", "bad", "fine", "fine"]


def completions(*texts):
    return [Completion("p", text, {}, len(text), False) for text in texts]


def pool_of(*names, seconds=30.0, workers=1, memory_bytes=2**28, **options):
    Path("functions.py").write_text(FUNCTIONS)
    terms = [RewardTerm.model_validate(f"functions.py:{name}") for name in names]
    return RewardPool(terms, seconds=seconds, memory_bytes=memory_bytes, workers=workers, **options)


def score(name, **options):
    """The scores of a hostile function and a good one, and what failed."""
    with pool_of(name, "good", **options) as pool:
        scores = pool.score(completions(*TEXTS))
        processes = list(pool._processes)
    assert scores.values[:, 1].tolist() == [len(text) for text in TEXTS]
    assert {failure.term for failure in scores.failures} <= {name}
    assert not any(process_exists(process._process.pid) for process in processes)
    return scores.values[:, 0].tolist(), [(failure.completion, failure.reason) for failure in scores.failures]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hang", "took more than 3 s"),
        ("spin", "took more than 3 s"),
        ("hangs_softly", "took more than 3 s"),
        ("hangs_hard", "took more than 3 s"),
        ("too_large", "took more than 256 MiB of memory"),
        ("raises", "ValueError: no such answer, in raises ("),
        ("raises_unprintable", "Unprintable: its message cannot be shown"),
        ("not_a_number", "returned nan"),
        ("infinite", "returned inf"),
        ("text", "returned str '1.0', not a number"),
        ("exits", "sys.exit was called: 3"),
        ("hard_exit", "its process exited with status 3"),
        ("kills_itself", "its process was ended by signal 9 (SIGKILL)"),
        ("orphan", "its process exited with status 1"),
        ("writes_to_all", "wrote to the socket that its process shares with artel"),
        ("batch_one_nan", "returned nan"),
    ],
)
def test_only_the_completion_that_it_fails_on_has_no_score(name, reason):
    values, failures = score(name, seconds=3.0 if reason.startswith("took more than") else 30.0)
    assert np.isnan(values[2])
    assert [value for value in values if value == value] == [1.0] * 4
    ((index, text),) = failures
    assert index == 2
    assert reason in text, text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("batch_raises", "ValueError: a batch"),
        ("batch_short", "returned 1 numbers for 5 completions"),
        ("batch_text", "returned str 'many', not a list of 5 numbers"),
        ("batch_number", "returned float 1.0, not a list of 5 numbers"),
        ("batch_hangs", "took more than 3 s"),
    ],
)
def test_a_function_that_takes_a_batch_fails_on_all_of_it(name, reason):
    values, failures = score(name, seconds=3.0 if name == "batch_hangs" else 30.0)
    assert np.isnan(values).all()
    assert [index for index, _ in failures] == [0, 1, 2, 3, 4]
    assert all(reason in text for _, text in failures)


@pytest.mark.parametrize("name", ["loud", "forks", "leak"])
def test_what_does_no_harm_is_no_failure(name):
    """A leak fills the memory of a process; the call that meets the limit is repeated in a new one."""
    assert score(name) == ([1.0] * 5, [])


def test_a_leak_costs_no_score_however_long_it_goes_on():
    with pool_of("leak", "good") as pool:
        scores = pool.score(completions(*["fine"] * 20))
    assert scores.failures == []
    assert scores.values.tolist() == [[1.0, 4.0]] * 20


def test_a_process_whose_files_are_closed_is_replaced():
    values, failures = score("closes_all")
    assert np.isnan(values[2])
    assert [index for index, _ in failures] == [2]


def test_what_a_lost_process_has_started_is_killed():
    score("orphan")
    child = int(Path("orphan").read_text())
    wait_until(lambda: not process_exists(child) or "Z" in Path(f"/proc/{child}/stat").read_text())


def test_processes_end_when_artel_is_killed():
    Path("functions.py").write_text(FUNCTIONS + "\ndef marks(completion):\n"
        "    open(f'pid-{os.getpid()}', 'w').close()\n    time.sleep(1000)\n")  # fmt: skip
    Path("main.py").write_text(
        "from artel.config import RewardTerm\nfrom artel.rewards import Completion, RewardPool\n"
        "terms = [RewardTerm.model_validate('functions.py:marks')]\n"
        "pool = RewardPool(terms, seconds=1000, memory_bytes=2**28, workers=2)\n"
        "pool.score([Completion('p', 'bad', {}, 1, False)] * 2)\n"
    )
    parent = subprocess.Popen([sys.executable, "main.py"], env=ENVIRONMENT, start_new_session=True)
    try:
        wait_until(lambda: len(list(Path().glob("pid-*"))) == 2)
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_until_gone(int(file.name.removeprefix("pid-")) for file in Path().glob("pid-*"))


def test_processes_end_with_a_pool_that_was_never_closed():
    pool = pool_of("good")
    pool.check()
    (process,) = (process._process.pid for process in pool._processes)
    assert process_exists(process)
    del pool
    gc.collect()
    assert not process_exists(process)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import os; os._exit(4)", "the rewards cannot be imported: its process exited with status 4"),
        ("raise ValueError('at import')", "functions.py: cannot be run: ValueError: at import"),
        ("def other(completion): pass", "policy.rewards.0.function.name: functions.py has no function 'good'"),
        ("def good(answer): pass", "good has no argument named completion or completions"),
        ("def good(completion, completions): pass", "arguments for one answer (completion) and for a batch"),
        ("def good(completion, /): pass", "takes completion by position only"),
        ("good = 3", "has no function 'good'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_anything_is_scored(code, message):
    with pool_of("good") as pool:
        Path("functions.py").write_text(code)
        with pytest.raises(InputError) as error:
            pool.check()
    assert message in str(error.value)
    assert all(problem.fix for problem in error.value.problems)


def test_a_module_that_never_ends_its_import_is_refused():
    with pool_of("good", start_seconds=5.0) as pool:
        Path("functions.py").write_text("while True: pass")
        with pytest.raises(InputError, match=r"policy.rewards: the rewards cannot be imported: took more than 5 s"):
            pool.check()
