"""What `artel.reports` reads of a run's folder: curves thinned while they are read, and all that is wrong at once."""

import json
import subprocess
import sys

import numpy as np
import pytest

from artel.errors import InputError
from artel.reports.curves import CurveReader
from artel.reports.run_data import RunReader, read_run
from artel.reports.status import RankStatus, SignsOfLife, determine_status
from support.runs import ENVIRONMENT


def training(step: int, loss: float | None = 3.0, **more) -> str:
    figures = {"step": step, "loss": loss, "gradient_norm": 1.5, "tokens": step * 100, "seconds": step / 2, **more}
    return json.dumps(figures) + "\n"


def validation(step: int, **metrics) -> str:
    return json.dumps({"step": step, "epoch": 0.5, "validation": metrics}) + "\n"


@pytest.fixture
def metrics(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_a_short_run_is_read_as_it_is(metrics):
    metrics.write_text(training(1, 4.0) + training(2, None) + validation(2, loss=3.5, f1=None) + training(4, 3.25))
    curves = CurveReader(metrics).read()
    loss = curves.training["loss"]
    assert (loss.step.tolist(), loss.value.tolist(), loss.null_count) == ([1, 4], [4.0, 3.25], 1)
    assert (loss.tokens.tolist(), loss.seconds.tolist()) == ([100, 400], [0.5, 2.0])
    held_out = curves.validation["loss"]
    assert (held_out.step.tolist(), held_out.value.tolist()) == ([2], [3.5])
    assert held_out.tokens[0] == pytest.approx(200)  # between those of the training lines
    assert (curves.newest["loss"], curves.newest_validation, curves.step) == (3.25, {"loss": 3.5, "f1": None}, 4)
    assert set(curves.training) == {"loss", "gradient_norm"}
    assert (curves.line_count, curves.torn) == (4, False)


@pytest.mark.parametrize("unlike", ["", '{"step": 7, "loss": null}\n', '{"step": 7, "loss": 3.0, "more": 1}\n'])
def test_of_many_lines_the_extremes_and_the_ends_are_kept(metrics, unlike):
    """Also where some lines are unlike the others, which are then parsed one by one."""
    values = np.random.default_rng(0).normal(5, 1, 30_000)
    values[12_345], values[23_456] = 77.0, -7.0
    lines = [training(step, value) for step, value in enumerate(values, 1)]
    metrics.write_text(lines[0] + unlike + "".join(lines[1:]))
    loss = CurveReader(metrics, max_points=200).read().training["loss"]
    assert len(loss.value) <= 202
    assert (loss.step[0], loss.step[-1]) == (1, 30_000)
    assert (loss.value.max(), loss.value.min()) == (77.0, -7.0)
    assert (loss.step[loss.value.argmax()], loss.step[loss.value.argmin()]) == (12_346, 23_457)
    assert (np.diff(loss.step) > 0).all()
    whole = CurveReader(metrics, max_points=None).read().training["loss"]
    assert len(whole.value) == 30_000 + ("more" in unlike)


@pytest.mark.slow
def test_a_long_file_is_read_by_several_processes_as_by_one(metrics):
    one = "".join(training(step, 3 + step % 7, learning_rate=0.001) for step in range(1, 1001))
    metrics.write_text(one * 1100)
    assert metrics.stat().st_size > 64 << 20
    code = (
        "import sys; from pathlib import Path\n"
        "from artel.host import process_memory; from artel.reports.curves import CurveReader\n"
        "curves = CurveReader(Path(sys.argv[1])).read()\n"
        "value, step = curves.training['loss'].value, curves.newest['step']\n"
        "print(curves.line_count, step, value.min(), value.max(), process_memory('VmHWM'), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(metrics)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=True)
    lines, step, low, high, peak, torch = done.stdout.split()
    assert (int(lines), int(step), float(low), float(high), torch) == (1_100_000, 1000, 3, 9, "False")
    assert int(peak) < 200e6
    with metrics.open("a") as file:  # a line number in what another process reads
        file.write("x\n")
    with pytest.raises(InputError, match=r"metrics.jsonl:1100001: is not a line of a run"):
        CurveReader(metrics).read()


def test_a_run_that_goes_on_is_read_on(metrics):
    reader = CurveReader(metrics)
    assert (reader.read().training, reader.read().line_count) == ({}, 0)
    metrics.write_text(training(1) + training(2)[:9])
    assert (reader.read().line_count, reader.read().torn) == (1, True)
    metrics.write_text(training(1) + training(2) + training(3))
    assert reader.read().training["loss"].step.tolist() == [1, 2, 3]
    again = metrics.with_name("again")
    again.write_text(training(1, 9.0))  # resumed from step 1: the later lines are dropped
    again.replace(metrics)
    assert reader.read().training["loss"].value.tolist() == [9.0]


def test_everything_that_is_wrong_is_said_together(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(training(1) + "x\n" + training(2) + '{"step": -1}\n')
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "text": "x"}\n[]\n{"step": "x", "prompt": "", "text": ""}\n')
    (tmp_path / "plan.json").write_text("{")
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(InputError) as error:
        read_run(tmp_path)
    told = str(error.value)
    for place in ("metrics.jsonl:2", "metrics.jsonl:4", "samples.jsonl:1", "samples.jsonl:2", "samples.jsonl:3"):
        assert f"{tmp_path / place}: is not a line of a run" in told
    assert "samples.jsonl:1: is not a line of a run: it has no prompt" in told
    assert "plan.json: is damaged" in told
    assert "config.yaml: is damaged" in told


@pytest.mark.parametrize("lines", [2, 5000])
def test_a_file_without_a_line_of_a_run_is_said_in_one_message(metrics, lines):
    metrics.write_text("x\n" * lines)
    with pytest.raises(InputError) as error:
        read_run(metrics.parent)
    (problem,) = error.value.problems
    assert problem.where == str(metrics)
    assert problem.what.startswith(f"is not the metrics.jsonl of a run: all {lines:,} lines are invalid, the first: ")
    for line in ("x", "[1, 2]", "7", "null"):
        metrics.write_text(f"{line}\n")
        with pytest.raises(InputError, match=r"metrics.jsonl:1: is not a line of a run"):
            read_run(metrics.parent)
    metrics.write_text("x\n" * 3 + training(1))
    with pytest.raises(InputError, match=r"metrics.jsonl:3: is not a line of a run"):
        read_run(metrics.parent)


def test_what_a_kill_tore_is_left_out_of_every_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(training(1) + '{"ste')
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "prompt": "a", "text": "b"}\n{"step"')
    run = read_run(tmp_path)
    assert run.torn_files == [str(tmp_path / "metrics.jsonl"), str(tmp_path / "samples.jsonl")]
    assert ([sample.text for sample in run.samples], run.curves.line_count) == (["b"], 1)


def test_a_folder_that_is_no_runs_is_refused(tmp_path):
    (tmp_path / "runs" / "tolstoy").mkdir(parents=True)
    (tmp_path / "runs" / "tolstoy" / "config.yaml").write_text("")
    with pytest.raises(InputError, match=r"there is no such folder\n    did you mean runs/tolstoy\?"):
        read_run("runs/tolsoty")
    with pytest.raises(InputError, match="is not the folder of a run: it has no"):
        read_run(tmp_path / "runs")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is not a folder"):
        read_run(tmp_path / "file")


def test_a_run_that_has_not_begun(tmp_path):
    (tmp_path / "config.yaml").write_text("run: x\nobjective: causal\ntrain: {steps: 7}\n")
    run = read_run(tmp_path)
    assert (run.status.state, run.objective, run.steps, run.curves.line_count) == ("not begun", "causal", 7, 0)


# Whether it lives -----------------------------------------------------------------------


def rank(number: int, time: float, state: str = "running", host: str = "elsewhere", pid: int = 1) -> RankStatus:
    return RankStatus(number, host, pid, "cpu", 10, 1.0, state, "", time, 5.0)


class Clocks:
    """Of this host and of a run that is followed; both are set by hand."""

    def __init__(self, now: float) -> None:
        self.now, self.watch = now, 0.0
        self.signs = SignsOfLife(lambda: self.now, lambda: self.watch)

    def state(self, *ranks: RankStatus, complete: bool = False) -> str:
        return determine_status(list(ranks), self.signs, complete=complete, step=3, has_started=True).state

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.watch += seconds


def test_a_run_that_gives_no_sign_is_dead():
    clocks = Clocks(1000.0)
    assert clocks.state(rank(0, 990)) == "running"
    clocks.pass_by(11)
    assert clocks.state(rank(0, 990)) == "dead"
    assert Clocks(1000.0).state(rank(0, 900)) == "dead"
    assert Clocks(1000.0).state(rank(0, 900, "complete"), complete=True) == "complete"
    assert Clocks(1000.0).state(rank(0, 900, "failed")) == "failed"
    assert Clocks(1000.0).state(rank(0, 900, "stopped"), complete=True) == "complete"


def test_another_hosts_clock_may_be_wrong_where_a_run_is_followed():
    clocks = Clocks(1000.0)
    assert clocks.state(rank(0, 1.0)) == "dead"  # it says so at first
    clocks.pass_by(5)
    assert clocks.state(rank(0, 6.0)) == "running"  # it moved
    clocks.pass_by(21)
    assert clocks.state(rank(0, 6.0)) == "dead"
    ahead = Clocks(1000.0)
    assert ahead.state(rank(0, 5000.0)) == "running"
    ahead.pass_by(21)
    assert ahead.state(rank(0, 5000.0)) == "dead"


def test_ranks_that_are_silent_are_named():
    clocks = Clocks(1000.0)
    status = determine_status([rank(0, 1000), rank(1, 900)], clocks.signs, complete=False, step=3, has_started=True)
    assert (status.state, status.silent_ranks, status.step) == ("running", (1,), 10)


def test_a_process_that_is_gone_from_this_host_is_dead_at_once():
    import socket

    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    clocks = Clocks(1000.0)
    assert clocks.state(rank(0, 993, host=socket.gethostname(), pid=gone.pid)) == "dead"
    assert clocks.state(rank(0, 993)) == "running"


def test_a_folder_that_is_read_again_shows_what_was_added(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(training(1))
    reader = RunReader(tmp_path)
    assert (reader.read().status.state, reader.read().curves.step) == ("unknown", 1)
    (tmp_path / "ranks").mkdir()
    about = {"rank": 0, "host": "h", "pid": 1, "device": "cpu", "step": 5, "memory_gib": 1.0, "every": 5.0}
    (tmp_path / "ranks" / "rank-00000.json").write_text(json.dumps({**about, "state": "failed", "time": 1.0}))
    (tmp_path / "ranks" / "rank-00001.json").write_text("{")
    run = reader.read()
    assert (run.status.state, run.status.step, [rank.rank for rank in run.ranks]) == ("failed", 5, [0])
