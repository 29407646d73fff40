"""Learning from rewards: rounds of answers that survive kills, and do not depend on the number of processes."""

import json
import math
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from support import WORKERS
from support.ranks import run_ranks
from support.runs import (
    TINY,
    artel,
    assert_same_models,
    kill,
    losses,
    merged,
    metrics,
    read_rollouts,
    refused,
    start,
    succeed,
    torchrun,
    write_run,
)
from support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[1]
CASES = WORKERS / "layout_cases.py"
# Tokens of an untrained model are random, so answers to a prompt differ in their number of vowels: there is signal.
VOWELS = """
def vowels(completion):
    return sum(letter in "aeiou" for letter in completion) / 10
"""
# The run is killed while its 40th answer is scored, once.
KILLS = """
import os, pathlib, signal

def vowels(completion):
    with open("calls", "ab") as calls:
        calls.write(b".")
    if os.stat("calls").st_size == 40:
        os.kill(int(pathlib.Path("pid").read_text()), signal.SIGKILL)
    return sum(letter in "aeiou" for letter in completion) / 10
"""
HANGS = """
import time

def vowels(completion, number):
    if number % 10 == 3:
        time.sleep(1000)
    return len(completion) / 10
"""
NOT_DETERMINISTIC = """
import random

def vowels(completion):
    return sum(letter in "aeiou" for letter in completion) / 10 + random.random()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Number {number} is written as", "number": number} for number in range(60)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(VOWELS)
    return tmp_path


POLICY = merged(
    TINY,
    {
        "objective": "policy",
        "data": {"sources": [{"path": "prompts.jsonl", "format": "prompts"}], "validation": 0.1, "block": 48},
        "policy": {"answers": 4, "new_tokens": 10, "rewards": ["rewards.py:vowels"]},
        "train": {"batch": 8, "learning_rate": 3e-3},
        "checkpoint": {"every": 2},
    },
)


def policy_run(folder, name="run", policy=None, **changes):
    return write_run(folder / f"{name}.yaml", merged(POLICY, {"policy": policy or {}} | changes))


def test_each_prompt_is_learned_once_and_writer_and_learner_agree(folder):
    succeed("train", policy_run(folder))
    rounds = read_rollouts(folder / "run")
    answers = [(line["number"], line["answer"]) for round_lines in rounds for line in round_lines]
    assert answers == [(number, answer) for number in range(48) for answer in range(4)]
    lines = [line for line in metrics(folder / "run") if "loss" in line]
    assert len(lines) == 6
    assert all(line["mismatch"] <= 1e-5 for line in lines)
    assert all(0 < line["reward"] < 1 and line["signal"] > 0.5 for line in lines)
    assert all(line["rewards"].keys() == {"vowels"} for round_lines in rounds for line in round_lines)
    validation = [line["validation"] for line in metrics(folder / "run") if "validation" in line]
    assert validation[-1]["reward"] > 0


@pytest.mark.slow
@pytest.mark.long
def test_reward_rises(folder):
    succeed("train", policy_run(folder, train={"steps": 40, "learning_rate": 1e-2, "batch": 8}))
    rewards = [line["reward"] for line in metrics(folder / "run") if "reward" in line]
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        {},
        pytest.param({"steps": 3}, marks=pytest.mark.long),
        pytest.param({"preset": "dapo", "steps": 2}, marks=pytest.mark.long),
        pytest.param({"preset": "raft", "steps": 2}, marks=pytest.mark.long),
    ],
)
def test_a_killed_run_ends_like_an_undisturbed_one(folder, policy):
    undisturbed, killed = policy_run(folder, "undisturbed", policy), policy_run(folder, "killed", policy)
    succeed("train", undisturbed)
    (folder / "rewards.py").write_text(KILLS)
    process = start("train", killed)
    (folder / "pid").write_text(str(process.pid))
    process.wait()
    assert process.returncode == -signal.SIGKILL
    (folder / "rewards.py").write_text(VOWELS)
    process = start("train", killed)
    file = folder / "killed" / "rollouts" / f"{2 // policy.get('steps', 1):06d}.jsonl.zst"
    wait_until(lambda: file.exists() or process.poll() is not None, lambda: "a round")
    kill(process)
    succeed("train", killed)
    assert_same_models(undisturbed, killed)
    assert read_rollouts(folder / "undisturbed") == read_rollouts(folder / "killed")


@pytest.mark.slow
def test_a_judge_that_is_not_deterministic_is_asked_once(folder):
    (folder / "rewards.py").write_text(NOT_DETERMINISTIC)
    run = policy_run(folder)
    process = start("train", run)
    file = folder / "run" / "rollouts" / "000003.jsonl.zst"
    wait_until(lambda: file.exists() or process.poll() is not None, lambda: "a round")
    kill(process)
    before = read_rollouts(folder / "run")
    succeed("train", run)
    assert read_rollouts(folder / "run")[: len(before)] == before


@pytest.mark.ci
@pytest.mark.processes
def test_two_processes_write_the_same_answers(folder):
    one, two = policy_run(folder, "one"), policy_run(folder, "two")
    succeed("train", one)
    done = torchrun(2, "-m", "artel", "train", two)
    assert done.returncode == 0, done.stderr
    texts = [[line["text"] for line in round_lines] for round_lines in read_rollouts(folder / "one")]
    assert texts == [[line["text"] for line in round_lines] for round_lines in read_rollouts(folder / "two")]
    for step, (loss, norm) in losses(folder / "one").items():
        assert (loss, norm) == pytest.approx(losses(folder / "two")[step], rel=1e-4, abs=1e-6)


def test_a_run_without_signal_is_refused(folder):
    (folder / "rewards.py").write_text("def vowels(completion):\n    return 1.0\n")
    done = refused("train", policy_run(folder))
    assert "policy.rewards" in done.stderr
    assert "same reward (1)" in done.stderr
    assert "policy.new_tokens" in done.stderr  # most answers are cut off


def test_mistakes_are_reported_together(folder):
    done = artel("config", "check", policy_run(folder, policy={"rewards": [], "new_tokens": 48, "kl": 0.1}))
    assert done.returncode == 2
    for key in ("policy.rewards", "policy.new_tokens", "policy.kl"):
        assert key in done.stderr


@pytest.mark.slow
def test_rewards_that_hang_cost_their_limit_only(folder):
    (folder / "rewards.py").write_text(HANGS)
    succeed("train", policy_run(folder, policy={"reward_timeout": 1}, train={"steps": 2}))
    lines = [line for round_lines in read_rollouts(folder / "run") for line in round_lines]
    failed = [line for line in lines if line["failures"]]
    assert failed
    assert all(line["reward"] is None for line in failed)
    assert len(failed) < len(lines) / 2


@pytest.mark.parametrize("page", ["docs/policy.md", "docs/ru/policy.md"])
def test_the_python_of_the_page(folder, page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    function = next(block for block in blocks if "# rewards.py" in block)
    reader = next(block for block in blocks if "zstandard" in block)
    (folder / "rewards.py").write_text(function)
    rows = [{"prompt": f"Number {number} is written as", "answer": "a e i o u n s t"} for number in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = {"rewards": ["rewards.py:overlap"]}
    succeed("train", policy_run(folder, policy=policy, train={"steps": 1, "batch": 4}), "run=runs/policy")
    exec(reader, {})
    assert len(capsys.readouterr().out.splitlines()) == 16


# After 32 answers all rewards are equal.
SIGNAL_ONCE = """
import os

