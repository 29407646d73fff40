"""Batches made ahead in a thread: in order, a few at a time, errors told, ended cleanly; and garbage held."""

import gc
import subprocess
import sys
import threading
import weakref
from contextlib import closing

import pytest
import torch

from artel.objectives import Batch
from artel.training.prefetch import BatchThread, gc_between_steps
from support.runs import ENVIRONMENT
from support.waiting import LIMIT, wait_until

CPU = torch.device("cpu")


def batches(step):
    return [Batch({"input_ids": torch.full((2, 4), step)}, 8, 8)]


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "batches made ahead"]


def test_steps_come_in_order_and_no_more_than_depth_are_made_ahead():
    made = []

    def make(step):
        made.append(step)
        return batches(step)

    with closing(BatchThread(make, 3, 20, CPU, depth=2)) as ahead:
        wait_until(lambda: made == [3, 4])
        for step in range(3, 20):
            (batch,) = ahead.take(step)
            assert batch.tensors["input_ids"][0, 0] == step
            assert len(made) <= step - 3 + 1 + 2
    assert made == list(range(3, 20))
    assert not threads()


def test_they_are_made_while_the_step_runs():
    made, go_on = [], threading.Event()

    def make(step):
        if step == 3:
            assert go_on.wait(LIMIT)
        made.append(step)
        return batches(step)

    with closing(BatchThread(make, 0, 4, CPU)) as ahead:
        ahead.take(0)
        wait_until(lambda: made == [0, 1, 2])  # there was no place for 2 before 0 was taken
        for step in (1, 2):  # they wait for nothing that is still being made
            assert ahead.take(step)[0].tensors["input_ids"][0, 0] == step
        assert made == [0, 1, 2]
        go_on.set()
        ahead.take(3)


def test_only_the_next_step_can_be_taken():
    with closing(BatchThread(batches, 0, 2, CPU)) as ahead:
        with pytest.raises(ValueError, match="0 comes next"):
            ahead.take(1)
        ahead.take(0)
        ahead.take(1)
        with pytest.raises(ValueError, match="before 2"):
            ahead.take(2)


def test_an_error_is_raised_where_its_step_is_taken_with_where_it_came_from():
    def make(step):
        if step == 2:
            raise OSError("the disk is gone")
        return batches(step)

    ahead = BatchThread(make, 0, 5, CPU)
    ahead.take(0)
    ahead.take(1)
    with pytest.raises(OSError, match="the disk is gone") as error:
        ahead.take(2)
    assert "make" in [entry.name for entry in error.traceback]
    assert not threads()
    with pytest.raises(ValueError, match="closed"):
        ahead.take(2)


def test_closed_interrupted_or_forgotten_the_thread_ends():
    ahead = BatchThread(batches, 0, 10**9, CPU)
    ahead.take(0)
    ahead.close()
    assert not threads()
    ahead.close()  # once more is nothing

    def interrupted():
        with closing(BatchThread(batches, 0, 10**9, CPU)) as ahead:
            ahead.take(0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not threads()
    ahead = BatchThread(batches, 0, 10**9, CPU)
    reference = weakref.ref(ahead)
    del ahead
    gc.collect()
    assert reference() is None
    assert not threads()


FORGOTTEN = """
import sys, time, torch
from artel.objectives import Batch
from artel.training.prefetch import BatchThread
def make(step):
    time.sleep(0.01)
    return [Batch({"input_ids": torch.randn(64, 64) @ torch.randn(64, 64)}, 1, 1)]
ahead = BatchThread(make, 0, 10**9, torch.device("cpu"))
ahead.take(0)
%s
"""


def run_python(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=ENVIRONMENT)


INTERRUPTED = "import _thread; _thread.interrupt_main(); time.sleep(9)"


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError", 1), (INTERRUPTED, -2)])
def test_never_closed_python_ends_all_the_same(ending, code):
    done = run_python(FORGOTTEN % ending)
    assert done.returncode == code, done.stderr
    assert "terminate called" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_reaches_who_waits_for_a_batch():
    waits = "import _thread, threading; threading.Timer(0.5, _thread.interrupt_main).start()\nahead.take(1)"
    assert "KeyboardInterrupt" in run_python(FORGOTTEN.replace("0.01", "2.0 if step else 0") % waits).stderr


class Cycle:
    def __init__(self):
        self.me = self


def test_garbage_is_collected_when_told_and_not_before():
    gc.unfreeze()  # what conftest.py froze
    with gc_between_steps(every=10) as collect:
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
        garbage = weakref.ref(Cycle())
        for step in range(1, 10):
            collect(step)
        assert garbage() is not None
        collect(10)
        assert garbage() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_what_was_before_is_again_afterwards():
    gc.disable()
    gc.freeze()
    try:
        with pytest.raises(KeyError), gc_between_steps():
            raise KeyError
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()
