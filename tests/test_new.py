"""`artel new`: four answers become a run file that passes `config check` and `plan`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml

from artel.cli.main import main
from artel.config import load_run
from artel.errors import InputError
from artel.planning import check_run
from artel.planning.hardware import find_hardware
from artel.planning.new import Given, answer_questions, run_file
from artel.planning.new.look import look_at
from artel.planning.plan import make_plan
from artel.registry import OBJECTIVES
from support.runs import artel

CONVERSATION = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A small model."}]
ANSWER = {"text": ["the forest"], "answer_start": [11]}
PARAGRAPH = {"context": "Anna is in the forest.", "qas": [{"id": "1", "question": "Where is Anna?", "answers": []}]}
PARAGRAPH["qas"][0]["answers"] = [{"text": "the forest", "answer_start": 11}]


@pytest.fixture
def texts() -> dict[str, str]:
    """A small text for each objective; the second has several kinds of files."""
    words = random.Random(0)
    Path("novel.txt").write_text(" ".join("".join(words.choices("aeiknorst", k=4)) for _ in range(8000)))
    Path("talks.jsonl").write_text("".join(json.dumps({"messages": CONVERSATION, "n": n}) + "\n" for n in range(40)))
    preference = {"prompt": "Who are you?", "chosen": "A small model.", "rejected": "A tree."}
    Path("better.jsonl").write_text("".join(json.dumps({**preference, "n": n}) + "\n" for n in range(40)))
    Path("squad.json").write_text(json.dumps({"version": "1.1", "data": [{"title": "a", "paragraphs": [PARAGRAPH]}]}))
    names = {"write": "novel.txt", "fill-in": "novel.txt", "chat": "talks.jsonl", "prefer": "better.jsonl"}
    return {**names, "answer": "squad.json"}


def flags(text: str, learn: str, model: str = "scratch", time: str = "10min") -> list[str]:
    return ["--text", text, "--learn", learn, "--from", model, "--time", time]


@pytest.mark.parametrize("learn", [OBJECTIVES[name].verb for name in OBJECTIVES.names])
def test_whatever_is_to_be_learned_the_file_passes_check(texts, learn):
    assert main_ends(["new", "run.yaml", *flags(texts[learn], learn)]) == 0
    run = load_run("run.yaml")
    check_run(run)
    assert OBJECTIVES[run.objective].verb == learn
    assert run.train.budget == 600
    assert run.model.auto == (learn == "write")


def main_ends(arguments: list[str], monkeypatch=None) -> int:
    result = artel(*arguments)
    print(result.stdout, result.stderr)
    return result.returncode
