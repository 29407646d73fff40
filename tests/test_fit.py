"""Advice before the run: it passes the checks, fits by its own plan, and is no slower than what was asked."""

import json
import shlex

import pytest
import yaml

from artel.config import Overrides, load_run, parse_run, result_differences
from artel.objectives import objective_type
from artel.planning.fit import CommandLine, advice_json, advise, describe_advice
from artel.planning.fit.advice import larger_accelerators, scale_up
from artel.planning.fit.layouts import iterate_layouts
from artel.planning.hardware import find_hardware
from artel.planning.plan import make_plan, plan_text
from artel.planning.plan.models import ModelOutline
from artel.training.model_setup import check_layout
from support.messages import logged
from support.runs import TINY, merged

LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
MOE = LLAMA | {"model_type": "qwen3_moe", "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
LARGE = LLAMA | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
                 "num_key_value_heads": 32, "max_position_embeddings": 4096}  # fmt: skip


def run_of(config, data=None, **sections):
    changes = {"model": {"config": config}, "data": data or {}, "train": {"precision": "auto"}}
    return parse_run(merged(TINY, merged(changes, sections)), {}, {})


def advised(run, hardware, nproc=None):
    """(the plan of the run as it is, advice, what was told meanwhile)."""
    text, told = plan_text(run), logged()
    own = make_plan(run, hardware, nproc, text=text)
    return own, advise(run, own, text, nproc), told


