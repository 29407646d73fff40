"""`artel rewards try`: answers of the model that a run starts from, with their rewards."""

import json
from pathlib import Path

import pytest
import zstandard

from support.chat_models import trained_tokenizer
from support.runs import TINY, artel, merged, refused, succeed, write_run


def policy_run(name="run", **changes):
    rows = [{"prompt": f"Number {number} is written as", "number": number} for number in range(60)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("rewards.py").write_text(
        "def vowels(completion):\n    return sum(letter in 'aeiou' for letter in completion) / 10\n"
    )
    policy = {
        "objective": "policy",
        "data": {"sources": [{"path": "prompts.jsonl", "format": "prompts"}], "validation": 0.1, "block": 48},
        "policy": {"answers": 4, "new_tokens": 10, "rewards": ["rewards.py:vowels"]},
        "train": {"batch": 8, "steps": 1},
    }
    return write_run(Path(f"{name}.yaml"), merged(merged(TINY, policy), changes))


def tokenizer_folder():
    trained_tokenizer([]).save(Path("tokenizer"))
    return {"tokenizer": {"train": None, "from": "tokenizer"}}


@pytest.mark.slow
def test_of_a_prepared_text_the_trial_is_the_first_round():
    run = policy_run()
    tried = json.loads(succeed("rewards", "try", run, "--json").stdout)
    done = succeed("train", run)
    lines = zstandard.decompress(Path("run/rollouts/000000.jsonl.zst").read_bytes()).splitlines()
    written = [json.loads(line) for line in lines]
    assert len(written) == 32
    for key in ("number", "answer", "text", "rewards", "reward", "cut_off"):
        assert [rollout[key] for rollout in tried["rollouts"]] == [rollout[key] for rollout in written], key
    summary = tried["summary"]
    assert summary["reward"] == pytest.approx(sum(rollout["reward"] for rollout in written) / 32)
    assert f"first round: 8 prompts, 32 answers: reward {summary['reward']:.4g} " in done.stderr
    assert tried["seconds_per_answer"].keys() == {"vowels"}


def test_a_text_that_is_not_prepared_is_read_as_far_as_needed():
    run = policy_run(**tokenizer_folder())
    done = succeed("rewards", "try", run, "--prompts", "2")
    header, *rows = done.stdout.splitlines()
    assert header.split() == ["prompt", "answer", "vowels"]
    assert len(rows) == 8
    assert rows[0].startswith("Number ")
    assert not any(Path("stores").glob("*/manifest.json"))


def test_without_signal_the_status_is_2():
    run = policy_run(policy={"rewards": ["json", "rewards.py:vowels"]}, **tokenizer_folder())
    done = refused("rewards", "try", run, "--prompts", "2", "policy.rewards=[json]")
    assert "policy.rewards: all answers to each of 2 prompts earned the same reward (0)" in done.stderr
    assert len(done.stdout.splitlines()) == 9


def test_a_run_without_rewards_to_learn_from_is_refused():
    done = artel("rewards", "try", write_run(Path("run.yaml")))
    assert done.returncode == 2
    assert "objective" in done.stderr
