"""The usual micro-batch of a plan: where rows are as long as their samples, the operations of a typical step count."""

import json

import pytest

from artel.config import parse_run
from artel.planning.hardware import find_hardware
from artel.planning.plan import make_plan
from artel.planning.plan.batches import find_average_step, plan_data
from artel.planning.plan.models import ModelOutline
from artel.preparing import prepare
from support.runs import TINY, merged


def preferences(folder, loss="dpo", **train):
    """A run on pairs whose prompts and answers are of 1 to 30 words."""
    pairs = [{"prompt": "sea " * n, "chosen": "ship " * (1 + n % 7), "rejected": "no " * n} for n in range(1, 31)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = {"sources": [{"path": str(folder / "pairs.jsonl"), "format": "preference"}], "block": 256}
    places = {"run": str(folder / "run"), "data": data | {"store": str(folder / "stores"), "validation": 0}}
    learned = {"objective": "preference", "preference": {"loss": loss}, "train": train}
    return parse_run(merged(TINY, places | learned | {"tokenizer": {"train": {"vocab": 270}}}), {}, {})


@pytest.mark.parametrize("loss", ["dpo", "kto", "orpo"])
@pytest.mark.parametrize("prepared", [False, True])
def test_a_usual_step_is_that_of_the_slowest_rank_on_average(tmp_path, prepared, loss):
    """On one rank and on two: of the same tokens, the longer half of each step counts."""
    run = preferences(tmp_path, loss, steps=3, batch=8)
    if prepared:
        prepare(run)
    data = plan_data(run)
    alone, spread = (find_average_step(run, data, 2, ranks) for ranks in (1, 2))
    assert alone.tokens == spread.tokens
    longest = data.batch(2)
    assert alone.batch.tokens < longest.tokens
    positions = [usual.batch.computed_positions for usual in (alone, spread)]
    assert positions[0] <= positions[1]
    assert positions[0] < longest.computed_positions
    assert 4 * positions[0] >= alone.tokens  # of four micro-batches


def test_the_operations_of_a_plan_are_those_of_usual_rows_and_its_memory_that_of_the_longest(tmp_path):
    run = preferences(tmp_path, steps=3, batch=8, micro_batch=2)
    prepare(run)
    plan = make_plan(run, find_hardware("h100-80gb:1"))
    data = plan_data(run)
    outline = ModelOutline.from_config(run, data.objective, data.tokenizer)
    usual = find_average_step(run, data.with_layout_for(lambda: outline.build_for_training("fp32"), "cuda"), 2, 1)
    assert plan.tokens == usual.tokens
    embeddings = {each.bytes for each in plan.ranks[0].operations if each.name == "aten.embedding"}
    assert usual.batch.computed_positions * (2 * 4 * 32 + 8) in embeddings  # 32 floats read and written, an id read


def test_rows_of_blocks_are_all_usual(tmp_path):
    run = parse_run(merged(TINY, {"run": str(tmp_path / "run"), "data": {"store": str(tmp_path / "stores")}}), {}, {})
    assert find_average_step(run, plan_data(run), 4, 1) is None
