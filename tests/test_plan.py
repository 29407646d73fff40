"""A plan before the run: what is traced without memory is what a real step holds, and a few layers tell of all."""

import json
from pathlib import Path

import pytest
import torch

from artel.config import parse_run
from artel.errors import InputError
from artel.models.attention_switch import use_artel_attention
from artel.models.loading.materialize import WeightSource, materialize
from artel.parallel import World, plan_parallelism
from artel.planning.hardware import find_hardware
from artel.planning.plan import make_plan
from artel.planning.plan.batches import plan_data
from artel.planning.plan.fake_run import trace_steps
from artel.planning.plan.length import plan_length
from artel.planning.plan.live_bytes import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    LiveBytes,
    bytes_by_kind,
)
from artel.planning.plan.models import ModelOutline, _find_period
from artel.planning.plan.rank_memory import ROUNDS_IN_SHARDS, _extrapolate
from artel.preparing import prepare
from artel.training.optim.optimizer import Optimizer, state_bytes
from support.runs import TINY, merged

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0}
GPT2 |= {"attn_pdrop": 0}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
LLAMA |= {"num_attention_heads": 4}
MOE = LLAMA | {"model_type": "qwen3_moe", "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}


T5 = {"model_type": "t5", "d_model": 64, "d_kv": 32, "d_ff": 128, "num_heads": 2, "dropout_rate": 0}
BART = {"model_type": "bart", "d_model": 64, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "dropout": 0}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
WRITERS = {"t5", "bart"}


def planned(config, parallel=None, **train):
    """(run, its data, its model)."""
    changes = {"model": {"config": config}, "parallel": parallel or {}, "train": train}
    if config["model_type"] in WRITERS:
        rows = [json.dumps({"input": f"count to {number}", "output": "one two"}) + "\n" for number in range(200)]
        Path("pairs.jsonl").write_text("".join(rows))
        source = {"path": "pairs.jsonl", "format": "pairs"}
        changes |= {"objective": "seq2seq", "data": {"sources": [source], "block": 32}}
    run = parse_run(merged(TINY, changes), {}, {})
    data = plan_data(run)
    return run, data, ModelOutline.from_config(run, data.objective, data.tokenizer)


def traced(config, world_size=1, parallel=None, layers=None, rank=0, how="none", **train):
    run, data, outline = planned(config, parallel, **train)
    world = World(rank, world_size, 0, torch.device("cpu"), world_size)
    return trace_steps(run, outline.build("fp32", layers), data.objective, [data.batch(4)] * 2, world, how, "fp32")


def peaks(trace):
    return [bytes_by_kind(trace.live.events, *phase) for phase in trace.phases]


def real_peaks(run, data, outline):
    """What two steps with real tensors hold at most, phase by phase."""
    world = World(0, 1, 0, torch.device("cpu"))
    model = outline.build("fp32")
    source = WeightSource(outline.build("fp32"), run.seed)
    use_artel_attention(model)
    materialize(model, source, device="cpu")
    plan = plan_parallelism(run, 1, 1)
    strategy = plan.parallelize(model, data.objective, world, "fp32", load_weights=None)
    model.train()
    data.objective.loss(model, data.batch(1))  # finds the output head
    live, real = LiveBytes(), []
    with live:
        live.set_kind(model.parameters(), WEIGHTS)
        live.set_kind(model.buffers(), COMMUNICATION)
        optimizer = Optimizer(model, run.train, run.seed, None, "fp32")
        for _ in range(2):
            begin = len(live.events)
            strategy.run([data.batch(4)] * 2, 100.0, None)
            middle = len(live.events)
            optimizer.clip_and_step(1.0, strategy.gradient_norm())
            real += [(begin, middle), (middle, len(live.events))]
    return [sum(bytes_by_kind(live.events, *phase).values()) for phase in real]


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=lambda config: config["model_type"])
def test_what_is_traced_without_memory_is_what_a_real_step_holds(config):
    expected = real_peaks(*planned(config))
    assert [sum(peak.values()) for peak in peaks(traced(config))] == pytest.approx(expected, rel=5e-3)


