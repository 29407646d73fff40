"""The weights beneath adapters held in bf16: the same losses and gradients, half the memory."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artel.config import ModelConfig
from artel.models.experts import compute_experts_in_autocast
from artel.models.loading.build import build_model
from artel.models.loading.request import ModelRequest
from artel.models.loss import model_losses
from artel.models.output_head import output_head
from support.runs import artel, kill, losses, refused, start, succeed, wait_for_step, write_run

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "intermediate_size": 48, "vocab_size": 300, "max_position_embeddings": 64}  # fmt: skip
MODELS = {
    "llama": SIZES,
    "tied": SIZES | {"model_type": "llama", "tie_word_embeddings": True},
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 300, "n_positions": 64},
    "gemma3_text": SIZES | {"pad_token_id": 0},  # scales its embeddings
    "qwen3_moe": SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_5_text": SIZES | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                             "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tokenizer, tmp_path_factory):
    """A folder with a tiny model in bf16, as models are published."""
    folder = tmp_path_factory.mktemp(request.param)
    values = {"model_type": request.param} | MODELS[request.param] | {"bos_token_id": 0, "eos_token_id": 0}
    config = CONFIG_MAPPING[values.pop("model_type")](**values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1  # biases and norms too
    model.bfloat16().save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.mark.parametrize(("autocast", "dora"), [(True, False), (False, False), (True, True)])
def test_losses_and_gradients_are_those_of_a_float32_base(saved, tokenizer, autocast, dora):
    experts = ["auto", "experts"] if "moe" in saved.name and not dora else ["auto"]
    config = ModelConfig.model_validate({"from": str(saved), "lora": {"rank": 4, "target": experts, "dora": dora}})
    request = ModelRequest(config, "AutoModelForCausalLM", block=32)
    ids = torch.randint(3, 260, (3, 32), generator=torch.Generator().manual_seed(0))
    results = []
    for dtype in (None, torch.bfloat16):
        model = build_model(replace(request, base_dtype=dtype), tokenizer).model.train()
        compute_experts_in_autocast(model)
        assert output_head(model) is not None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss, _ = model_losses(model, {"input_ids": ids[:, :-1]}, ids[:, 1:].contiguous())
        loss.backward()
        results.append((loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}))
    held = [parameter for parameter in model.parameters() if parameter.dtype == torch.bfloat16]
    assert sum(map(torch.numel, held)) > 0.9 * sum(p.numel() for p in model.parameters() if not p.requires_grad)
    (loss, gradients), (half_loss, half_gradients) = results
    assert torch.equal(loss, half_loss)
    assert gradients.keys() == half_gradients.keys()
    # PEFT's DoRA subtracts the bias in its dtype, and that of GPT-2's layers is the base's.
    rounding = 5e-3 if dora and saved.name.startswith("gpt2") else 0.0
    for name, gradient in gradients.items():
        assert (half_gradients[name] - gradient).norm() <= rounding * gradient.norm()


def adapted(path, folder, changes=None, **lora):
    """A run of adapters over the model of `folder`, computed in bf16."""
    train = {"precision": "bf16", "learning_rate": 3e-3, "steps": 30, "batch": 8} | (changes or {})
    model = {"config": None, "from": str(folder), "lora": {"rank": 4} | lora}
    return write_run(path, model=model, train=train, tokenizer={"train": None}, checkpoint={"every": 4})


@pytest.fixture(scope="module")
def llama(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "llama"
    torch.manual_seed(0)
    config = CONFIG_MAPPING["llama"](**SIZES, bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@pytest.mark.processes
def test_a_run_learns_the_same_and_resumes_bit_equal(llama, tmp_path):
    whole = adapted(tmp_path / "whole.yaml", llama)
    assert "the frozen matrices are held in bfloat16" in succeed("train", whole).stderr
    plain = artel("train", adapted(tmp_path / "plain.yaml", llama, base="fp32"))
    assert "held in bfloat16" not in plain.stderr
    assert losses(tmp_path / "plain") == losses(tmp_path / "whole")

    broken = adapted(tmp_path / "broken.yaml", llama)
    process = start("train", broken)
    wait_for_step(process, tmp_path / "broken", 9)
    kill(process)
    done = artel("train", broken)
    assert "resuming from step" in done.stderr
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    one, other = (load_file(tmp_path / name / "model/adapter_model.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(one[name], other[name]) for name in one)

    succeed("export", tmp_path / "whole", tmp_path / "merged", "--merge")
    base, merged = (load_file(folder / "model.safetensors") for folder in (llama, tmp_path / "merged"))
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    name = "model.layers.1.mlp.down_proj"
    change = one[f"base_model.model.{name}.lora_B.weight"] @ one[f"base_model.model.{name}.lora_A.weight"] * (32 / 4)
    assert torch.equal(merged[f"{name}.weight"], (base[f"{name}.weight"].float() + change).bfloat16())


def test_what_decides_against_a_half_base_is_named(llama, tmp_path):
    for train, lora, words in (
        ({"weights": "bf16"}, {"base": "fp32"}, "model.lora.base: fp32 conflicts with train.weights: bf16"),
        ({"precision": "fp8"}, {"base": "bf16"}, "model.lora.base: bf16 conflicts with train.precision: fp8"),
    ):
        assert words in refused("train", adapted(tmp_path / "run.yaml", llama, train, **lora)).stderr
    run = adapted(tmp_path / "run.yaml", llama, base="bf16")
    assert "lora.base: bf16 and quantize: nf4" in refused("config", "check", run, "model.quantize=nf4").stderr
