"""The report and `artel watch` of a run that learns from rewards: its rounds, also before the first step."""

import json
import time

import pytest
from rich.console import Console
from selectolax.lexbor import LexborHTMLParser

from artel.cli.main import main
from artel.errors import InputError
from artel.objectives.rollouts import Rollout, Round, Segment, round_file
from artel.reports import rounds as report_rounds
from artel.reports.page import Page
from artel.reports.rounds import RoundsReader, describe_round
from artel.reports.run_data import read_run, read_runs
from artel.reports.watch import render_screen

HOSTILE = "</td><script>alert(1)</script>\x1b[2J\u202e"


def rollout(number: int, answer: int, reward: float | None, **changes) -> Rollout:
    values = {
        "number": number, "index": number, "epoch": 0, "answer": answer, "attempt": 0, "seed": 1,
        "prompt_ids": [1, 2], "ids": [3] * 5, "log_probs": [-0.5] * 5, "text": f"answer {number}.{answer}{HOSTILE}",
        "cut_off": False, "rewards": {"<b>": reward}, "reward": reward, "failures": {}, "prompt": f"prompt{HOSTILE}",
    }  # fmt: skip
    return Rollout(**{**values, **changes})


def make_run(folder, rounds=6, prompts=16, steps=6, state="stopped", doing=""):
    """A run with rounds of four answers to each prompt, whose rewards rise with the round."""
    (folder / "ranks").mkdir(parents=True)
    (folder / "config.yaml").write_text("objective: policy\ntrain: {steps: 8}\n")
    status = {"rank": 0, "host": "node0", "pid": 1, "device": "cpu", "step": steps, "memory_gib": 1.0, "state": state,
              "message": "", "time": time.time() + 1000, "every": 5.0, "doing": doing}  # fmt: skip
    (folder / "ranks" / "rank-00000.json").write_text(json.dumps(status))
    lines = [
        {"step": step, "loss": 0.1, "reward": step / 10, "reward_deviation": 0.05, "reward/<b>": step / 10,
         "signal": 0.5, "cut_off": 0.25, "length_min": 1.0, "length_mean": 4.0, "length_max": 9.0,
         "seconds_writing": 2.0, "seconds_scoring": 1.0, "tokens": step * 10, "seconds": float(step)}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    if steps:
        lines.append({"step": steps, "validation": {"reward": 0.4, "length_mean": 3.0}})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if rounds:
        (folder / "rollouts").mkdir()
    for number in range(rounds):
        rollouts = [rollout(prompt, answer, number + prompt + answer / 10)
                    for prompt in range(prompts) for answer in range(4)]  # fmt: skip
        rollouts[0] = rollout(0, 0, None, failures={"<b>": HOSTILE}, cut_off=True)
        Round(number, tuple(rollouts)).write(folder / "rollouts")
    return folder


def texts(tree, selector):
    return [" ".join(node.text().split()) for node in tree.css(selector)]


def test_best_and_worst_answers_are_shown_as_text(tmp_path):
    folder = make_run(tmp_path / "run")
    tree = LexborHTMLParser(Page().html(read_runs([str(folder)])))
    assert texts(tree, "#rounds summary") == ["Round 5", "Round 3", "Round 2", "Round 0"]
    newest = tree.css_first("#round-0-5")
    rewards = [row.css_first("td").attributes["data-value"] for row in newest.css("tbody tr")]
    assert rewards[0] == "20.3"
    assert rewards[-2:] == ["5.1", ""]
    assert rewards[:-1] == sorted(rewards[:-1], key=float, reverse=True)
    assert len(rewards) == 40
    assert "24 answers are left out: rollouts/000005.jsonl.zst" in newest.text()
    cells = texts(newest, "td.answer")
    assert cells[0] == (
        "prompt</td><script>alert(1)</script>\\x1b[2J\\u202e answer 15.3</td><script>alert(1)</script>\\x1b[2J\\u202e"
    ).replace(" answer", "answer")
    assert "cut off at policy.new_tokens" in cells[-1]
    assert len(tree.css("script")) == 3
    assert tree.css_first("#rounds script") is None


def test_metrics_of_rounds_share_plots(tmp_path):
    page = LexborHTMLParser(Page("ru").html(read_runs([str(make_run(tmp_path / "run"))])))
    charts = json.loads(page.css_first("script#data").text())["plots"]["charts"]
    ids = [chart["id"] for chart in charts]
    assert [id.rpartition("-")[0] for id in ids[:5]] == [
        "round-reward", "round-rewards", "round-signal", "round-length", "round-seconds"
    ]  # fmt: skip
    assert len(ids) == len(set(ids))
    training, validation = charts[0]["traces"]
    assert (training["value"][-1], training["band"][-1]) == (0.6, 0.05)
    assert (validation["value"], validation["band"], validation["validation"]) == ([0.4], None, True)
    assert [trace["style"] for trace in charts[3]["traces"]] == [0, 1, 1, 2]


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_before_its_first_round_it_says_what_it_does(tmp_path, monkeypatch, capfd, state):
    folder = make_run(tmp_path / "run", rounds=0, steps=0, state=state, doing="writing answers")
    run = read_run(folder)
    verdict = LexborHTMLParser(Page().html([run])).css_first(".verdict").text()
    assert "writing answers" in verdict
    assert "step 0" in verdict
    console = Console(width=90, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(render_screen(run, 90))
    assert ("writing answers" in captured.get()) == (state == "running")
    monkeypatch.setattr("sys.argv", ["artel", "report", str(folder)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code in (0, None)
    assert f"{state} at step 0, writing answers" in capfd.readouterr().err


def test_watch_shows_the_best_and_the_worst_answer(tmp_path):
    folder = make_run(tmp_path / "run", state="running")
    console = Console(width=200, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(render_screen(read_run(folder), 200))
    lines = captured.get().splitlines()
    assert any("reward 12.7714 ± " in line and "signal 100%" in line and "validation 0.4000" in line for line in lines)
    best, worst = (next(line for line in lines if line.startswith(title)) for title in ("best", "worst"))
    assert best.split()[1:4] == ["20.3", "answer", "15.3</td><script>alert(1)</script>\\x1b[2J\\u202e"]
    assert worst.split()[1] == "5.1"


def test_damaged_rounds_are_named_together(tmp_path):
    folder = make_run(tmp_path / "run")
    for number in (0, 5):
        file = round_file(folder / "rollouts", number)
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(InputError) as error:
        read_run(folder)
    assert [problem.where for problem in error.value.problems] == [
        str(round_file(folder / "rollouts", number)) for number in (5, 0)
    ]


def test_all_turns_count_and_a_failed_call_is_no_failed_reward(tmp_path):
    rollouts = [
        rollout(0, 0, 1.0, ids=[], log_probs=[], restarts=[Segment([1], [2, 3, 4], [-0.5, None, -0.5])]),
        rollout(0, 1, 0.5, log_probs=[-0.5, None, None, None, -0.5], failures={"tools": "LookupError"}),
        rollout(0, 2, None, failures={"<b>": "ValueError"}),
    ]
    Round(0, tuple(rollouts)).write(tmp_path)
    _, (view,) = RoundsReader(tmp_path).read()
    assert [answer.tokens for answer in view.shown] == [2, 2, 5]
    assert (view.mean_length, view.failed) == (3, 1)
    assert describe_round(view).endswith(", failed rewards: 1")


def test_many_failed_calls_do_not_hide_failed_rewards(tmp_path):
    failed_call = {"failures": {"tools": "LookupError"}}
    rollouts = [rollout(number, 0, float(number), **failed_call) for number in range(50)]
    rollouts.append(rollout(50, 0, 25.5, failures={"<b>": "ValueError"}))
    Round(0, tuple(rollouts)).write(tmp_path)
    _, (view,) = RoundsReader(tmp_path).read()
    assert [answer.prompt_number for answer in view.shown if "<b>" in answer.failures] == [50]
    assert (view.best.reward, view.worst.reward) == (49, 0)


def test_rounds_without_rewards_leave_the_loss_in_front(tmp_path, monkeypatch, capfd):
    folder = make_run(tmp_path / "run", rounds=0, steps=0)
    (folder / "rollouts").mkdir()
    Round(0, (rollout(0, 0, None, rewards={}),)).write(folder / "rollouts")
    line = {"step": 1, "loss": 0.25, "length_mean": 5.0, "tokens": 10, "seconds": 1.0}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    run = read_run(folder)
    assert (len(run.rounds), run.main_metric) == (1, "loss")
    tree = LexborHTMLParser(Page().html([run]))
    assert "reward" not in tree.css_first("#rounds details .soft").text().lower()
    assert "Reward" not in tree.css_first(".tiles").text()
    console = Console(width=90, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(render_screen(run, 90))
    monkeypatch.setattr("sys.argv", ["artel", "report", str(folder)])
    with pytest.raises(SystemExit):
        main()
    for text in (captured.get(), capfd.readouterr().err):
        assert "· training" in text
        assert not {"reward", "best", "nan"} & set(text.split())


def test_a_round_without_answers_is_left_out(tmp_path, monkeypatch):
    for number in range(2):
        Round(number, (rollout(0, 0, 1.0),)).write(tmp_path)
    read = report_rounds.load_round
    monkeypatch.setattr(report_rounds, "load_round", lambda folder, number: Round(1, ()) if number else read(folder, 0))
    count, views = RoundsReader(tmp_path).read()
    assert (count, [view.number for view in views]) == (2, [0])