def test_a_plan_of_preferences_knows_which_prompts_are_shared(tmp_path):
    """Attention asks where the answers of a row begin: of these numbers a trace has the values."""
    long = {"prompt": "ship " * 20, "chosen": "sea " * 10, "rejected": "land " * 5}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(long) + "\n")
    sources = {"sources": [{"path": str(tmp_path / "pairs.jsonl"), "format": "preference"}], "block": 256}
    run = parse_run(merged(TINY, {"objective": "preference", "data": sources, "model": {"config": LLAMA}}), {}, {})
    apart = plan_data(run)
    outline = ModelOutline.from_config(run, apart.objective, apart.tokenizer)
    tokens = apart.row_tokens
    data = apart.with_layout_for(lambda: outline.build_for_training("fp32"), "cpu")
    assert data.row_tokens < 0.7 * tokens
    expected = real_peaks(run, data, outline)
    batches, world = [data.batch(4)] * 2, World(0, 1, 0, torch.device("cpu"), 1)
    trace = trace_steps(run, outline.build("fp32"), data.objective, batches, world, "none", "fp32")
    assert [sum(peak.values()) for peak in peaks(trace)] == pytest.approx(expected, rel=5e-3)


NINE = {"num_hidden_layers": 9}
SHARDS = (4, {"data": "fsdp"})


@pytest.mark.parametrize(
    ("config", "how", "layout"),
    [
        pytest.param(GPT2 | {"n_layer": 9}, "none", (1, {}), marks=pytest.mark.slow),
        pytest.param(GPT2 | {"n_layer": 9}, "full", (1, {}), marks=pytest.mark.slow),
        pytest.param(T5 | {"num_layers": 9}, "none", (1, {}), marks=pytest.mark.slow),
        pytest.param(BART | {"encoder_layers": 9, "decoder_layers": 9}, "none", (1, {}), marks=pytest.mark.long),
        pytest.param(MOE | NINE, "none", (1, {}), marks=pytest.mark.long),
        pytest.param(LLAMA | NINE | {"hidden_size": 256}, "full", SHARDS, marks=pytest.mark.long),
        pytest.param(MOE | NINE | {"moe_intermediate_size": 256}, "none", SHARDS, marks=pytest.mark.long),
    ],
    ids=["gpt2", "gpt2 recomputed", "t5", "bart", "experts", "shards recomputed", "experts in shards"],
)
def test_a_few_layers_tell_of_all(config, how, layout):
    outline = planned(config)[2]
    fewer, more = outline.layer_counts(1, ROUNDS_IN_SHARDS if layout[1] else 1)
    assert more < 9
    lines = [peaks(traced(config, *layout, layers=layers, how=how)) for layers in (fewer, more)]
    extended = _extrapolate(*lines, (fewer, more), 9)
    whole = peaks(traced(config, *layout, how=how))
    assert max(sum(peak.values()) for peak in extended) == pytest.approx(max(sum(p.values()) for p in whole), rel=1e-3)
    for of_few, of_all in zip(extended, whole, strict=True):
        assert of_few[WEIGHTS] == of_all[WEIGHTS]
        assert of_few[OPTIMIZER] == pytest.approx(of_all[OPTIMIZER], rel=1e-3)


@pytest.mark.slow
def test_a_sequence_that_processes_share():
    whole, shared = (peaks(traced(LLAMA, 2, {"data": "fsdp", "context": context}))[0] for context in (1, 2))
    assert 0 < shared[ACTIVATIONS] < 0.7 * whole[ACTIVATIONS]


def test_a_layout_that_training_refuses_is_not_planned():
    values = {"objective": "masked", "model": {"config": {"model_type": "xlm"}}, "parallel": {"tensor": 2}}
    with pytest.raises(InputError, match=r"parallel\.tensor"):
        make_plan(parse_run(merged(TINY, values), {}, {}), find_hardware("h100-80gb:2"))


