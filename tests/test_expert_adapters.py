"""Experts that one tensor holds: computed in autocast's precision, adapted by peft, merged and opened again."""

import json

import pytest
import torch
from peft import PeftModel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from artel.config import LoraConfig
from artel.errors import InputError
from artel.models.experts import compute_experts_in_autocast, expert_matrices, find_experts
from artel.models.lora.adapter_folder import load_adapter, merge_adapter, read_adapter, save_adapter
from artel.models.lora.adapters import add_adapters
from artel.parallel.expert_parallel import expert_problems
from artel.parallel.tensor_parallel import tensor_problems
from support.runs import losses, succeed, write_run

SIZES = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
KINDS = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "mixtral": {"num_local_experts": 8},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 16},  # tensors the other way round, with biases
}
IDS = torch.arange(40).view(2, 20) * 7 % 300
LAYERS_AND_EXPERTS = ["auto", "experts"]


def model_of(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=300, **SIZES, **KINDS[kind]))


def adapt(model, base="base", **more):
    """Adapters of rank 4 in all layers and experts, with weights that change the output."""
    config = LoraConfig(rank=4, target=LAYERS_AND_EXPERTS, **more)
    note = add_adapters(model, config, base=str(base), generates=True, new_modules=[], seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return note


def step(model):
    """(logits, gradients by name) of a step."""
    result = model(input_ids=IDS, labels=IDS)
    result.loss.backward()
    grads = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    model.zero_grad()
    return result.logits.detach(), grads


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_compute_what_peft_computes(kind):
    model = model_of(kind)
    untouched = model(input_ids=IDS).logits
    adapt(model)
    logits, grads = step(model)
    model.set_experts_implementation("eager")  # by the model's own code, over the tensors that peft changes
    expected, expected_grads = step(model)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert grads.keys() == expected_grads.keys()
    assert sum("experts" in name for name in grads) == 8  # two matrices for each of two tensors in each of two layers
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-4, atol=1e-5)
    assert (logits - untouched).abs().max() > 0.1


class Groups(TorchDispatchMode):
    """Where the groups of each product of experts end."""

    def __init__(self):
        super().__init__()
        self.ends = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default:
            self.ends.append(args[2])
        return func(*args, **(kwargs or {}))


def test_groups_are_filled_up_where_weights_are_in_bf16_already():
    """Under fully_shard they are. oneDNN compiles a kernel for each size of a group, and keeps it."""
    model = model_of("qwen3_moe").to(torch.bfloat16)
    compute_experts_in_autocast(model)
    with Groups() as groups:
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert len(groups.ends) >= 8
    assert all(bool((ends % 32 == 0).all()) for ends in groups.ends)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_and_reopened_it_computes_the_same(kind, tmp_path):
    model = model_of(kind)
    model.save_pretrained("base")
    adapt(model)
    logits = step(model)[0]
    (tmp_path / "adapter").mkdir()
    save_adapter(model, tmp_path / "adapter")
    adapter = read_adapter("adapter")

    def opened():
        return AutoModelForCausalLM.from_pretrained("base")

    adapted = opened()
    load_adapter(adapted, adapter)
    merge_adapter(opened(), adapter).save_pretrained("merged")
    for other in (
        adapted,
        PeftModel.from_pretrained(opened(), "adapter"),
        AutoModelForCausalLM.from_pretrained("merged"),
    ):
        with torch.no_grad():
            torch.testing.assert_close(other(input_ids=IDS).logits, logits, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    named = {name.rpartition(".")[2] for name in config["target_parameters"]}
    assert named == {"gate_up_proj", "down_proj"}


def test_experts_compute_in_the_precision_of_autocast():
    model = model_of("qwen3_moe")
    experts = next(iter(find_experts(model).values()))
    compute_experts_in_autocast(model)
    tokens, chosen = torch.randn(16, 64), torch.arange(32).view(16, 2) % 8
    shares = torch.full((16, 2), 0.5)
    exact = experts(tokens, chosen, shares)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = experts(tokens, chosen, shares)
    assert rounded.dtype == exact.dtype
    error = float((rounded - exact).detach().abs().max() / exact.detach().abs().max())
    assert 1e-4 < error < 0.02  # as bf16 rounds; float32 would differ by 1e-6


def test_experts_of_other_processes_are_left_out():
    model = model_of("qwen3_moe")
    experts = next(iter(find_experts(model).values()))
    compute_experts_in_autocast(model)
    tokens, chosen = torch.randn(16, 64, requires_grad=True), torch.arange(32).view(16, 2) % 8
    shares = torch.full((16, 2), 0.5)
    experts._is_expert_parallel = True
    absent = chosen >= 5
    with torch.autocast("cpu", torch.bfloat16):
        whole = experts(tokens, chosen, shares.masked_fill(absent, 0.0))
        part = experts(tokens, chosen.masked_fill(absent, 8), shares.masked_fill(absent, 0.0))
    torch.testing.assert_close(part, whole)
    (grad,) = torch.autograd.grad(part.sum(), tokens)
    assert grad.isfinite().all()


@pytest.mark.slow
def test_a_run_adapts_experts_and_exports_them(tmp_path):
    write_run(tmp_path / "scratch.yaml", model={"config": {"model_type": "qwen3_moe", **SIZES, **KINDS["qwen3_moe"]}},
              train={"steps": 2})  # fmt: skip
    succeed("train", "scratch.yaml")
    lora = {"rank": 4, "target": LAYERS_AND_EXPERTS}
    write_run(tmp_path / "lora.yaml", model={"config": None, "from": "scratch/model", "lora": lora},
              tokenizer={"train": None}, train={"steps": 6, "learning_rate": 1e-2, "schedule": "constant"})  # fmt: skip
    assert "for each expert of 4 tensors" in succeed("train", "lora.yaml").stderr
    each = losses(tmp_path / "lora")
    assert each[6][0] < each[1][0]
    succeed("export", "lora", "merged", "--merge")
    merged = AutoModelForCausalLM.from_pretrained("merged")
    base = AutoModelForCausalLM.from_pretrained("scratch/model")
    for name in expert_matrices(base):
        assert not merged.get_parameter(name).equal(base.get_parameter(name))


@pytest.mark.parametrize(
    ("lora", "where", "what"),
    [
        ({"dropout": 0.1}, "model.lora.dropout", "dropout"),
        ({"dora": True}, "model.lora.dora", "DoRA"),
        ({"target": ["auto", "q_proj"]}, "model.lora.target", "already part of auto"),
        ({"target": ["expert"]}, "model.lora.target", "gate_up_proj, down_proj"),
    ],
)
def test_what_experts_cannot_have_is_refused(lora, where, what):
    config = LoraConfig(**{"rank": 4, "target": LAYERS_AND_EXPERTS} | lora)
    with pytest.raises(InputError) as refusal:
        add_adapters(model_of("qwen3_moe"), config, base="base", generates=True, new_modules=[], seed=0)
    assert [problem.where for problem in refusal.value.problems] == [where]
    assert what in str(refusal.value)


def test_adapted_experts_are_not_shared_out():
    model = model_of("qwen3_moe")
    adapt(model)
    assert "cannot be sharded" in expert_problems(model, 2)[0].what
    assert "cannot be split" in tensor_problems(model, 2, sequence=False)[0].what
