"""`train.budget`: a run of a given time, on machines whose speed the tests decide. No clock is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from artel.config import Overrides, RunConfig, TrainConfig, load_run
from artel.errors import InputError, Interrupted, WorkError
from artel.models.compile import OFF, compile_choice
from artel.parallel import World
from artel.preparing import prepare
from artel.reports.run_data import read_run
from artel.reports.terminal import compare_runs
from artel.training.budget import Budget
from artel.training.callbacks import Callback
from artel.training.loop import train
from artel.training.run import Run
from artel.training.run_folder import RunFolder
from artel.training.same_run import check_same_run
from artel.training.schedule import rate_by_time
from support.machine import Machine, Pace
from support.messages import logged
from support.ranks import run_ranks
from support.runs import artel, succeed, write_run

ALONE = World(0, 1, 0, torch.device("cpu"))
BUDGET = 100.0


def budget_run(folder: Path, **train: Any) -> RunConfig:
    """Steps of one forward pass, of which a validation takes three; for `BUDGET` seconds."""
    train = {"steps": None, "budget": BUDGET, "batch": 16, "micro_batch": 16, "warmup": 0.05, **train}
    file = write_run(folder / "run.yaml", train=train, validate={"every": "never", "blocks": 48})
    return load_run(str(file))


def begun(run: RunConfig) -> Any:
    """The run's prepared text, once the run was compared with what its folder holds, as `artel train` does it."""
    prepared = prepare(run)
    RunFolder(Path(run.run)).claim()
    check_same_run(run, prepared)
    return prepared


def trained(run: RunConfig, machine: Machine, *others: Callback) -> dict[str, Any]:
    return train(run, begun(run), ALONE, [machine, *others], machine.clock)


def steady(_: float) -> float:
    return 0.5


def three_times_slower(after: float) -> Pace:
    return lambda now: 0.5 if now < after else 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "pace",
    [steady, three_times_slower(50.0), three_times_slower(87.0), lambda now: 1.5 if now < 50 else 0.5],
    ids=["steady", "slower halfway", "slower in the decay", "faster halfway"],
)
def test_a_run_ends_with_its_budget_whatever_the_machine_does(tmp_path: Path, pace: Pace) -> None:
    machine = Machine(pace)
    result = trained(budget_run(tmp_path), machine)
    assert 0.95 * BUDGET <= machine.seconds <= BUDGET
    assert result["wall_seconds"] == machine.seconds
    assert result["steps"] == len(machine.rates)
    assert result["validation"]["loss"] > 0
    peak = max(machine.rates)
    warm = machine.rates.index(peak)
    assert machine.rates[:warm] == sorted(machine.rates[:warm])
    after = list(zip(machine.shares, machine.rates, strict=True))[warm:]
    assert {rate for share, rate in after if share <= 0.8} == {peak}
    decay = [rate for share, rate in after if share > 0.8]
    assert decay == sorted(decay, reverse=True)
    assert len(decay) > 5
    assert decay[-1] < 0.2 * peak


@pytest.fixture
def stopped(tmp_path: Path) -> RunConfig:
    """A run that was stopped in its constant phase, after 30 seconds of work."""
    run = budget_run(tmp_path)
    with pytest.raises(Interrupted, match=r"after step 61, after 3\d% of 100s"):
        trained(run, Machine(steady, stops_after=60))
    return run


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_time_that_is_left(stopped: RunConfig) -> None:
    machine = Machine(steady, starts_at=5000.0)
    result = trained(stopped, machine)
    assert 0.95 * BUDGET <= result["wall_seconds"] <= BUDGET
    assert machine.seconds < 0.75 * BUDGET
    assert machine.shares[0] > 0.3
    assert machine.rates[0] == max(machine.rates)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pace", "stops_after"), [(steady, 175), (three_times_slower(85.0), 172)], ids=["steady", "slower just before"]
)
def test_a_run_that_was_stopped_in_its_decay_goes_on_with_it(tmp_path: Path, pace: Pace, stops_after: int) -> None:
    """What its end takes is known before it is measured again, and a faster machine does not turn the decay back."""
    run = budget_run(tmp_path)
    before, after = Machine(pace, stops_after=stops_after), Machine(steady)
    with pytest.raises(Interrupted):
        trained(run, before)
    assert 0.85 < before.shares[-1] < 0.97
    assert trained(run, after)["wall_seconds"] <= BUDGET
    shares = before.shares + after.shares
    assert shares == sorted(shares)
    if pace is steady:
        assert after.shares[0] > before.shares[-1]  # by the step that was done
    assert after.rates[0] <= before.rates[-1] * (1 + 1e-9)
    assert after.rates == pytest.approx(sorted(after.rates, reverse=True), rel=1e-9)  # falls, but for rounding


def test_a_disk_that_takes_no_checkpoint_ends_the_run_when_its_end_is_measured(tmp_path: Path) -> None:
    machine = Machine(steady)

    def put_a_file_in_the_way(run: Run) -> None:
        if run.step == 1:
            run.folder.checkpoints.write_text("")

    with pytest.raises(WorkError, match="the checkpoint of step 2 could not be written"):
        trained(budget_run(tmp_path), machine, put_a_file_in_the_way)
    assert len(machine.rates) == 2


