"""Activation checkpointing: the same loss and gradients as without it, and less kept for the backward pass."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    BartConfig,
    FalconConfig,
    GPT2Config,
    LlamaConfig,
    RobertaConfig,
    T5Config,
    XLNetConfig,
)

from artel.models.activation_checkpointing import SelectiveUnsupported, recompute
from artel.models.attention_switch import use_artel_attention
from artel.models.compile import compile_layers
from support.kept_memory import bytes_kept

MODES = ("none", "selective", "full")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=64, attention_dropout=0.1)
GPT2 = GPT2Config(**SIZES, n_positions=32)  # with dropout of 0.1 in three places, as it comes
MODELS = {
    "gpt2": (AutoModelForCausalLM, GPT2),
    "gpt2 without dropout": (AutoModelForCausalLM, GPT2Config(**SIZES, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
    "llama with grouped keys": (AutoModelForCausalLM, LLAMA),
    "roberta": (AutoModelForMaskedLM, RobertaConfig(**SIZES, intermediate_size=64, max_position_embeddings=40)),
    "t5, which makes a cache": (
        AutoModelForQuestionAnswering,
        T5Config(**SIZES, d_model=32, d_ff=64, d_kv=8, decoder_start_token_id=0),
    ),
    "bart": (
        AutoModelForMaskedLM,
        BartConfig(**SIZES, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                   decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, attention_dropout=0.1),
    ),
}  # fmt: skip


def build(auto_class, config):
    torch.manual_seed(0)
    model = auto_class.from_config(copy.deepcopy(config)).train()
    use_artel_attention(model)
    return model


def step(model):
    """(loss, gradients by name, bytes that the forward pass leaves in memory)."""
    model.zero_grad()
    torch.manual_seed(1)  # of dropout
    ids = torch.arange(64).reshape(2, 32) % 47 + 3

    def loss_alone():
        output = model(input_ids=ids)
        # Only the logits are named: a model that returns a cache must not be charged for it.
        logits = output.logits if "logits" in output else output.start_logits + output.end_logits
        return logits.float().square().mean()

    loss, kept = bytes_kept(loss_alone)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, kept


def largest_difference(gradients, others):
    assert gradients.keys() == others.keys()
    return max(float((gradients[name] - others[name]).abs().max()) for name in gradients)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_loss_and_gradients_and_less_memory(name):
    results = {}
    for how in MODES:
        model = build(*MODELS[name])
        assert recompute(model, how).startswith(how)
        results[how] = step(model)
    loss, gradients, _ = results["none"]
    for how in ("selective", "full"):
        assert abs(results[how][0] - loss) < 1e-6
        assert largest_difference(gradients, results[how][1]) < 1e-6
    assert results["none"][2] > results["selective"][2] > results["full"][2]


def test_dropout_is_on_in_these_tests():
    model = build(*MODELS["gpt2"])
    loss = step(model)[0]
    assert abs(step(model.eval())[0] - loss) > 1e-6


@pytest.mark.parametrize("how", MODES)
def test_several_passes_under_one_autocast(how):
    """As of groups of rows of one length: the second finds the weights rounded already, the backward pass does not."""
    model = build(AutoModelForCausalLM, MODELS["gpt2 without dropout"][1])
    recompute(model, how)
    ids = torch.arange(64).reshape(2, 32) % 47 + 3
    with torch.autocast("cpu", torch.bfloat16):
        first, second = (model(input_ids=rows).logits.float() for rows in ids.split(1))
    (first.square().mean() + second.mean()).backward()
    recomputed = [parameter.grad.clone() for parameter in model.parameters()]
    recompute(model, "none")
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        first, second = (model(input_ids=rows).logits.float() for rows in ids.split(1))
    (first.square().mean() + second.mean()).backward()
    for gradient, parameter in zip(recomputed, model.parameters(), strict=True):
        # bf16 has eight bits: gradients of both passes are added before or after they are rounded.
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=0.02 * float(parameter.grad.abs().max()))


def test_chosen_again_it_is_otherwise_and_none_takes_it_back():
    model = build(AutoModelForCausalLM, LLAMA)
    before = step(model)[2]
    recompute(model, "full")
    full = step(model)[2]
    assert full < before / 2
    recompute(model, "selective")
    assert full < step(model)[2] < before
    recompute(model, "none")
    assert step(model)[2] == before
    assert not model._forward_pre_hooks
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_copy_of_the_model_runs_its_own_layers():
    model = build(AutoModelForCausalLM, LLAMA)
    recompute(model, "full")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert step(model)[0] == 0 < step(other)[0]


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_adapters_over_frozen_embeddings(config):
    """The input of the first layer needs no gradient; its adapters get theirs all the same."""
    results = {}
    for how in MODES:
        model = build(AutoModelForCausalLM, config)
        torch.manual_seed(2)
        lora = LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear", init_lora_weights=False)
        inject_adapter_in_model(lora, model)
        recompute(model, how)
        assert not model.get_input_embeddings().weight.requires_grad
        results[how] = step(model)
        assert all("lora" in name for name in results[how][1])
    first = [name for name in results["none"][1] if ".0." in name and "lora_A" in name]
    assert first
    assert all(results["full"][1][name].abs().max() > 0 for name in first)
    for how in ("selective", "full"):
        assert largest_difference(results["none"][1], results[how][1]) < 1e-6
        assert results[how][2] < results["none"][2]


@pytest.mark.parametrize("how", ["selective", "full"])
def test_writing_and_judging_are_as_before(how):
    model = build(AutoModelForCausalLM, LLAMA).eval()
    ids = torch.arange(3, 11)[None]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        written, logits = model.generate(ids, **options), model(ids).logits
        recompute(model, how)
        assert torch.equal(model.generate(ids, **options), written)
        assert torch.equal(model(ids).logits, logits)
        assert model(ids).past_key_values is not None  # the cache is there where no gradient is asked for
    assert model.config.use_cache  # so that what is saved opens as it was


def test_no_warning_of_caches(caplog, recwarn):
    model = build(*MODELS["t5, which makes a cache"])
    recompute(model, "full")
    step(model)
    assert "cache" not in caplog.text
    assert not [warning for warning in recwarn if "cach" in str(warning.message)]


def test_an_architecture_that_cannot_is_left_as_it_is():
    config = XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=64, vocab_size=50)
    model = build(AutoModelForCausalLM, config)
    assert recompute(model, "full") == "none (xlnet does not support it)"
    assert step(model)[2] > 0


def test_layers_that_write_into_what_selective_keeps_are_refused_not_trained_wrongly():
    """Falcon adds attention in place to the result of a bias-free product; PyTorch would not notice it."""
    model = build(AutoModelForCausalLM, FalconConfig(**SIZES))
    recompute(model, "selective")
    with pytest.raises(SelectiveUnsupported, match=r"train.activation_checkpointing: selective: .*add_"):
        step(model)


def compiled(config, how, backend):
    torch._dynamo.reset()
    model = build(AutoModelForCausalLM, config)
    recompute(model, how)
    if backend == "inductor":
        compile_layers(model, fixed=True)
    else:
        for layer in model.base_model.modules():
            if type(layer).__name__.endswith(("DecoderLayer", "Block")):
                layer.compile(backend=backend, dynamic=False)
    step(model)  # compiles, which the profile of the next one must not see
    return step(model)


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA, GPT2, FalconConfig(**SIZES)], ids=lambda config: config.model_type)
def test_inside_of_compiled_layers_each_mode_keeps_what_it_says(config):
    """By the partitioner that decides what is kept, without the time that C++ takes to compile."""
    result = {how: compiled(config, how, "aot_eager_decomp_partition") for how in MODES}
    for how in ("selective", "full"):
        assert largest_difference(result["none"][1], result[how][1]) < 1e-5
    assert result["none"][2] > result["selective"][2] > result["full"][2]


@pytest.mark.processes
def test_compiled_as_in_training():
    """It starts a compiler; without one, the tests before this one prove the same."""
    config = LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=64)
    plain = step(build(AutoModelForCausalLM, config))
    for how in ("selective", "full"):
        result = compiled(config, how, "inductor")
        assert largest_difference(plain[1], result[1]) < 1e-5
        assert result[2] < plain[2]
