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
from artel.training.metrics.profile_table import time_table
from artel.training.profile import Profile
from support.runs import artel, write_run

TRAINING = ("matrix products", "attention", "loss", "elementwise and norms", "optimizer and clipping")


class Watched(Profile):
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
    monkeypatch.setattr(loop, "Profile", Watched)

    def train(file, profile="true"):
        config = load_run(str(file), Overrides.parse([f"profile={profile}"]))
        messages = []
        with join_world(threads=1) as processes:
            try:
                loop.train(config, prepare(config), processes, messages.append)
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
    assert sum(kinds.values()) == pytest.approx(table["milliseconds"], abs=1e-3 * len(kinds))
    assert sum(row["percent"] for row in table["kinds"]) == pytest.approx(100, abs=0.1)
    assert all(kinds[kind] > 0 for kind in (*TRAINING, "waiting for data", "the host's own time")), kinds
    assert kinds["communication"] == 0
    assert len(table["operators"]) == 20
    assert any(row["name"] == "aten::mm" and row["kind"] == "matrix products" for row in table["operators"])
    assert all(kind in text for kind in kinds)
    assert "together" in text
    assert len(messages) == 1
    assert "from step 6 on" in messages[0]
    trace = json.loads((file.with_suffix("") / "profile" / "trace.json").read_bytes())
    names = [event["name"] for event in trace["traceEvents"]]
    steps = [event for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep#")]
    assert len(steps) == 3
    wall = max(step["ts"] + step["dur"] for step in steps) - min(step["ts"] for step in steps)
    assert table["milliseconds"] == pytest.approx(wall / 3 / 1e3, rel=0.01)
    assert {"artel: data", "artel: optimizer", "aten::mm"} <= set(names)


def products_once_in_a_while(file):
    """Milliseconds of each matrix product that the trace has outside of the steps' own work."""
    events = json.loads((file.with_suffix("") / "profile" / "trace.json").read_bytes())["traceEvents"]
    ranges = [(each["ts"], each["ts"] + each["dur"]) for each in events if each["name"] == "artel: callbacks"]
    products = [each for each in events if each["name"] in ("aten::mm", "aten::addmm")]
    return [each["dur"] / 1e3 for each in products if any(first <= each["ts"] < last for first, last in ranges)]


@pytest.mark.slow
def test_a_validation_within_is_told_apart(tmp_path, watched):
    changes = {"train": {"steps": 12}, "checkpoint": {"every": "never"}}
    alone = write_run(tmp_path / "alone.yaml", **changes, validate={"every": "never"})
    judged = write_run(tmp_path / "judged.yaml", **changes, validate={"every": 7})
    watched(alone)
    watched(judged)
    products = products_once_in_a_while(judged)
    assert products_once_in_a_while(alone) == []
    assert len(products) > 0
    once = by_kind(read(judged)[0])["callbacks (log, validate, save)"]
    assert once >= sum(products) / 3  # of a step, of three


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "recorded", "first"), [(1, 1, 1), (2, 1, 2), (4, 2, 3)])
def test_a_short_run_records_what_there_is_and_says_so(tmp_path, watched, steps, recorded, first):
    file = write_run(tmp_path / "run.yaml", train={"steps": steps})
    seen, messages = watched(file)
    assert [step for step, ran in seen.ran.items() if ran] == list(range(first, steps + 1))
    assert read(file)[0]["steps"] == recorded
    assert f"of the {steps} steps left, {recorded} from step {first} on" in messages[0]


@pytest.mark.slow
def test_interrupted_within_the_window_writes_its_whole_steps(tmp_path, watched):
    file = write_run(tmp_path / "run.yaml", train={"steps": 12})
    Watched.stop_at = 6
    seen, messages = watched(file)
    assert messages[-1] == "interrupted"
    assert max(seen.ran) == 6
    table, _ = read(file)
    assert table["steps"] == 2  # the loop heard of it in step 7, and finished that
    assert sum(by_kind(table).values()) == pytest.approx(table["milliseconds"], abs=0.02)
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
    assert messages == ["profile: the run ended before step 6 was over; nothing is written", "interrupted"]
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
    done = artel("train", file, "--nproc", 2, "profile=true")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("profile: 3 step(s)") == 1
    assert "USDT" not in done.stderr
    kinds = by_kind(read(file)[0])
    assert kinds["communication: all-reduce"] > 0
    assert all(kinds[kind] > 0 for kind in TRAINING), kinds