@pytest.mark.slow
def test_what_is_complete_stays_so_after_a_kill_at_its_end(stopped: RunConfig) -> None:
    """A run killed while its final model was written does no further step."""
    steps = trained(stopped, Machine(steady))["steps"]
    (Path(stopped.run) / "result.json").unlink()
    again = Machine(steady)
    assert trained(stopped, again)["steps"] == steps
    assert again.rates == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (["train.budget=200s"], None),
        (["train.budget=60s"], None),
        (["train.budget=35s"], "learning rate"),
        (["train.budget=20s"], "already run for"),
        (["train.steps=300", "train.schedule=wsd"], "one of the two lengths is a time"),
    ],
)
def test_before_its_decay_a_run_may_get_another_budget(
    stopped: RunConfig, changes: list[str], refused: str | None
) -> None:
    """Where what it has done would have been done so within the other, too; and no length of another kind."""
    run = load_run(f"{stopped.run}.yaml", Overrides.parse(changes))
    if refused is not None:
        with pytest.raises(InputError, match=refused):
            trained(run, Machine(steady))
        return
    assert trained(run, Machine(steady))["wall_seconds"] == pytest.approx(run.train.budget, rel=0.05)


def test_a_budget_that_is_too_short_is_an_error_with_what_it_takes_and_no_result(tmp_path: Path) -> None:
    """Also when it is tried again; the budget that the message asks for is enough."""
    run = budget_run(tmp_path, budget=2)
    for _ in range(2):
        with pytest.raises(InputError, match="2s is too short") as caught:
            trained(run, Machine(lambda now: 1.0))
        assert not (Path(run.run) / "result.json").exists()
    enough = caught.value.problems[0].fix.split()[2]
    run = load_run(f"{run.run}.yaml", Overrides.parse([f"train.budget={enough}"]))
    assert trained(run, Machine(lambda now: 1.0))["steps"] > 2


@pytest.mark.parametrize(
    ("at", "says"),
    [(0, "loading the model took 10 s"), (1, "loading the model and the first step took 10 s")],
    ids=["loading", "the first step"],
)
def test_a_budget_that_is_over_before_the_second_step_is_refused_then(tmp_path: Path, at: int, says: str) -> None:
    run, clock = budget_run(tmp_path, budget=5), Clock(at)
    with pytest.raises(InputError, match=f"5s is too short: {says}") as error:
        train(run, begun(run), ALONE, [clock], clock.now)
    assert clock.steps == at
    assert error.value.problems[0].fix.startswith("write train.budget: ")
    assert not RunFolder(Path(run.run)).checkpoints.exists()


class Clock:
    """`now` for `train`, and a callback: 0 when the run begins to load, and 10 seconds after so many steps."""

    def __init__(self, at: int) -> None:
        self._at, self._asked, self.steps = at, False, 0

    def now(self) -> float:
        begun, self._asked = self._asked, True
        return 10.0 if begun and self.steps >= self._at else 0.0

    def __call__(self, run: Run) -> None:
        self.steps += 1


@pytest.mark.processes
@pytest.mark.ci
def test_ranks_go_by_the_clock_of_the_first(tmp_path: Path) -> None:
    """The second one's clock is another, and says that it is three times slower."""
    budget_run(tmp_path)
    first, second = run_ranks(2, Path(__file__).parent / "support/workers/budget_cases.py", "train_on_a_budget",
                              RUN_FILE=str(tmp_path / "run.yaml"))  # fmt: skip
    assert first["shares"] == second["shares"]
    assert first["rates"] == second["rates"]
    assert 0.95 * BUDGET <= first["seconds"] <= BUDGET


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "linear"])
def test_every_schedule_follows_the_time(schedule: str) -> None:
    """Whatever the pace, the rate falls with the time to the minimum, after more steps or fewer."""
    train = TrainConfig.model_validate({"budget": "1h", "schedule": schedule, "minimum_learning_rate": 0.1})
    for pace in (1.0, 3.0):
        shares = [step / 1000 for step in range(20, 1001)]
        rates = [rate_by_time(train, round(pace * 1000 * share), share, 10) for share in shares]
        assert rates == sorted(rates, reverse=True)
        assert rates[0] <= 1.0
        assert rates[-1] == pytest.approx(0.1)


