"""`artel watch`: what it shows of a run, on a terminal and without one, and that it ends with the run."""

import io
import json
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console

from artel.errors import InputError, WorkError
from artel.reports.run_data import read_run
from artel.reports.watch import render_screen, watch
from support.runs import artel, start, wait_for_step, write_run
from support.waiting import LIMIT, wait_until


def make_run(folder: Path, state: str, *, ranks: int = 1, steps: int = 30, of: int = 100, age: float = -1000.0) -> Path:
    """A run that logs a step a second; its processes gave a sign `age` seconds ago, or by a clock that is ahead."""
    (folder / "ranks").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"objective: causal\ntrain: {{steps: {of}}}\n")
    lines = [
        {"step": n, "loss": 4 - n / 50, "tokens": n * 10, "seconds": float(n), "run_tokens_per_second": 10.0}
        for n in range(1, steps + 1)
    ]
    lines.append({"step": steps, "validation": {"loss": 3.5}})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for rank in range(ranks):
        about = {"rank": rank, "host": f"node{rank}", "pid": 1, "device": f"cuda:{rank}", "step": steps,
                 "memory_gib": 1.5, "state": state, "message": "the disk is full", "time": time.time() - age,
                 "every": 5.0}  # fmt: skip
        (folder / "ranks" / f"rank-{rank:05}.json").write_text(json.dumps(about))
    return folder


def drawn(folder: Path, width: int = 90) -> str:
    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(render_screen(read_run(folder), width))
    return captured.get()


def test_the_screen_of_a_run(tmp_path):
    folder = make_run(tmp_path / "run", "running", ranks=2)
    text = drawn(folder)
    assert "running  causal" in text
    assert "step 30 of 100" in text
    assert "0:01:10 left" in text
    assert "loss 3.4000 · validation 3.5000 (step 30) · 10 tokens/s · 0:00:30 so far" in text
    assert "· training   o validation" in text
    assert [line.split()[:4] for line in text.splitlines() if "node" in line] == [
        ["0", "node0", "cuda:0", "30"], ["1", "node1", "cuda:1", "30"]
    ]  # fmt: skip
    assert max(map(len, text.splitlines())) <= 90


def test_a_silent_rank_is_shown_first(tmp_path):
    folder = make_run(tmp_path / "run", "running", ranks=3)
    file = folder / "ranks" / "rank-00002.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"time": 1.0}))
    ranks = [line.split() for line in drawn(folder).splitlines() if "node" in line]
    assert [(rank[0], rank[-1]) for rank in ranks] == [("2", "silent"), ("0", "running"), ("1", "running")]


def test_the_pace_is_that_of_the_newest_part(tmp_path):
    run = read_run(make_run(tmp_path / "run", "running"))
    assert run.steps_per_second == pytest.approx(1.0)
    assert run.seconds_left == pytest.approx(70.0)


def console() -> Console:
    return Console(file=io.StringIO(), width=200, highlight=False)


ENDS = {
    "failed": (0, "failed after step 30: the disk is full"),
    "running": (1000, r"no sign of life for 1\d\d\d s after step 30"),
}


@pytest.mark.parametrize("state", ENDS)
def test_a_run_that_failed_or_died_ends_it(tmp_path, state):
    age, says = ENDS[state]
    folder = make_run(tmp_path / "run", state, age=age)
    with pytest.raises(WorkError, match=says):
        watch(str(folder), console())


def test_a_run_without_signs_is_said_to_be_one(tmp_path):
    folder = make_run(tmp_path / "run", "running", ranks=0)
    with pytest.raises(InputError, match="has no status files"):
        watch(str(folder), console())


def test_a_folder_that_is_no_run_is_refused(command):
    status, _, said = command("watch", "nowhere")
    assert (status, "nowhere: there is no such folder" in said) == (2, True)


@pytest.mark.processes
def test_it_follows_a_run_to_its_end(tmp_path):
    """Begun while the run checks itself and loads its model."""
    run = write_run(tmp_path / "run.yaml", train={"steps": 400})
    training = start("train", str(run))
    first = tmp_path / "run" / "ranks" / "rank-00000.json"
    wait_until(lambda: first.exists() or training.poll() is not None, lambda: "the run's start")
    watching = artel("watch", "run", "--json")
    training.communicate(timeout=LIMIT)
    assert watching.returncode == 0, watching.stderr
    assert (json.loads(watching.stdout)["state"], json.loads(watching.stdout)["steps"]) == ("complete", 400)
    lines = watching.stderr.splitlines()
    assert lines[0].startswith("run: running · step ")
    assert lines[-1].startswith("run: complete · step 400 of 400 · loss ")


@pytest.mark.processes
def test_it_says_that_a_run_was_killed(tmp_path):
    run = write_run(tmp_path / "run.yaml", train={"steps": 100_000})
    training = start("train", str(run))
    wait_for_step(training, tmp_path / "run", 3)
    watching = start("watch", "run")
    training.kill()
    training.communicate(timeout=LIMIT)
    try:
        _, told = watching.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        watching.kill()
        raise
    assert watching.returncode == 1
    assert "run: no sign of life for " in told
    assert "the same command resumes from its last checkpoint" in told