def check_lines(run, advice):
    """Each line can be pasted, and its plan says what it says."""
    for each in [*advice.same, *advice.different, *advice.larger]:
        pasted = parse_run(run.model_dump(mode="json", by_alias=True), Overrides.parse(each.arguments), {})
        processes, nodes = each.plan.processes, each.hardware.nodes
        check_layout(pasted, objective_type(pasted).auto_class, processes, processes // nodes)
        plan = make_plan(pasted, each.hardware, processes // nodes)
        assert plan.memory_fraction <= 1
        assert (plan.verdict, plan.micro_batch, plan.recompute) == (
            each.plan.verdict, each.plan.micro_batch, each.plan.recompute)  # fmt: skip
        assert plan.fullest.reserved == pytest.approx(each.plan.fullest.reserved, rel=0.01)
        assert bool(result_differences(run, pasted)) == (each in advice.different)


@pytest.mark.long
@pytest.mark.parametrize(
    "config", [LLAMA, pytest.param(MOE, marks=pytest.mark.long)], ids=lambda config: config["model_type"]
)
def test_what_is_advised_can_be_pasted_and_is_no_slower_than_what_was_asked(config):
    run = run_of(config, train={"activation_checkpointing": "full", "micro_batch": 1})
    own, advice, _ = advised(run, find_hardware("h100-80gb:2"))
    check_lines(run, advice)
    assert len(advice.same) == 3
    assert advice.larger == ()
    seconds = [each.plan.step.seconds.mid for each in advice.same]
    assert seconds == sorted(seconds)
    assert seconds[0] < own.step.seconds.mid


@pytest.mark.slow
def test_the_run_as_it_is_stays_where_nothing_is_faster():
    """Weights in bf16 are planned as another training: a model so small waits for its host with them too."""
    run = run_of(LLAMA, train={"micro_batch": 64})
    own, advice, told = advised(run, find_hardware("h100-80gb:1"))
    assert advice.same[0].overrides == {}
    assert advice.same[0].plan is own
    traced = [line for line in told if line.startswith("advice: planning") and ", offload," not in line]
    assert len(traced) == 1  # of another training: the run as it is was planned already
    assert advice.different == ()


def test_layouts_are_those_that_the_checks_let_pass():
    run = run_of(LLAMA)
    data, _ = plan_text(run)
    model = ModelOutline.from_config(run, data.objective, data.tokenizer).build("fp32")
    found = {layout.splits for layout in iterate_layouts(run, model, 8, 8)}
    assert {(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1)} <= found
    assert all(expert == 1 for *_, expert in found)  # it has no experts
    assert all(pipeline <= 2 for _, pipeline, *_ in found)  # it has two layers
    assert all(tensor <= 2 for tensor, *_ in found)  # it has two heads of keys


@pytest.mark.long
def test_nothing_fits_one_card_of_24_gb():
    run = run_of(LARGE, data={"block": 4096}, tokenizer={"train": {"vocab": 32000}})
    own, advice, told = advised(run, find_hardware("rtx-4090:1", host_memory="128GB"))
    assert own.verdict == "does not fit"
    assert advice.same == ()
    more, other = advice.larger
    assert (more.hardware.name, more.hardware.count, more.hardware.nodes) == ("rtx-4090", 8, 1)
    assert (other.hardware.name, other.hardware.world_size) == ("h200", 1)
    check_lines(run, advice)
    assert all(line.startswith("advice: planning ") for line in told)
    line = CommandLine("run.yaml", Overrides(), {"--host-memory": "128GB"})
    assert f"artel plan run.yaml --hardware h200:1 --host-memory 128GB {' '.join(other.arguments)}" in describe_advice(
        advice, line, own.hardware
    )


@pytest.mark.long
def test_offload_is_advised_with_its_speed_where_the_host_has_room():
    run = run_of(LARGE, data={"block": 1024}, tokenizer={"train": {"vocab": 32000}})
    _, advice, _ = advised(run, find_hardware("rtx-4090:1", host_memory="512GB"))
    assert advice.larger == ()
    for each in advice.same:
        assert each.offloads
        assert each.plan.step.by_kind["host"] > 0
        assert each.overrides["parallel.offload"] == "pinned"


@pytest.mark.long
def test_adapters_are_another_training(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**{**LLAMA, "vocab_size": 512})).save_pretrained(tmp_path)
    base = {"model": {"from": str(tmp_path)}, "tokenizer": {"replace": True}, "train": {"precision": "auto"}}
    run = parse_run({**merged(TINY, base), "model": base["model"]}, {}, {})
    _, advice, _ = advised(run, find_hardware("v100-16gb:1"))
    check_lines(run, advice)
    groups = {each["group"] for each in advice_json(advice, CommandLine("run.yaml", Overrides()))}
    assert groups <= {"same_training", "different_training"}
    assert any("train.precision=fp16" in each.arguments for each in advice.different)  # it has no bf16


@pytest.mark.long
def test_processes_of_this_machine():
    run = run_of(LLAMA)
    own, advice, _ = advised(run, find_hardware("cpu:2"))
    check_lines(run, advice)
    assert {each.plan.processes for each in advice.same} <= {1, 2}
    assert own.hardware.shares_memory


def test_larger_hardware_comes_in_order():
    asked = find_hardware("a100-80gb:2", host_memory="1TB")
    more = list(scale_up(asked))
    assert [(each.count, each.nodes) for each in more[:4]] == [(4, 1), (8, 1), (8, 2), (8, 4)]
    assert {each.host_memory_bytes for each in more} == {10**12}
    other = larger_accelerators(asked)
    assert all(each.memory_bytes > asked.memory_bytes for each in other)
    assert [each.world_size for each in other] == sorted(each.world_size for each in other)
    assert list(scale_up(find_hardware("cpu:2"))) == []


@pytest.mark.long
def test_the_235_billion_question():
    """3.76 TB of weights, gradients and averages, which eight hosts hold in their memory, or fewer, larger cards."""
    run = load_run("pile-235b", {})
    own, advice, _ = advised(run, find_hardware("a100-80gb:8", host_memory="1TB"))
    assert own.verdict == "does not fit"
    assert advice.same == ()
    more, other = advice.larger
    assert (more.hardware.name, more.hardware.world_size) == ("a100-80gb", 64)
    assert more.plan.host_bytes < 1e12
    assert other.hardware.memory_bytes > more.hardware.memory_bytes
    assert other.hardware.world_size < 64


@pytest.mark.long
def test_the_command_prints_lines_to_paste(tmp_path, artel_here):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(merged(TINY, {"model": {"config": LLAMA}})))
    words = ("plan", "run.yaml", "--hardware", "h100-80gb:2", "--fit", "train.batch=32", "train.micro_batch=1")
    done = artel_here(*words, "--json")
    assert done.returncode == 0
    plan = json.loads(done.stdout)
    assert plan["verdict"] == "fits"
    first = plan["advice"][0]
    assert first["group"] == "same_training"
    assert first["tokens_per_second"]["mid"] > plan["tokens_per_second"]["mid"]
    assert first["per_rank_gib"]["reserved"] > 0
    command = shlex.split(first["command"])
    assert command[:6] == ["artel", "train", "run.yaml", "--nproc", "2", "train.batch=32"]
    assert command[6:] == first["overrides"]
    assert load_run("run.yaml", Overrides.parse(command[5:])).train.micro_batch == first["micro_batch"]