@pytest.mark.slow
def test_a_run_slower_than_planned_says_so_after_ten_seconds_of_steps_and_has_one_speed(tmp_path: Path) -> None:
    run, said = budget_run(tmp_path), logged()
    machine, folder, prepared = Machine(steady), RunFolder(Path(run.run)), begun(run)
    plan = {"memory_share": 0.1, "tokens_per_second": {"low": 9e5, "mid": 1e6, "high": 2e6}, "verdict": "fits",
            "per_rank_gib": {"reserved": 0.5, "framework": 0.1}, "host_gib": 0.5, "micro_batch": 16,
            "activation_checkpointing": "none"}  # fmt: skip
    folder.plan.write_text(json.dumps(plan))
    result = train(run, prepared, ALONE, [machine], machine.clock)

    (at,) = [number for number, line in enumerate(said) if line.startswith("measured after step 21: ")]
    assert "tokens/s, planned 1,000,000 (-100%)" in said[at]
    assert "at this speed about 1" in said[at + 1]
    assert "more steps fit into the remaining 0:01:" in said[at + 1]
    assert " were planned" in said[at + 1]

    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    tokens = [row["tokens"] for row in rows if "tokens" in row]
    exact = (tokens[-1] - tokens[0]) / ((len(tokens) - 1) * 0.5)  # without the first step, which took no time here
    assert result["tokens_per_second"] == pytest.approx(exact)
    measured = json.loads(folder.plan.read_text())["measured"]["tokens_per_second"]
    assert measured == result["tokens_per_second"] == read_run(folder.path).tokens_per_second
    (folder.path / "result.json").unlink()  # as while it runs
    assert read_run(folder.path).tokens_per_second == pytest.approx(exact)
    table = compare_runs([read_run(folder.path)])[0]
    assert table[0]["tokens_per_second"] == pytest.approx(exact)


def test_warmup_is_in_steps_or_a_fraction_of_the_time() -> None:
    in_steps = TrainConfig.model_validate({"budget": "1h", "warmup": 4})
    assert [rate_by_time(in_steps, step, 0.001 * step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    of_time = TrainConfig.model_validate({"budget": "1h", "warmup": 0.1})
    rates = [rate_by_time(of_time, 10 * step, 0.05 * step, None) for step in range(3)]
    assert rates == pytest.approx([0.01, 0.5, 1.0])


def test_what_the_end_takes_is_kept_free_and_grows_where_the_machine_becomes_slower() -> None:
    budget = Budget(100.0)
    for seconds in (30.0, 1.0, 1.0):  # the first step compiles
        budget.note_step(seconds)
    budget.note_end("validation", 4.0)
    budget.note_end("checkpoint", 2.0)
    assert (budget.step_seconds, budget.end_seconds) == (1.0, 6.0)
    assert budget.needed_seconds(92.0) == 100.0
    assert budget.update_used_fraction(14.0, 10.0) == pytest.approx(10 / 90)
    for _ in range(5):
        budget.note_step(3.0)
    assert budget.end_seconds == 18.0
    for _ in range(5):
        budget.note_step(0.5)
    assert budget.end_seconds == 4.0  # half of the validation, and the files as before
    before = budget.update_used_fraction(50.0, 40.0)
    budget.note_end("validation", 0.0)
    assert budget.update_used_fraction(50.0, 40.0) == before  # it never falls
    assert budget.update_used_fraction(99.0, 90.0) == 1.0
    resumed = Budget(100.0, {"validation": [6.0, 1.0]}, used_fraction=0.9)  # begins with what the start before knew
    assert not resumed.is_measured
    assert (resumed.needed_seconds(90.0), resumed.update_used_fraction(50.0, 40.0)) == (96.0, 0.9)


def test_one_length_alone_and_the_schedule_that_a_budget_chooses(tmp_path: Path) -> None:
    read = TrainConfig.model_validate
    assert (read({"budget": "30min"}).schedule, read({}).schedule) == ("wsd", "cosine")
    assert read({"budget": "30min", "schedule": "cosine"}).schedule == "cosine"
    in_place_of_steps = load_run("novel-small", Overrides.parse(["train.budget=90s"]))
    assert in_place_of_steps.train.budget == 90.0
    done = artel("config", "check", write_run(tmp_path / "run.yaml", train={"budget": "30min"}))
    assert (done.returncode, "steps and budget cannot be combined" in done.stdout + done.stderr) == (2, True)


def test_a_short_budget_is_not_spent_on_compiling() -> None:
    cpu = torch.device("cpu")
    assert compile_choice("auto", cpu, None, 120.0).value == OFF
    assert compile_choice("auto", torch.device("cuda"), None, 120.0).value == "layers"


@pytest.mark.slow
def test_what_is_shown_and_written_of_a_run_without_known_steps(tmp_path: Path) -> None:
    """The budget is more than any machine needs; the rate is too small to change a weight, so patience soon ends it."""
    train = {"steps": None, "budget": "30min", "learning_rate": 1e-30}
    validate = {"every": 1, "patience": 1}
    file = write_run(tmp_path / "run.yaml", train=train, validate=validate, track=["console", "jsonl"])
    done = succeed("train", file)
    assert "steps of 64 for 30min, learning rate by wsd" in done.stderr
    assert "the text took" in done.stderr
    folder = file.with_suffix("")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    used = [line["budget_used"] for line in lines if "loss" in line]
    assert len(used) >= 2
    assert used == sorted(used)
    succeed("report", folder)
    again = artel("train", file)
    assert (again.returncode, "is complete" in again.stderr) == (0, True)
