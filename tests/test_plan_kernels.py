"""What `artel plan` says of the kernels that oneDNN compiles: as many as oneDNN reports for the same products."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from artel.config import run_from
from artel.models.attention_switch import use_artel_attention
from artel.models.cpu.attention import kernels_available
from artel.models.loading.materialize import WeightSource, materialize
from artel.models.output_head import trust_output_head
from artel.parallel import World, plan_parallelism
from artel.planning.hardware import find_hardware
from artel.planning.plan import make_plan
from artel.planning.plan.batches import planned_data
from artel.planning.plan.compiled_kernels import KEPT, KernelShapes
from artel.planning.plan.fake_run import trace_steps
from artel.planning.plan.first_steps import usual_step
from artel.planning.plan.live_bytes import LiveBytes
from artel.planning.plan.micro_batch_sizes import MicroBatchSizes, micro_batch_sizes
from artel.planning.plan.models import ModelOutline
from artel.preparing import prepare
from artel.training.optim.optimizer import Optimizer
from support.runs import TINY, merged
from support.waiting import LIMIT

ONE_SIZE = MicroBatchSizes(row=32)


def step_and_attention():
    """Kernels of a traced step, of the same step on real tensors, and of that and some attention."""
    run = run_from(merged(TINY, {"train": {"precision": "bf16"}}), {}, {})
    data, world = planned_data(run), World(0, 1, 0, torch.device("cpu"))
    outline = ModelOutline.of(run, data.objective, data.tokenizer)
    model, batches = outline.build("bf16"), [data.batch(4)] * 2
    trace = trace_steps(run, outline.build("bf16"), data.objective, batches, world, "none", "bf16")
    use_artel_attention(model)
    trust_output_head(model)
    materialize(model, WeightSource(outline.build("bf16"), run.seed), device="cpu")
    plan = plan_parallelism(run, 1, 1)
    strategy = plan.parallelize(model, data.objective, world, "bf16", load_weights=None, tell=lambda _: None)
    model.train()
    optimizer = Optimizer(model, run.train, run.seed, None, "bf16")
    with LiveBytes(on_cpu=True) as live:
        strategy.run(batches, 100.0, None)
        optimizer.clip_and_step(1.0, strategy.norm())
        of_step = live.kernels.count(set(), ONE_SIZE)
        attend()
    return trace.live.kernels.count(set(), ONE_SIZE), of_step, live.kernels.count(set(), ONE_SIZE)


def attend():
    """Attention with a mask, and its backward pass, for several lengths of queries and keys."""
    for queries, keys in ((87, 121), (89, 123), (32, 40), (200, 300), (300, 600)):
        query, key, value = (
            torch.randn(1, 2, length, 64, dtype=torch.bfloat16, requires_grad=True) for length in (queries, keys, keys)
        )
        mask = torch.zeros(queries, keys, dtype=torch.bfloat16)
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask).sum().backward()


@pytest.mark.long
@pytest.mark.skipif(not kernels_available(), reason="needs a C++ compiler and a processor that multiplies bf16")
def test_as_many_kernels_are_planned_as_onednn_compiles():
    verbose = {"ONEDNN_VERBOSE": "profile_create", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=os.environ | verbose, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    compiled = sum("create:cache_miss,cpu,matmul" in line for line in done.stdout.splitlines())
    traced, of_step, of_all = map(int, re.search(r"\[(\d+), (\d+), (\d+)\]", done.stdout).groups())
    assert traced == of_step > 0
    assert of_all == compiled > of_step


def shapes_of(*products):
    """The shapes of products in bf16, each (rows, inner, columns), in a forward pass."""
    shapes = KernelShapes()
    for rows, inner, columns in products:
        left, right = torch.empty(rows, inner, dtype=torch.bfloat16), torch.empty(inner, columns, dtype=torch.bfloat16)
        shapes.record(torch.ops.aten.mm.default, (left, right))
    return shapes


def test_a_shape_is_compiled_once_and_float32_never():
    shapes = shapes_of((448, 64, 64), (448, 64, 64), (448, 64, 128))
    shapes.record(torch.ops.aten.mm.default, (torch.empty(448, 64), torch.empty(64, 32)))
    assert shapes.count({64, 128}, ONE_SIZE) == 2


def test_micro_batches_of_other_sizes_have_kernels_of_their_own():
    """Products of the weights alone (Muon's) have none; what is only read has those of the forward pass."""
    shapes = shapes_of((448, 64, 64), (64, 64, 128))
    assert shapes.count({64, 128}, MicroBatchSizes(224, trained=3, only_read=2)) == 2 + 2 + 2


def test_each_answer_behind_its_prompt_has_kernels_of_its_own_until_onednn_keeps_no_more():
    shapes = KernelShapes(attention={(1, 87, 121)})
    assert shapes.count(set(), MicroBatchSizes(224, samples=5)) == 5 * 6
    assert shapes.count(set(), MicroBatchSizes(224, samples=10_000)) == KEPT
    whole_rows = KernelShapes(attention={(4, 224, 224)})
    assert whole_rows.count(set(), MicroBatchSizes(224, trained=2, samples=5)) == 2 * 6


def test_groups_of_experts_come_in_many_sizes():
    """Of 4 experts each gets 64 rows on average: groups are up to 192 rows long, in steps of 32."""
    shapes = KernelShapes()
    rows = torch.empty(4 * 64 + 4 * 31, 16, dtype=torch.bfloat16)
    matrices, ends = torch.empty(4, 16, 32, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int32)
    shapes.record(torch.ops.aten._grouped_mm.default, (rows, matrices, ends))
    assert shapes.count({16, 32}, ONE_SIZE) == 6


def preferences(folder, loss="dpo", **train):
    """A run on pairs whose prompts and answers are of 1 to 30 words."""
    pairs = [{"prompt": "sea " * n, "chosen": "ship " * (1 + n % 7), "rejected": "no " * n} for n in range(1, 31)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = {"sources": [{"path": str(folder / "pairs.jsonl"), "format": "preference"}], "block": 256}
    places = {"run": str(folder / "run"), "data": data | {"store": str(folder / "stores"), "validation": 0}}
    vocabulary = {"tokenizer": {"train": {"vocab": 270}}}
    return run_from(
        merged(TINY, places | vocabulary | {"objective": "preference", "preference": {"loss": loss}, "train": train}),
        {},
        {},
    )


def test_sizes_of_micro_batches_are_those_of_the_runs_own_order(tmp_path):
    run = preferences(tmp_path, steps=3, batch=4)
    unprepared = micro_batch_sizes(run, planned_data(run), 2, 1)
    assert unprepared == MicroBatchSizes(unprepared.row)
    prepare(run)
    data = planned_data(run)
    sizes = micro_batch_sizes(run, data, 2, 1)
    assert 1 < sizes.trained <= 6
    assert sizes.only_read > 0  # the reference is computed of every sample
    assert sizes.samples == 12
    assert micro_batch_sizes(run, data, 2, 2).samples == 6


@pytest.mark.parametrize("loss", ["dpo", "kto", "orpo"])
@pytest.mark.parametrize("prepared", [False, True])
def test_a_usual_step_is_that_of_the_slowest_rank_on_average(tmp_path, prepared, loss):
    """On one rank and on two: of the same tokens, the longer half of each step counts."""
    run = preferences(tmp_path, loss, steps=3, batch=8)
    if prepared:
        prepare(run)
    data = planned_data(run)
    alone, spread = (usual_step(run, data, 2, ranks) for ranks in (1, 2))
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
    data = planned_data(run)
    outline = ModelOutline.of(run, data.objective, data.tokenizer)
    usual = usual_step(run, data.laid_out_for(lambda: outline.build_for_training("fp32"), "cuda"), 2, 1)
    assert plan.tokens == usual.tokens
    embeddings = {each.bytes for each in plan.ranks[0].operations if each.name == "aten.embedding"}
    assert (
        usual.batch.computed_positions * (2 * 4 * 32 + 8) in embeddings
    )  # 32 floats are read and written, and an id read


def test_usual_rows_add_no_kernels(tmp_path):
    run = preferences(tmp_path, steps=3, batch=8, micro_batch=2, precision="bf16")
    prepare(run)
    data, world = planned_data(run), World(0, 1, 0, torch.device("cpu"))
    outline = ModelOutline.of(run, data.objective, data.tokenizer)
    data = data.laid_out_for(lambda: outline.build_for_training("bf16"), "cpu")
    usual = usual_step(run, data, 2, 1).batch
    assert usual.computed_positions < data.batch(2).computed_positions
    with_usual, without = (
        trace_steps(run, outline.build("bf16"), data.objective, [data.batch(2)] * 2, world, "none", "bf16", usual=batch)
        for batch in (usual, None)
    )
    assert with_usual.passes != without.passes
    assert with_usual.live.kernels == without.live.kernels
    assert with_usual.live.kernels.products


def test_rows_of_blocks_are_all_usual(tmp_path):
    run = run_from(merged(TINY, {"run": str(tmp_path / "run"), "data": {"store": str(tmp_path / "stores")}}), {}, {})
    assert usual_step(run, planned_data(run), 4, 1) is None


def test_rows_of_blocks_are_of_one_size(tmp_path):
    run = run_from(merged(TINY, {"run": str(tmp_path / "run"), "data": {"store": str(tmp_path / "stores")}}), {}, {})
    prepare(run)
    assert micro_batch_sizes(run, planned_data(run), 4, 1) == MicroBatchSizes(32)


if __name__ == "__main__":
    print(json.dumps(step_and_attention()))
