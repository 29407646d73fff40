"""FLOPs a token against closed formulas and against what PyTorch counts in a real step; peaks; what is unknown."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BloomConfig,
    GPT2Config,
    JetMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    RobertaConfig,
)

from artel.config import load_run
from artel.models.flops import device_name, estimate_flops_per_token, peak_flops, token_rate, utilization
from artel.parallel import join_world
from artel.preparing import prepare
from artel.training.loop import train
from support.messages import logged
from support.runs import metrics, write_run

GPT2 = GPT2Config()
LLAMA = LlamaConfig(
    vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, tie_word_embeddings=False,
)  # fmt: skip
ROBERTA = RobertaConfig(type_vocab_size=1, max_position_embeddings=514)
TINY = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def parameters(config, auto_class, without):
    """N: all weights but the tables that are only looked up."""
    with torch.device("meta"):
        model = auto_class.from_config(config)
    return sum(p.numel() for name, p in model.named_parameters() if not any(part in name for part in without))


@pytest.mark.parametrize(
    ("config", "auto_class", "without", "length", "shown"),
    [
        (GPT2, AutoModelForCausalLM, ["wpe"], 1024, 1 / 2),
        (LLAMA, AutoModelForCausalLM, ["embed_tokens"], 4096, 1 / 2),
        (ROBERTA, AutoModelForMaskedLM, ["position_embeddings", "id_dtype"], 512, 1),
    ],
)
def test_the_closed_formula(config, auto_class, without, length, shown):
    """6N + 12·L·H·Q·T (PaLM, appendix B), the last term halved where a causal mask hides half of the pairs."""
    weights = parameters(config, auto_class, without)
    formula = 6 * weights + 12 * config.num_hidden_layers * config.hidden_size * length * shown
    assert estimate_flops_per_token(config, auto_class.__name__, length) == pytest.approx(formula, rel=0.01)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_what_is_multiplied_in_a_real_step(attention):
    """Forward and backward of an encoder, whose attention PyTorch's counter sees when it is written out."""
    config = RobertaConfig(**TINY, max_position_embeddings=34, type_vocab_size=1, attn_implementation=attention)
    model = AutoModelForMaskedLM.from_config(config, attn_implementation="eager")
    ids = torch.randint(5, 320, (3, 32))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    assert estimate_flops_per_token(config, "AutoModelForMaskedLM", 32) == counter.get_total_flops() / ids.numel()


def test_only_the_experts_that_a_token_goes_to():
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    config = MixtralConfig(**TINY, **experts, num_key_value_heads=2, sliding_window=None)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 32 * 8 + 2 * 3 * 32 * 64  # queries and output, keys and values, router, experts
    formula = 6 * (2 * layer + 32 * 320) + 12 * 2 * 32 * (64 + 1) / 2
    assert estimate_flops_per_token(config, "AutoModelForCausalLM", 64) == formula


def test_a_window_costs_what_it_shows():
    def attention(length, window):
        config = MistralConfig(**TINY, num_key_value_heads=2, sliding_window=window)
        none = MistralConfig(**TINY, num_key_value_heads=2, sliding_window=1)
        result = [estimate_flops_per_token(each, "AutoModelForCausalLM", length) * length for each in (config, none)]
        return (result[0] - result[1]) / (12 * 2 * 32) + length  # in the smallest window each token sees itself

    for length, window in ((48, 16), (48, 48), (48, 100)):
        seen = sum(min(place + 1, window) for place in range(length))
        assert attention(length, window) == seen


def test_attention_of_an_architecture_of_its_own_counts_whole():
    config = BloomConfig(vocab_size=320, hidden_size=32, n_layer=2, n_head=4)
    weights = parameters(config, AutoModelForCausalLM, [])
    assert estimate_flops_per_token(config, "AutoModelForCausalLM", 64) == pytest.approx(
        6 * weights + 12 * 2 * 32 * 64, rel=0.03
    )


def test_the_configuration_stays_as_it_was():
    config = GPT2Config(attn_implementation="eager")
    before = config.to_dict()
    estimate_flops_per_token(config, "AutoModelForCausalLM", 16)
    assert config.to_dict() == before
    assert config._attn_implementation == "eager"


def test_a_model_that_does_not_run_without_numbers_is_unknown():
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = JetMoeConfig(**sizes, num_key_value_heads=2, kv_channels=8)
    assert estimate_flops_per_token(config, "AutoModelForCausalLM", 16) is None


def test_attention_that_cannot_be_counted_gives_no_other_number():
    """Sparse attention reads a mask, which counted attention has not: the whole square would be another definition."""
    experts = {"moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2}
    config = AutoConfig.for_model("deepseek_v32", **TINY, **experts, topk_group=1, q_lora_rank=32,
                                  kv_lora_rank=32)  # fmt: skip
    told = logged()
    assert estimate_flops_per_token(config, "AutoModelForCausalLM", 64) is None
    assert "so there is no MFU" in told[0]


def test_a_measurement_has_one_utilization():
    """GPT-2 124M on an H200, benchmarks/NOTES.md: by the whole square of attention it would be 32.5 %."""
    flops = estimate_flops_per_token(GPT2, "AutoModelForCausalLM", 1024)
    assert utilization(flops, 376_268, peak_flops("NVIDIA H200", "bf16")) == pytest.approx(0.303, abs=5e-4)


def test_peaks_and_utilisation():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.5e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == peak_flops("A100-SXM4-80GB", "fp16") == 312e12
    assert peak_flops("Tesla V100-SXM2-16GB", "bf16") is None  # it has none
    for unknown in ("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A10G", "cpu"):
        assert peak_flops(unknown, "bf16") is None
    assert device_name(torch.device("cpu")) == "cpu"
    assert token_rate(300, 1.5) == 200
    assert token_rate(300, 0.0) is None
    assert utilization(2e9, 1e5, 1e15, devices=2) == 0.1
    assert utilization(2e9, 1e5, None) is None
    assert utilization(None, 1e5, 1e15) is None


@pytest.mark.slow
def test_a_run_logs_its_mfu_where_the_devices_peak_is_known(tmp_path, monkeypatch):
    """A processor's is not known; here one of 0.1 TFLOP/s is made up for it."""
    for peaks in ({}, {"fp32": 0.1}):
        monkeypatch.setattr("artel.models.flops.data_sheet", lambda name, peaks=peaks: peaks)
        name = f"run{len(peaks)}"
        run = load_run(str(write_run(tmp_path / f"{name}.yaml")))
        with join_world(1) as processes:
            train(run, prepare(run), processes)
        lines = [line for line in metrics(tmp_path / name) if "loss" in line]
        assert len(lines) == 6
        if not peaks:
            assert all("mfu" not in line for line in lines)
    config = AutoConfig.from_pretrained(tmp_path / name / "model")
    flops = estimate_flops_per_token(config, "AutoModelForCausalLM", run.data.block)
    assert all(line["mfu"] == pytest.approx(flops * line["tokens_per_second"] / 1e11) for line in lines)