def vowels(completion):
    with open("calls", "ab") as calls:
        calls.write(b".")
    return sum(letter in "aeiou" for letter in completion) / 10 if os.stat("calls").st_size <= 32 else 1.0
"""


@pytest.mark.parametrize("preset", ["raft", "online_dpo"])
def test_a_round_without_signal_teaches_nothing(folder, preset):
    (folder / "rewards.py").write_text(SIGNAL_ONCE)
    run = further_run(folder, policy={"preset": preset}, data={"validation": 0}, train={"steps": 2})
    succeed("train", run)
    first, second = [line for line in metrics(folder / "run") if "loss" in line]
    assert first["loss"] > 0
    assert first["gradient_norm"] > 0
    assert 0 < first["entropy"] < 6  # ln 400
    assert (second["signal"], second["loss"], second["gradient_norm"]) == (0, 0, 0)
    assert "clipped_low" not in first


def further_run(folder, name="run", model=None, **changes):
    """A run that trains a model further."""
    if not (folder / "base").is_dir():
        succeed("train", write_run(folder / "base.yaml", merged(TINY, {"data": {"block": 48}, "train": {"steps": 1}})))
    base = {key: value for key, value in POLICY.items() if key not in ("model", "tokenizer")}
    base["model"] = {"from": str(folder / "base" / "model"), **(model or {})}
    store = {"run": name, "data": {"store": "stores"}}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(merged(merged(base, store), changes)))
    return file


LORA = {"lora": {"rank": 4}}
# The reference is the base under an adapter, or a second model in memory.
REFERENCES = {
    "adapter": {"model": LORA, "policy": {"kl": 0.5}},
    "model": {"policy": {"kl": 0.5}},
    "pairs": {"policy": {"preset": "online_dpo"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFERENCES)
def test_the_reference_is_the_model_before_training(folder, case):
    succeed("train", further_run(folder, **REFERENCES[case], train={"steps": 3}))
    lines = [line for line in metrics(folder / "run") if "loss" in line]
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["kl"] > 0
    if case == "pairs":
        assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_rewards_score_a_model_that_learned_another_objective(folder):
    succeed("train", write_run(folder / "base.yaml", merged(TINY, {"data": {"block": 48}, "train": {"steps": 1}})))
    done = succeed("evaluate", "base", "--data", policy_run(folder), "--json")
    (result,) = json.loads(done.stdout)["models"]
    assert result["objective"] == "policy"
    assert 0 < result["metrics"]["reward"] < 1


OF_THE_FIRST = (
    "checkpoints",
    "model",
    "result.json",
    "metrics.jsonl",
    "starts.jsonl",
    "ranks",
    "micro_batches",
    "plan.json",
)
LAYOUTS = {
    "ddp-2": (2, {}),
    "zero1-2": (2, {"data": "zero1"}),
    "zero2-2": (2, {"data": "zero2"}),
    "fsdp-2": (2, {"data": "fsdp"}),
    "tensor-2": (2, {"tensor": 2}),
    "fsdp-4": (4, {"data": "fsdp"}),
    "hsdp-2x2": (4, {"data": "hsdp", "shard": 2}),
    "fsdp-tensor-2x2": (4, {"data": "fsdp", "tensor": 2}),
}


@pytest.mark.ci
@pytest.mark.processes
def test_the_same_answers_teach_the_same_under_every_layout(folder):
    """Loss and gradient norm within 1e-5: each layout learns from the rollouts of one process."""
    changes = {
        "policy": {"preset": "grpo", "steps": 2},
        "train": {"steps": 4, "micro_batch": 2},
        "data": {"validation": 0},
    }
    layouts = {"one": (1, {}), **LAYOUTS}
    files = {name: policy_run(folder, name, parallel=parallel, **changes) for name, (_, parallel) in layouts.items()}
    succeed("train", files["one"])
    expected = losses(folder / "one")
    for name in LAYOUTS:
        shutil.copytree(folder / "one", folder / name, ignore=shutil.ignore_patterns(*OF_THE_FIRST))
    for world in (2, 4):
        names = [name for name, (processes, _) in LAYOUTS.items() if processes == world]
        run_ranks(world, CASES, "run_files", 400, CASES=os.pathsep.join(str(files[name]) for name in names))
    for name in LAYOUTS:
        measured = losses(folder / name)
        assert measured.keys() == expected.keys()
        for step, (loss, norm) in expected.items():
            assert measured[step][0] == pytest.approx(loss, rel=1e-5, abs=1e-7), (name, step)
            assert measured[step][1] == pytest.approx(norm, rel=1e-5), (name, step)


@pytest.mark.processes
@pytest.mark.parametrize("case", REFERENCES)
def test_a_sharded_reference_gives_the_same_loss(folder, case):
    """Loss and gradient norm of ddp and fsdp, within 1e-5: both learn from the rollouts of one process."""
    changes = merged(REFERENCES[case], {"train": {"steps": 3, "micro_batch": 2}, "data": {"validation": 0}})
    files = {
        name: further_run(folder, name, **changes, **({} if name == "one" else {"parallel": {"data": name}}))
        for name in ("one", "ddp", "fsdp")
    }
    succeed("train", files["one"])
    for name in ("ddp", "fsdp"):
        shutil.copytree(folder / "one", folder / name, ignore=shutil.ignore_patterns(*OF_THE_FIRST))
    run_ranks(2, CASES, "run_files", 400, CASES=os.pathsep.join(str(files[name]) for name in ("ddp", "fsdp")))
    measured = losses(folder / "fsdp")
    for step, (loss, norm) in losses(folder / "ddp").items():
        assert norm > 0
        assert measured[step][0] == pytest.approx(loss, rel=1e-5, abs=1e-7), step
        assert measured[step][1] == pytest.approx(norm, rel=1e-5), step


@pytest.mark.slow
def test_rounds_of_other_settings_are_removed(folder):
    run = policy_run(folder)
    process = start("train", run)
    wait_until(lambda: (folder / "run" / "rollouts").is_dir() or process.poll() is not None, lambda: "a round")
    kill(process)
    done = succeed("train", policy_run(folder, policy={"temperature": 0.9}), "checkpoint.every=never")
    assert "rollouts is removed" in done.stderr
    before = read_rollouts(folder / "run")
    succeed("train", policy_run(folder), "--restart")
    assert read_rollouts(folder / "run") != before


@pytest.mark.slow
def test_conversations_are_learned_validated_and_evaluated(folder):
    rows = [{"question": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(60)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = policy_run(folder, tokenizer={"train": {"vocab": 400}}, data={"block": 96}, train={"steps": 2})
    succeed("train", run)
    assert "form: conversation" in (folder / "run" / "config.yaml").read_text()
    (model,) = json.loads(succeed("evaluate", folder / "run", "--json").stdout)["models"]
    assert model["metrics"]["reward"] >= 0
