"""`artel report --live` and `artel watch` follow a run that another host writes to a disk that both have."""

import json
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.runs import ENVIRONMENT, start, wait_for_step, write_run
from support.waiting import LIMIT, Screen

HOST = "another-host"
APART = ["unshare", "--uts"]
ON_HOST = f"import os, socket, sys; socket.sethostname({HOST!r}); os.execv(sys.argv[1], sys.argv[1:])"


@pytest.fixture
def training(tmp_path):
    """A run of 100,000 steps on a host of another name, in the folder `run`."""
    if subprocess.run([*APART, "true"], capture_output=True).returncode:
        pytest.skip("a host name of one's own needs root")
    run = write_run(tmp_path / "run.yaml", train={"steps": 100_000})
    command = [*APART, sys.executable, "-c", ON_HOST, sys.executable, "-m", "artel", "train", run]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def follow():
    """Starts a command that follows a run; it is ended after the test."""
    started: list[subprocess.Popen] = []

    def begin(*arguments: str) -> subprocess.Popen:
        started.append(start(*arguments))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def pages(report: subprocess.Popen) -> Iterator[str]:
    """What an open page gets of the run: at first, and whenever that changes."""
    screen = Screen(report.stderr.fileno())
    screen.read_until(lambda text: "Ctrl-C ends it" in text)
    address = re.search(r"http://[\d.:]+/", screen.text)[0]
    with urllib.request.urlopen(f"{address}events", timeout=LIMIT) as events:
        for line in events:
            if line.startswith(b"data: "):
                yield json.dumps(json.loads(line.removeprefix(b"data: "))["parts"])


@pytest.mark.long
@pytest.mark.processes
def test_a_run_of_another_host_is_followed_until_it_is_dead(training, follow):
    wait_for_step(training, Path("run"), 3)
    (rank,) = Path("run/ranks").glob("rank-*.json")
    assert json.loads(rank.read_bytes())["host"] == HOST != socket.gethostname()
    watching, states = follow("watch", "run"), pages(follow("report", "run", "--live", "--port", "0"))
    first = next(states)
    assert "state running" in first
    assert HOST in first
    assert watching.stderr.readline().startswith("run: running · step ")

    training.kill()
    last = next(page for page in states if "state running" not in page)
    assert "state dead" in last
    assert "No sign of life for" in last
    _, rest = watching.communicate(timeout=LIMIT)
    assert watching.returncode == 1
    assert "run: no sign of life for " in rest
