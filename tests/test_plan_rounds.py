"""A plan of a run that learns from rewards: the engine's memory, and lengths and times of the newest round."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from artel.config import parse_run
from artel.generation.make import planned_cache_bytes
from artel.generation.slots import SlotEngine
from artel.host import memory
from artel.objectives.rollouts import Rollout, Round
from artel.planning.hardware import find_hardware
from artel.planning.plan import make_plan
from artel.planning.plan.batches import plan_data
from artel.planning.plan.rounds import plan_round
from support.runs import TINY, merged

LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 400}  # fmt: skip


@pytest.fixture
def policy(tmp_path, monkeypatch):
    """A run of 3 prompts a round, with 4 answers of up to 20 tokens to each."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Number {number} is written as", "number": number} for number in range(60)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "run": "run",
        "objective": "policy",
        "data": {"sources": [{"path": "prompts.jsonl", "format": "prompts"}], "validation": 0.1, "block": 64},
        "model": {"config": LLAMA},
        "policy": {"form": "text", "answers": 4, "new_tokens": 20, "rewards": [{"equals": {"column": "number"}}]},
        "train": {"batch": 3, "micro_batch": 1, "activation_checkpointing": "full"},
    }
    return parse_run(merged(TINY, changes), {}, {})


def test_the_planned_cache_is_that_of_the_engine():
    config = AutoConfig.for_model(**LLAMA)
    with torch.device("meta"):
        planned = planned_cache_bytes(AutoModelForCausalLM.from_config(config), "cpu", 64, 300, memory().free)
    model = AutoModelForCausalLM.from_config(config)
    engine = SlotEngine(model, 64, 300)
    try:
        small_cache = sum(tensor.nbytes for pair in engine._model._cache._layers.values() for tensor in pair)
        engine._resize(engine._round_up_capacity(299))
        cache = sum(tensor.nbytes for pair in engine._model._cache._layers.values() for tensor in pair)
    finally:
        engine.close()
    assert planned["keys_and_values"] == cache
    assert planned["freed_cache"] == small_cache
    linear = [module.weight for module in model.modules() if type(module) is torch.nn.Linear]
    assert planned["packed_weights"] in (0, sum(weight.nbytes for weight in linear))  # 0: without AVX2


def test_the_peak_may_be_that_of_writing(policy):
    plan = make_plan(policy, find_hardware("h100-80gb:1"))
    assert plan.round.tokens == 3 * 4 * 20
    by_kind = plan.fullest.by_kind
    prompt = plan.round.context - 20
    pages = 64 * (-(-(prompt + 20) // 32) + 1) // 4
    assert (
        by_kind["keys_and_values"] == pages * 32 * 3 * 2 * 2 * 16 * 4
    )  # layers, keys and values, heads, size, float32
    assert by_kind["gradients"] == 0
    assert plan.data_note.endswith("; not counted: the time in which answers are written and the time of rewards")
    assert plan.to_json()["round"]["answers"] == 12


def test_lengths_and_scores_of_the_newest_round_are_used(policy, tmp_path):
    data = plan_data(policy)
    before = plan_round(policy, data)
    assert (before.mean_length, before.max_length, before.scoring_seconds) == (20, 20, None)
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    for number, length in ((0, 19), (1, 8)):
        rollouts = [
            Rollout(number=prompt, index=prompt, epoch=0, answer=answer, attempt=0, seed=0, prompt_ids=[1],
                    ids=[1] * (length - answer % 2 * 4), log_probs=[-0.5] * (length - answer % 2 * 4), text="",
                    cut_off=False, rewards={}, reward=1.0, failures={})
            for prompt in range(3) for answer in range(4)
        ]  # fmt: skip
        Round(number, tuple(rollouts)).write(tmp_path / "run" / "rollouts")
    lines = [{"step": 1, "loss": 1.0, "seconds_scoring": 9.0}, {"step": 2, "loss": 1.0, "seconds_scoring": 2.5},
             {"step": 2, "validation": {"reward": 0.5}}]  # fmt: skip
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    after = plan_round(policy, data)
    assert (after.from_round, after.mean_length, after.max_length, after.scoring_seconds) == (1, 6, 8, 2.5)
    tokens = []
    for length in (None, 6):
        data.objective.assume_answer_length(length)
        tokens.append(data.batch(1).tokens)
    assert tokens[0] - tokens[1] == 4 * (20 - 6)
