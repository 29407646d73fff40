"""What two hosts live through: a worker killed, a host lost and back, the cable cut, the host of the rendezvous lost.

Each host is a network namespace with an address of its own, both on this machine and on one disk. Whatever happens,
the losses are those of one process, to float tolerance. The times that it took are printed (pytest -s).
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.runs import ENVIRONMENT, largest_difference, losses, succeed, wait_for_step, write_run
from support.two_hosts import FIRST, HIDDEN, MARKS, PORT, ip, two_namespaces
from support.waiting import LIMIT, last, wait_until

STEPS = 400
# A rate that stays as it is: then the first steps of a longer run are those of a shorter one. SGD and a low rate: with
# AdamW and 1e-3 the last bit of a sum has grown to 1e-5 of the gradient norm by step 60.
STEADY = {"steps": STEPS, "warmup": 0, "schedule": "constant", "optimizer": "sgd", "learning_rate": 1e-2}
RARELY = {"checkpoint": {"every": 20}, "validate": {"every": "never"}, "data": {"validation": 0}}

pytestmark = [*MARKS, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """(loss, gradient norm) by step of one process."""
    run = write_run(tmp_path_factory.mktemp("one") / "run.yaml", train=STEADY, **RARELY)
    succeed("train", run, timeout=LIMIT)
    return losses(run.with_suffix(""))


class Host:
    """One artel in a namespace, as a person at that machine would start it."""

    def __init__(self, namespace, folder, *flags):
        self.namespace, self._flags, self._log = namespace, flags, folder / f"{namespace}.log"
        self._log.touch()
        self.start()

    def start(self):
        command = ["ip", "netns", "exec", self.namespace, sys.executable, "-m", "artel", "train", *self._flags]
        clean = {key: value for key, value in ENVIRONMENT.items() if key not in HIDDEN}
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), env=clean, stdout=log, stderr=log, start_new_session=True
            )

    def output(self):
        return self._log.read_text()

    def await_told(self, text, times=1):
        def said():
            return self.output().count(text) >= times

        wait_until(lambda: said() or self.process.poll() is not None, lambda: f"{text}\n{self.output()[-3000:]}")
        assert said(), f"ended without: {text}\n{self.output()[-3000:]}"

    def worker(self):
        """The process id of a worker of this host."""
        for number in self.everyone():
            if b"\0LOCAL_RANK=0\0" in b"\0" + Path(f"/proc/{number}/environ").read_bytes():
                return number
        raise AssertionError(f"no worker\n{self.output()[-3000:]}")

    def everyone(self):
        done = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, timeout=30)
        return [int(number) for number in done.stdout.split()]

    def lose(self):
        """As at a power cut: every process of the host is gone at once."""
        for number in self.everyone():
            os.kill(number, signal.SIGKILL)
        self.process.wait(30)

    def end(self):
        self.process.wait(LIMIT)
        return self.process.returncode


@pytest.fixture
def begin(tmp_path):
    """Starts a run on two hosts with these flags: hosts and the run's folder."""
    hosts = []
    with two_namespaces() as names:

        def begin(*flags, steps=STEPS):
            run = write_run(tmp_path / "two.yaml", train={**STEADY, "steps": steps}, **RARELY)
            flags = [run, "--rdzv-endpoint", f"{FIRST}:{PORT}", *flags]
            hosts.extend(Host(name, tmp_path, *flags) for name in names)
            return *hosts, run.with_suffix("")

        try:
            yield begin
        finally:
            for host in hosts:
                host.lose()


def same(reference, folder, least):
    """The steps that both runs have, at least so many, have the same losses and gradient norms."""
    by_step = losses(folder)
    both = reference.keys() & by_step.keys()
    assert len(both) >= least
    assert largest_difference({step: reference[step] for step in both}, {step: by_step[step] for step in both}) < 1e-5


def seconds(since, what):
    print(f"{what}: {time.monotonic() - since:.1f} s")


def test_goes_on_after_a_workers_sigkill(begin, reference):
    first, second, folder = begin("--nnodes", 2, "--max-restarts", 1)
    wait_for_step(first.process, folder, 50)
    worker = second.worker()
    since = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    first.await_told("lost its peers")
    seconds(since, "a worker killed, the other told of it")
    first.await_told("resuming from step")
    seconds(since, "a worker killed, training again")
    assert (first.end(), second.end()) == (0, 0), first.output() + second.output()
    same(reference, folder, STEPS)


def test_goes_on_alone_after_a_hosts_loss_and_together_when_it_is_back(begin, reference):
    first, second, folder = begin("--nnodes", "1:2", steps=100_000)
    first.await_told("2 processes")
    wait_for_step(first.process, folder, 50)
    since = time.monotonic()
    second.lose()
    first.await_told("1 process on")
    seconds(since, "a host lost, training alone")
    since = time.monotonic()
    second.start()
    first.await_told("2 processes", times=2)
    seconds(since, "the host back, training together")
    before = len(losses(folder))
    wait_for_step(first.process, folder, before + 20)
    for host in (second, first):
        host.process.send_signal(signal.SIGTERM)
    assert (first.end(), second.end()) == (130, 130), first.output() + second.output()
    same(reference, folder, 100)


def test_goes_on_after_the_cable_was_cut_for_a_minute(begin, reference):
    first, second, folder = begin("--nnodes", "1:2")
    wait_for_step(first.process, folder, 50)
    cable = f"v{second.namespace[5:]}"
    ip("-n", second.namespace, "link", "set", cable, "down")
    step = len(losses(folder))
    last(60)
    assert len(losses(folder)) <= step + 2 < STEPS  # one was under way, one not yet written
    step = len(losses(folder))
    ip("-n", second.namespace, "link", "set", cable, "up")
    since = time.monotonic()
    wait_for_step(first.process, folder, step + 1)
    seconds(since, "the cable whole again, the next step")
    assert (first.end(), second.end()) == (0, 0), first.output() + second.output()
    assert "resuming from step" not in first.output() + second.output()  # nothing was started again
    same(reference, folder, STEPS)


def test_goes_on_alone_when_the_cable_stays_cut_and_together_when_it_is_whole(begin, reference):
    """A host that is silent but whose connections stay open, as after a power cut; this one comes back by itself."""
    first, second, folder = begin("--nnodes", "1:2", steps=100_000)
    wait_for_step(first.process, folder, 50)
    cable = f"v{second.namespace[5:]}"
    ip("-n", second.namespace, "link", "set", cable, "down")
    since = time.monotonic()
    first.await_told("1 process on")
    seconds(since, "a host silent, training alone")
    ip("-n", second.namespace, "link", "set", cable, "up")
    since = time.monotonic()
    first.await_told("2 processes", times=2)
    seconds(since, "the cable whole again, training together")
    for host in (first, second):
        host.process.send_signal(signal.SIGTERM)
    assert (first.end(), second.end()) == (130, 130), first.output() + second.output()
    same(reference, folder, 60)


def test_the_host_of_the_rendezvous_is_lost_and_the_same_commands_go_on(begin, reference):
    first, second, folder = begin("--nnodes", "1:2")
    wait_for_step(first.process, folder, 50)
    since = time.monotonic()
    first.lose()
    assert second.end() == 1
    seconds(since, "the host of the rendezvous lost, the other ended")
    assert f"{FIRST}:{PORT}: the host of the rendezvous is lost" in second.output()
    for host in (first, second):
        host.start()
    assert (first.end(), second.end()) == (0, 0), first.output() + second.output()
    assert "resuming from step" in first.output()
    same(reference, folder, STEPS)
