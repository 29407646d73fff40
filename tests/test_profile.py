"""The profile: its files, a table that adds up to the steps' wall time, and no profiler outside of its window."""

import json
import signal

import pytest
import torch

from artel.config import Overrides, load_run
from artel.errors import Interrupted
from artel.parallel import join_world
from artel.preparing import prepare
from artel.training import loop
from artel.training.profile import StepProfiler
from support.messages import logged
from support.runs import succeed, write_run

TRAINING = ("matrix products", "attention", "loss", "elementwise and norms", "optimizer and clipping")


class Watched(StepProfiler):
    """Notes at the end of each step whether PyTorch's profiler ran in it; at `stop_at` it asks the run to stop."""

    stop_at = None

    def __init__(self, run):
        self.ran = {}
        Watched.last = self
        super().__init__(run)

    def __call__(self, run):
        self.ran[run.step] = torch.autograd._profiler_enabled()
        super().__call__(run)
        if run.step == self.stop_at:
            signal.raise_signal(signal.SIGTERM)


@pytest.fixture
def watched(monkeypatch):
    """The real loop, in this process; what its profile saw."""
    monkeypatch.setattr(loop, "StepProfiler", Watched)

    def train(file, profile="true"):
        config = load_run(str(file), Overrides.parse([f"profile={profile}"]))
        messages = logged()
        with join_world(threads=1) as processes:
            try:
                loop.train(config, prepare(config), processes)
            except Interrupted:
                messages.append("interrupted")
        assert not torch.autograd._profiler_enabled()
        return Watched.last, [line for line in messages if line.startswith("profile") or line == "interrupted"]

    yield train
    Watched.stop_at = None


def read(file):
    folder = file.with_suffix("") / "profile"
    assert {entry.name for entry in folder.iterdir()} == {"trace.json", "table.json", "table.txt"}
    return json.loads((folder / "table.json").read_bytes()), (folder / "table.txt").read_text()


def by_kind(table):
    return {row["kind"]: row["milliseconds"] for row in table["kinds"]}


@pytest.mark.slow
def test_a_run_writes_a_trace_and_a_table_that_adds_up(tmp_path, watched):
    file = write_run(tmp_path / "run.yaml", train={"steps": 12}, validate={"every": "never"})
    seen, messages = watched(file)
    # Step 5 warms the profiler up, which records nothing yet; 6 to 8 are recorded; nothing runs before and after.
    assert [step for step, ran in seen.ran.items() if ran] == [6, 7, 8]
    table, text = read(file)
    assert table["device"] == "cpu"
    assert table["steps"] == 3
    kinds = by_kind(table)
    assert sum(kinds.values()) == pytest.approx(table["milliseconds"], rel=0.01)
    assert sum(row["percent"] for row in table["kinds"]) == pytest.approx(100, abs=1)
    assert all(kinds[kind] > 0 for kind in (*TRAINING, "waiting for data", "the host's own time")), kinds
    assert kinds["communication"] == 0
    assert len(table["operators"]) == 20
    assert any(row["name"] == "aten::mm" and row["kind"] == "matrix products" for row in table["operators"])
    assert all(kind in text for kind in kinds)
    assert "Self CPU" in text  # of torch.profiler
    assert len(messages) == 1
    assert "from step 6 on" in messages[0]
    trace = json.loads((file.with_suffix("") / "profile" / "trace.json").read_bytes())
    names = [event["name"] for event in trace["traceEvents"]]
    steps = [event for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep#")]
    assert len(steps) == 3
    assert table["milliseconds"] == pytest.approx(sum(step["dur"] for step in steps) / 3 / 1e3, rel=0.01)
    assert {"artel: data", "artel: optimizer", "aten::mm"} <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "recorded", "first"), [(1, 1, 1), (2, 1, 2), (4, 2, 3)])
def test_a_short_run_records_what_there_is_and_says_so(tmp_path, watched, steps, recorded, first):
    file = write_run(tmp_path / "run.yaml", train={"steps": steps})
    seen, messages = watched(file)
    assert [step for step, ran in seen.ran.items() if ran] == list(range(first, steps + 1))
    assert read(file)[0]["steps"] == recorded
    assert f"recording {recorded} of the {steps} steps left, from step {first};" in messages[0]


@pytest.mark.slow
def test_interrupted_within_the_window_writes_its_whole_steps(tmp_path, watched):
    file = write_run(tmp_path / "run.yaml", train={"steps": 12})
    Watched.stop_at = 6
    seen, messages = watched(file)
    assert messages[-1] == "interrupted"
    assert max(seen.ran) == 6
    table, _ = read(file)
    assert table["steps"] == 2  # the loop heard of it in step 7, and finished that
    assert sum(by_kind(table).values()) == pytest.approx(table["milliseconds"], rel=0.02)
    # Going on, the steps of this start are counted: of the five left, two are for warming up.
    Watched.stop_at = None
    seen, _ = watched(file)
    assert [step for step, ran in seen.ran.items() if ran] == [10, 11, 12]
    assert read(file)[0]["steps"] == 3


@pytest.mark.slow
def test_interrupted_before_a_step_was_recorded_writes_nothing(tmp_path, watched):
    file = write_run(tmp_path / "run.yaml", train={"steps": 12})
    Watched.stop_at = 4
    _, messages = watched(file)
    assert messages == ["profile: the run ended before step 6 was finished; no profile written", "interrupted"]
    assert not (file.with_suffix("") / "profile").exists()


@pytest.mark.slow
def test_without_profile_nothing_is_started_and_nothing_written(tmp_path, watched):
    file = write_run(tmp_path / "run.yaml", train={"steps": 8})
    seen, messages = watched(file, profile="false")
    assert list(seen.ran.values()) == [False] * 8
    assert messages == []
    assert not (file.with_suffix("") / "profile").exists()


@pytest.mark.processes
def test_of_two_processes_the_first_writes_and_names_what_they_say(tmp_path):
    file = write_run(tmp_path / "run.yaml", train={"steps": 10}, validate={"every": "never"})
    done = succeed("train", file, "--nproc", 2, "profile=true")
    assert done.stderr.count("profile: 3 step(s)") == 1
    assert "USDT" not in done.stderr
    kinds = by_kind(read(file)[0])
    assert kinds["communication"] > 0
    assert all(kinds[kind] > 0 for kind in TRAINING), kinds


@pytest.mark.long
def test_compiled_layers_are_told_by_what_they_call(tmp_path):
    changes = {"train": {"steps": 9, "compile": "on"}, "model": {"config": {"n_layer": 1}}}
    file = write_run(tmp_path / "run.yaml", **changes, validate={"every": "never"})
    succeed("train", file, "profile=true")
    table, _ = read(file)
    assert all(by_kind(table)[kind] > 0 for kind in TRAINING), table
    generated = [row for row in table["operators"] if "CompiledFxGraph" in row["name"]]
    assert generated
    assert {row["kind"] for row in generated} == {"elementwise and norms"}
    assert any((row["name"], row["kind"]) == ("artel::cpu_cross_entropy", "loss") for row in table["operators"])
