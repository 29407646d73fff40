"""What is seen of a run while it works: the bar on a terminal, lines without one, and how it ends."""

import json
import os
import re
import shlex
from pathlib import Path

import pytest

from artel.config import RunConfig
from artel.objectives import build_objective
from artel.preparing import prepare
from artel.training.evaluation import ProgressMessages
from artel.training.metrics.trackers import ConsoleTracker
from artel.training.run_folder import RunFolder
from support.messages import logged
from support.runs import succeed, write_run
from support.stores import run_of
from support.waiting import Screen

FIGURES = {"loss": 3.25, "tokens_per_second": 1234.0}


class Seen:
    """A pseudo-terminal that a tracker writes to, and what is seen on it."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        self.stream = os.fdopen(slave, "w")
        self._screen = Screen(self._master)

    def until(self, text: str) -> None:
        self._screen.read_until(lambda seen: text in seen)

    def close(self) -> None:
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    seen = Seen()
    yield seen
    seen.close()


def test_the_bar_moves_every_step_and_says_what_is_done_meanwhile(terminal):
    tracker = ConsoleTracker(RunConfig(), RunFolder(Path()), 2, 9, terminal.stream, bar_seconds=0.0)
    terminal.until("2/9")
    tracker.show_progress("compiling")
    terminal.until("compiling")
    for step in range(3, 10):
        tracker.on_step(step)  # none of them is logged
        terminal.until(f"{step}/9")
    tracker.log_training({"step": 9, **FIGURES})
    terminal.until("loss 3.2500")
    for share in (0.0, 0.4, 0.8):
        tracker.show_progress("evaluating", share)
        terminal.until(f"evaluating {share:.0%}")
    tracker.close()


def test_the_bar_of_a_finished_run_is_complete(terminal):
    run = RunConfig(train={"budget": "1h"})
    tracker = ConsoleTracker(run, RunFolder(Path()), 0, None, terminal.stream, bar_seconds=0.0)
    tracker.log_training({"step": 9, "budget_used": 0.88, **FIGURES})
    tracker.show_progress("writing the checkpoint")
    terminal.until("88%")
    tracker.on_finish(None)
    terminal.until("100%")
    tracker.close()
    tracker = ConsoleTracker(RunConfig(), RunFolder(Path()), 0, 9, terminal.stream, bar_seconds=0.0)
    tracker.on_step(5)
    tracker.on_finish(None)  # stopped early
    terminal.until("5/5")
    tracker.close()


def test_without_a_terminal_there_are_lines(tmp_path):
    with (tmp_path / "lines").open("w+") as stream:
        for seconds in (0.0, 1e9):
            tracker = ConsoleTracker(RunConfig(), RunFolder(Path()), 0, 40, stream, line_seconds=seconds)
            for step in range(1, 41):
                tracker.on_step(step)
                if step % 20 == 0:
                    tracker.log_training({"step": step, **FIGURES})
            tracker.show_progress("evaluating", 0.4)
            tracker.close()
        stream.seek(0)
        lines = stream.read().splitlines()
    assert lines[0].startswith("step 20 of 40 · loss 3.2500 · 1,234 tokens/s · 0:00:0")
    assert lines[1:] == [
        "step 40 of 40 · loss 3.2500 · 1,234 tokens/s",
        "step 40 of 40 · evaluating 40%",
        "step 40 of 40 · loss 3.2500 · 1,234 tokens/s",  # the end is told in any case
    ]


def test_the_training_loss_is_a_dash_until_it_is_logged(tmp_path):
    with (tmp_path / "lines").open("w+") as stream:
        tracker = ConsoleTracker(RunConfig(), RunFolder(Path()), 0, 40, stream, line_seconds=1e9)
        tracker.log_validation({"step": 1, "epoch": 0.1, "validation": {"loss": 3.5}})
        tracker.log_training({"step": 2, **FIGURES})
        tracker.log_validation({"step": 2, "epoch": 0.2, "validation": {"loss": 3.0}})
        tracker.close()
        stream.seek(0)
        titles, *rows = (re.split(r"\s{2,}", line.strip()) for line in stream.read().splitlines())
    assert titles == ["step", "epoch", "training loss", "validation loss"]
    assert rows == [["1", "0.10", "-", "3.5000"], ["2", "0.20", "3.2500", "3.0000"]]


def test_of_a_run_on_a_budget_the_time_is_shown(terminal, tmp_path):
    run = RunConfig(train={"budget": "1h"})
    tracker = ConsoleTracker(run, RunFolder(Path()), 0, None, terminal.stream, bar_seconds=0.0)
    tracker.log_training({"step": 9, "budget_used": 0.25, **FIGURES})
    terminal.until("25%")
    tracker.close()
    with (tmp_path / "lines").open("w+") as stream:
        tracker = ConsoleTracker(run, RunFolder(Path()), 0, None, stream, line_seconds=0.0)
        tracker.on_step(9)
        tracker.log_training({"step": 9, "budget_used": 0.25, **FIGURES})
        tracker.show_progress("evaluating", 0.4)
        tracker.close()
        stream.seek(0)
        lines = stream.read().splitlines()
    assert lines == [
        "step 9, 25% of the time · loss 3.2500 · 1,234 tokens/s · 0:45:00 left",
        "step 9, 25% of the time · evaluating 40%",
    ]


def test_news_come_now_and_then():
    messages = logged()
    now = iter([0.0, 9.9, 10.0, 19.9, 20.0])
    news = ProgressMessages("evaluating", clock=lambda: next(now))
    for share in (0.1, 0.4, 0.5, 0.8):
        news(share)
    assert messages == ["evaluating 40%", "evaluating 80%"]


OBJECTIVES = {
    "causal": ({}, "artel generate"),
    "chat": ({"objective": "chat", "data": {"block": 200}}, "artel chat"),
    "masked": (
        {"objective": "masked", "model": {"config": {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 32,
         "num_attention_heads": 2, "intermediate_size": 32}}}, "artel generate",
    ),
    "span_qa": (
        {"objective": "span_qa", "data": {"sources": [{"format": "dummy", "kind": "questions", "documents": 60}],
         "block": 64}, "model": {"config": {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 32,
         "num_attention_heads": 2, "intermediate_size": 32}}, "tokenizer": {"train": {"vocab": 300}},
         "span_qa": {"question": 24, "stride": 8}}, "artel generate",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_run_says_what_it_does_and_ends_with_a_command_that_works(tmp_path, objective):
    changes, verb = OBJECTIVES[objective]
    if objective == "chat":
        rows = "".join(
            f'{{"messages": [{{"role": "user", "content": "what is {number}?"}}, {{"role": "assistant", "content": '
            f'"a number, {number}"}}]}}\n' for number in range(60)
        )  # fmt: skip
        (tmp_path / "talks.jsonl").write_text(rows)
        source = {"path": str(tmp_path / "talks.jsonl"), "format": "chat"}
        changes = {**changes, "data": {"sources": [source], "block": 200}, "tokenizer": {"train": {"vocab": 280}}}
    run = write_run(tmp_path / "a run.yaml", train={"steps": 2, "batch": 8}, **changes, track=["console", "jsonl"])
    lines = succeed("train", run).stderr.splitlines()
    at = [next(number for number, line in enumerate(lines) if line.endswith(message))
          for message in ("checking the run, its model and its texts", "turning text into tokens", "loading the model",
                       "next:")]  # fmt: skip
    assert at == sorted(at)
    commands = [shlex.split(line) for line in lines[at[-1] + 1 :]]
    assert [" ".join(command[:2]) for command in commands] == [verb, "artel report"]
    for command in commands:
        end = ["--script", "/dev/null"] if verb == "artel chat" and command[1] == "chat" else []
        succeed(*command[1:], *end)


def last_command(run):
    """The words of the command that a run ends with."""
    prepared = prepare(run)
    objective = build_objective(prepared.config, prepared.tokenizer())
    return shlex.split(objective.demo_command("runs/x", objective.dataset(prepared.open().train)))


@pytest.mark.parametrize(
    ("validate", "asked"),
    [({}, "Все счастливые семьи похожи"), ({"prompts": ["Все смешалось", "Анна"]}, "Все смешалось")],
)
def test_the_last_command_continues_a_prompt_of_the_run_or_the_words_of_its_text(tmp_path, validate, asked):
    text = "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему."
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    run = run_of(tmp_path, data={"sources": [{"path": "text.txt"}], "block": 80}, validate=validate)
    assert last_command(run) == ["artel", "generate", "runs/x", "--prompt", asked]


def test_the_last_command_of_names_has_a_text_of_the_data(tmp_path):
    texts = [f"Анна Каренина приехала в Москву {number} раз." for number in range(30)]
    rows = [json.dumps({"text": text, "label": [[0, 13, "PER"]]}, ensure_ascii=False) for text in texts]
    (tmp_path / "names.jsonl").write_text("\n".join(rows), encoding="utf-8")
    data = {"sources": [{"path": "names.jsonl", "format": "entities"}], "block": 80}
    run = run_of(tmp_path, objective="tokens", data=data, tokenizer={"train": {"vocab": 300}})
    assert last_command(run)[-1] in texts


def test_the_last_command_of_questions_has_one_of_the_data_with_its_answer(tmp_path):
    context = "Анна Каренина приехала в Москву утром, когда шёл снег."
    answers = [{"text": "утром", "answer_start": context.index("утром")}]
    asked = [{"id": f"{n}", "question": f"Когда приехала Анна, раз {n}?", "answers": answers} for n in range(30)]
    squad = {"data": [{"title": "a", "paragraphs": [{"context": context, "qas": asked}]}]}
    (tmp_path / "questions.json").write_text(json.dumps(squad, ensure_ascii=False), encoding="utf-8")
    data = {"sources": [{"path": "questions.json", "format": "squad"}], "block": 128}
    sections = {"span_qa": {"question": 40, "stride": 30}, "tokenizer": {"train": {"vocab": 300}}}
    command = last_command(run_of(tmp_path, objective="span_qa", data=data, **sections))
    assert command[4] in [one["question"] for one in asked]
    assert command[5] == "--context"
    assert "утром" in command[6]
