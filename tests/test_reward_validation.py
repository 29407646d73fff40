"""Validation by the rewards of answers: beside the loss, or with other rewards than a run learns from."""

import json
from pathlib import Path

import pytest
import torch

from artel.config import load_run
from artel.errors import InputError
from artel.parallel import World
from artel.preparing import prepare
from artel.training.setup import open_run
from support.runs import TINY, artel, assert_same_models, merged, metrics, succeed, torchrun, write_run

# Each reward is 1 only if the function gets what the record has.
REWARDS = """
import re

def vowels(completion):
    return sum(letter in "aeiou" for letter in completion) / 10

def asked(completion, prompt, answer):
    assert [message["role"] for message in prompt] == ["user", "assistant", "user"], prompt
    (number,) = re.findall(r"\\d+", prompt[-1]["content"])
    return answer == f"It is {number}."

def given(completion, prompt, answer):
    return completion == answer
"""


@pytest.fixture(autouse=True)
def rewards():
    Path("rewards.py").write_text(REWARDS)


def chat_run(name, **changes):
    talks = [
        [
            ("user", f"Hello {index}"),
            ("assistant", "Yes?"),
            ("user", f"Which is number {index}?"),
            ("assistant", f"It is {index}."),
        ]
        for index in range(60)
    ]
    rows = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    Path("talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chat = {
        "objective": "chat",
        "data": {"sources": [{"path": "talks.jsonl", "format": "chat"}], "validation": 0.2, "block": 64},
        "chat": {"template": "chatml"},
        "train": {"batch": 8, "steps": 4},
        "validate": {"every": 2, "new_tokens": 10},
    }
    return write_run(Path(f"{name}.yaml"), merged(merged(TINY, chat), changes))


SCORED = {"validate": {"rewards": ["rewards.py:vowels", {"function": "rewards.py:asked", "weight": 2}], "answers": 8}}


def validations(name):
    return [line["validation"] for line in metrics(Path(name)) if "validation" in line]


def test_a_chat_run_has_a_reward_and_the_same_weights():
    plain, scored = chat_run("plain"), chat_run("scored", checkpoint={"best": "reward"}, **SCORED)
    succeed("train", plain)
    succeed("train", scored)
    assert_same_models(plain, scored)
    values = validations("scored")
    assert len(values) == 2
    for value, without in zip(values, validations("plain"), strict=True):
        assert {name: value[name] for name in without} == without
        assert value["reward/asked"] == 1
        assert value["reward"] == pytest.approx(2 + value["reward/vowels"])
    done = succeed("evaluate", "scored", "--json")
    (evaluated,) = json.loads(done.stdout)["models"]
    assert evaluated["metrics"]["reward"] in [value["reward"] for value in values]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_score_the_same_answers(parallel):
    succeed("train", chat_run("one", **SCORED))
    done = torchrun(2, "-m", "artel", "train", chat_run("two", parallel={"data": parallel}, **SCORED))
    assert done.returncode == 0, done.stderr
    for one, two in zip(validations("one"), validations("two"), strict=True):
        assert one["reward/asked"] == two["reward/asked"] == 1
        assert two["reward"] == pytest.approx(one["reward"], abs=0.05)


@pytest.mark.slow
def test_of_seq2seq_the_answers_that_it_generates_are_scored():
    rows = [{"input": f"number {index}", "output": "a b c"} for index in range(60)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = merged(
        {name: value for name, value in TINY.items() if name != "model"},
        {
            "objective": "seq2seq",
            "model": {"config": {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1,
                                 "num_heads": 2, "dropout_rate": 0}},
            "data": {"sources": [{"path": "pairs.jsonl", "format": "pairs"}], "validation": 0.2},
            "train": {"batch": 16, "steps": 60, "learning_rate": 1e-2},
            "validate": {"every": 10, "rewards": ["rewards.py:given"]},
            "checkpoint": {"best": "reward"},
        },
    )  # fmt: skip
    succeed("train", write_run(Path("run.yaml"), run))
    values = validations("run")
    assert all(value["reward"] == value["exact_match"] for value in values)
    assert values[-1]["reward"] == 1


def test_other_rewards_validate_what_a_policy_learns(policy_run):
    run = policy_run("run", validate={"rewards": [{"length": {"minimum": 0, "maximum": 100}}]})
    succeed("train", run)
    assert {value["reward"] for value in validations("run")} == {1.0}
    assert all(line["reward"] != 1 for line in metrics(Path("run")) if "loss" in line)


@pytest.fixture
def policy_run():
    rows = [{"prompt": f"Number {number} is written as"} for number in range(60)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = {
        "objective": "policy",
        "data": {"sources": [{"path": "prompts.jsonl", "format": "prompts"}], "validation": 0.1, "block": 48},
        "policy": {"answers": 4, "new_tokens": 10, "rewards": ["rewards.py:vowels"]},
        "train": {"batch": 8, "steps": 2},
    }
    return lambda name, **changes: write_run(Path(f"{name}.yaml"), merged(merged(TINY, policy), changes))


def test_an_objective_without_answers_is_refused():
    run = write_run(Path("run.yaml"), validate={"rewards": ["json"]}, objective="masked")
    done = artel("config", "check", run)
    assert done.returncode == 2
    assert "validate.rewards" in done.stderr
    assert "chat" in done.stderr
    assert "seq2seq" in done.stderr


def test_a_started_run_may_add_rewards():
    plain, scored = (prepare(load_run(str(run))).open() for run in (chat_run("plain"), chat_run("scored", **SCORED)))
    assert plain.folder != scored.folder
    assert plain.digest == scored.digest


def test_prompts_without_space_are_refused():
    config = load_run(str(chat_run("run", **merged(SCORED, {"validate": {"new_tokens": 60}}))))
    prepared = prepare(config)
    with pytest.raises(InputError, match=r"validate.rewards: none of \d+ "):
        open_run(prepared.config, prepared, World(0, 1, 0, torch.device("cpu")))


def test_a_run_that_fails_once_its_rewards_are_open_leaves_no_process(policy_run):
    values = {"rewards": ["rewards.py:vowels"], "patience": 1}
    config = load_run(str(policy_run("run", data={"validation": 0.0}, validate=values)))
    prepared = prepare(config)
    with pytest.raises(InputError, match=r"validate.patience") as error:
        open_run(prepared.config, prepared, World(0, 1, 0, torch.device("cpu")))
    assert _reward_processes() == []
    assert error.traceback  # which kept them alive


def _reward_processes():
    children = [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    return [pid for pid in children if b"artel.rewards.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