def test_the_ranks_of_a_plan_have_groups_of_their_own():
    """The first and the last stage are traced in one process, each with the tensor group of its rank."""
    run = parse_run(merged(TINY, {"parallel": {"tensor": 2, "pipeline": 2}}), {}, {})
    plan = make_plan(run, find_hardware("h100-80gb:4"))
    assert len(plan.ranks) == 2
    assert all(rank.allocated > 0 for rank in plan.ranks)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"data": "fsdp"}, {"tensor": 4}, {"pipeline": 2, "data": "fsdp"}], ids=str)
def test_ranks_share_weights_and_state(parallel):
    config = LLAMA | {"num_hidden_layers": 4}
    whole, shared = peaks(traced(config))[-1], peaks(traced(config, 4, parallel))[-1]
    assert shared[WEIGHTS] < 0.5 * whole[WEIGHTS]
    assert shared[OPTIMIZER] < 0.5 * whole[OPTIMIZER]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"expert": 2}, {"data": "fsdp", "expert": 4}], ids=str)
def test_experts_get_equal_shares_of_the_tokens(parallel):
    """Which experts are chosen is not known before the run."""
    whole, shared = peaks(traced(MOE))[-1], peaks(traced(MOE, 4, parallel))[-1]
    assert shared[WEIGHTS] < 0.8 * whole[WEIGHTS]
    assert shared[OPTIMIZER] < 0.8 * whole[OPTIMIZER]
    assert shared[COMMUNICATION] < 0.05 * whole[WEIGHTS]  # of DTensors a rank's part counts: nothing else is left


def test_a_longer_model_may_be_fullest_at_another_moment():
    """Few layers are fullest when the loss is, many when weights and activations are."""
    loss = {"weights": 1, "activations": 2, "logits_and_loss": 9}
    step = [{"weights": weights, "activations": 0, "logits_and_loss": 0} for weights in (1, 2)]
    fewer, more = [loss, step[0], loss], [loss | {"weights": 2, "activations": 3}, step[1], step[1]]
    assert _extrapolate(fewer, more, (1, 2), 11) == [
        {"weights": 11, "activations": 12, "logits_and_loss": 9},
        {"weights": 11, "activations": 0, "logits_and_loss": 0},
    ]


@pytest.mark.slow
def test_one_process_may_shard():
    """With `offload` a model on one GPU has its weights and state in host memory."""
    alone, sharded = peaks(traced(LLAMA))[-1], peaks(traced(LLAMA, 1, {"data": "fsdp"}))[-1]
    assert [sharded[kind] for kind in (WEIGHTS, OPTIMIZER)] == [alone[kind] for kind in (WEIGHTS, OPTIMIZER)]


@pytest.mark.slow
def test_ddp_holds_gradients_all_the_time():
    alone, ddp = traced(GPT2), traced(GPT2, 2, {"data": "ddp"})
    trained = sum(p.numel() * 4 for p in planned(GPT2)[2].build("fp32").parameters())
    begins = [bytes_by_kind(trace.live.events, trace.phases[0][0], trace.phases[0][0] + 1) for trace in (alone, ddp)]
    assert [begin[GRADIENTS] for begin in begins] == [0, pytest.approx(trained, rel=0.01)]


@pytest.mark.slow
def test_the_optimizers_state_is_that_of_arithmetic():
    for optimizer in ("adamw", "muon"):
        run, _, outline = planned(GPT2, optimizer=optimizer)
        held = peaks(traced(GPT2, optimizer=optimizer))[2][OPTIMIZER]
        assert held == pytest.approx(state_bytes(outline.build("fp32"), run.train), rel=0.001)


def test_layers_of_several_kinds_recur():
    assert _find_period("aaaaaa") == (0, 1)
    assert _find_period("dabababab") == (1, 2)
    assert _find_period("aaab") in ((3, 1), (0, 4))