@pytest.mark.long
def test_compiled_layers_are_told_by_what_they_call(tmp_path):
    changes = {"train": {"steps": 9, "compile": "on"}, "model": {"config": {"n_layer": 1}}}
    file = write_run(tmp_path / "run.yaml", **changes, validate={"every": "never"})
    done = artel("train", file, "profile=true")
    assert done.returncode == 0, done.stderr
    table, _ = read(file)
    assert all(by_kind(table)[kind] > 0 for kind in TRAINING), table
    generated = [row for row in table["operators"] if "CompiledFxGraph" in row["name"]]
    assert generated
    assert {row["kind"] for row in generated} == {"elementwise and norms"}
    assert any((row["name"], row["kind"]) == ("artel::cpu_cross_entropy", "loss") for row in table["operators"])


# A trace as PyTorch writes it on a GPU, cut down to what a table needs: microseconds, a host thread that launches, a
# thread of the engine, and three streams.
MAIN, ENGINE = {"pid": 1, "tid": 1}, {"pid": 1, "tid": 2}


def host(name, start, length, thread=MAIN, category="cpu_op", **arguments):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "args": arguments} | thread


def on_gpu(name, start, length, launcher=None, stream=7, category="kernel"):
    arguments = {"stream": stream} | ({} if launcher is None else {"External id": launcher})
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "pid": 0, "tid": stream,
            "args": arguments}  # fmt: skip


def test_on_a_gpu_time_is_the_kernels_by_their_launcher_and_idle_is_told_apart():
    forward, backward = ({"Sequence number": 5, "Fwd thread id": thread} for thread in (0, 1))
    note = "user_annotation"
    events = [
        host("ProfilerStep#1", 0, 1000, category=note),
        host("artel: data", 0, 100, category=note),
        host("artel: forward", 100, 100, category=note),
        host("aten::linear", 100, 20),
        host("aten::addmm", 101, 10, **{"External id": 11}),
        host("aten::scaled_dot_product_attention", 120, 20, **forward),
        host("aten::bmm", 121, 5, **{"External id": 12} | forward),
        host("triton_poi_fused_add_scaled_dot_product_1", 150, 5, **{"External id": 13}),
        host("autograd::engine::evaluate_function: BmmBackward0", 210, 50, ENGINE, **backward),
        host("aten::bmm", 215, 5, ENGINE, **{"External id": 14}),
        host("artel: optimizer", 300, 50, category=note),
        host("aten::mm", 310, 5, **{"External id": 15}),  # Muon's
        host("artel: callbacks", 850, 150, category=note),
        on_gpu("ampere_sgemm_128x64_tn", 150, 100, 11),  # hides the first half of an all-reduce
        on_gpu("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 200, 100, stream=9),
        on_gpu("Memcpy HtoD (Pinned -> Device)", 240, 30, stream=11, category="gpu_memcpy"),
        on_gpu("cutlass_80_tensorop", 300, 100, 12),
        on_gpu("triton_poi_fused_add_scaled_dot_product_1", 400, 50, 13),
        on_gpu("cutlass_80_tensorop", 450, 100, 14),
        on_gpu("cutlass_80_tensorop", 550, 50, 15),
        on_gpu("void at::native::vectorized_elementwise_kernel<4>", 600, 25, 999),  # launched by nothing known
    ]
    table = time_table({"traceEvents": events}, 1)
    assert table.device == "cuda"
    assert table.milliseconds == 1.0
    assert table.kinds == pytest.approx(
        {
            "matrix products": 0.100,
            "attention": 0.200,
            "loss": 0.0,
            "elementwise and norms": 0.075,
            "optimizer and clipping": 0.050,
            "communication: all-reduce": 0.030,
            "copies": 0.020,
            "waiting for data": 0.100,
            "callbacks (log, validate, save)": 0.150,
            "the host's own time": 0.275,
        }
    )
    assert sum(table.kinds.values()) == pytest.approx(table.milliseconds)
    assert (table.operators[0].name, table.operators[0].kind) == ("aten::bmm", "attention")


def test_on_a_cpu_operators_of_artel_count_as_what_they_do():
    note = "user_annotation"
    events = [
        host("ProfilerStep#1", 0, 1000, category=note),
        host("artel: forward", 0, 500, category=note),
        host("artel::cpu_attention", 0, 100),
        host("artel: loss", 200, 300, category=note),
        host("aten::mm", 200, 150),
        host("artel::cpu_cross_entropy", 350, 50),
        host("artel: backward", 500, 500, category=note),
        host("artel::cpu_attention_backward", 500, 300),
    ]
    kinds = time_table({"traceEvents": events}, 1).kinds
    assert kinds["attention"] == pytest.approx(0.4)
    assert kinds["matrix products"] == pytest.approx(0.15)
    assert kinds["loss"] == pytest.approx(0.05)