@pytest.mark.slow
def test_the_command_says_whether_it_fits(tmp_path, command):
    (tmp_path / "run.yaml").write_text(json.dumps(merged(TINY, {"model": {"config": GPT2}})))
    status, out, _ = command("plan", "run.yaml", "--json")
    assert status == 0
    plan = json.loads(out)
    assert plan["fits"]
    assert plan["verdict"] == "fits"
    assert plan["parameters"]["total"] == plan["parameters"]["trained"] > 0
    assert plan["per_rank_gib"]["reserved"] >= plan["per_rank_gib"]["allocated"] > 0
    assert plan["host_gib"] > 0
    large = ["model.config.n_embd=8192", "model.config.n_head=64", "train.activation_checkpointing=full"]
    status, out, _ = command("plan", "run.yaml", "--hardware", "v100-16gb:1", *large, "train.micro_batch=1")
    assert (status, "does not fit" in out) == (1, True)
    offload = ["parallel.data=fsdp", "parallel.offload=pinned", "--host-memory", "1GB"]
    status, shown, _ = command("plan", "run.yaml", "--hardware", "v100-16gb:1", *offload)
    assert status == 1
    assert "of the host memory, 0.9 GiB on each host" in shown
    assert "optimizer on the host" in shown


def test_a_run_on_a_budget_takes_its_time(tmp_path, command):
    (tmp_path / "run.yaml").write_text(json.dumps(merged(TINY, {"model": {"config": GPT2}})))
    words = ("plan", "run.yaml", "--hardware", "h100-80gb:1", "train.budget=90min")
    plan = json.loads(command(*words, "--json")[1])
    assert plan["hours"] == {"low": 1.5, "mid": 1.5, "high": 1.5}
    assert plan["steps"] is None
    status, out, _ = command(*words)
    assert (status, "1.5 h, by train.budget · at most" in out) == (0, True)


def length_of(folder, config, **train):
    """The planned length of a run on what lies in a folder; `config` is merged into that of a small one."""
    places = {"run": str(folder / "run"), "data": {"store": str(folder / "stores")}}
    changes = merged(merged(places, config), {"train": {"steps": None} | train})
    run = parse_run(merged(TINY, changes), {}, {})
    return run, plan_length(run, plan_data(run))


def test_the_length_of_a_run_is_that_of_its_store(tmp_path):
    for number in range(3):
        lines = [f"{number} ships went over the sea to trade, {line} came back." for line in range(200)]
        (tmp_path / f"{number}.txt").write_text("\n".join(lines))
    config = {"data": {"sources": [{"path": str(tmp_path / "*.txt")}]}}
    run, estimated = length_of(tmp_path, config, epochs=3)
    assert estimated.note == "counted in the whole text"
    prepare(run)
    _, exact = length_of(tmp_path, config, epochs=3)
    assert exact.note == "counted in the prepared text"
    assert estimated.steps == pytest.approx(exact.steps, rel=0.05)
    assert estimated.tokens == pytest.approx(exact.tokens, rel=0.05)


@pytest.mark.slow
def test_a_part_of_a_large_text_tells_its_length(tmp_path):
    lines = [f"{n * 7919 % 100_003} ships went over the sea, and {n % 977} came back." for n in range(60_000)]
    (tmp_path / "large.txt").write_text("\n".join(lines))
    config = {"data": {"sources": [{"path": str(tmp_path / "large.txt"), "document": "line"}]}}
    run, estimated = length_of(tmp_path, config, epochs=1)
    assert estimated.note.endswith("of the text")
    part = prepare(run).open().train
    assert estimated.tokens == pytest.approx(part.tokens, rel=0.1)


@pytest.mark.slow
def test_the_speed_of_padded_rows_is_that_of_their_texts():
    """As training says it, without what fills the rows; and the run takes as many steps as its length says."""
    plan = make_plan(planned(T5 | {"num_layers": 2})[0], find_hardware("h100-80gb:1"))
    assert plan.tokens_per_second.mid == pytest.approx(plan.tokens / plan.step.seconds.mid)
    assert plan.forecast.hours.mid == pytest.approx(plan.length.steps * plan.step.seconds.mid / 3600)
    assert plan.to_json()["tokens_per_second"]["mid"] == plan.tokens_per_second.mid
    assert plan.forecast.tokens_per_second == plan.tokens_per_second
