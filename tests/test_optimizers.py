"""Optimizers: clipping folded in, exact resume, steps left out, layer-wise learning rates, bf16 weights."""

import copy
import sys

import pytest
import torch
from safetensors.torch import load, save
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from artel.config import TrainConfig
from artel.errors import InputError
from artel.registry import OPTIMIZERS
from artel.training.optim.bf16_adamw import hold_in_bf16, round_to_bf16
from artel.training.optim.loss_scaler import LossScale
from artel.training.optim.optimizer import Optimizer, check_optimizer, clip_divisor, state_bytes
from artel.training.optim.parameter_groups import lr_fractions

# Each optimizer with a learning rate at which three steps move the weights by more than what is compared.
SETTINGS = {"adafactor": {"learning_rate": 0.5}, "sgd": {"learning_rate": 0.1, "momentum": 0.9}}
"""Of optimizers that learn too slowly at a rate of 0.01."""
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 200, "n_positions": 32}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS.names)


def config_of(name: str, **changes) -> TrainConfig:
    return TrainConfig(
        optimizer=name, **{"learning_rate": 1e-2, **SETTINGS.get(name, {}), "betas": [0.9, 0.99], **changes}
    )


def model_of(auto_class=AutoModelForCausalLM, **keys):
    torch.manual_seed(1)
    keys = keys or GPT2
    return auto_class.from_config(AutoConfig.for_model(**keys))


def give_gradients(model, seed: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * size
        parameter.grad = noise.to(parameter.dtype)


def norm_of(model) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])


def weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize(("by", "limit"), [("norm", 0.5), ("norm", 1e9), ("value", 0.5), ("", None)])
@every_optimizer
def test_clipping_within_the_step_is_clipping_before_it(name, by, limit, scaled):
    """Also of gradients that have a loss factor."""
    one, other = model_of(), model_of()
    start, scale = weights(one), LossScale(torch.device("cpu")) if scaled else None
    ours = Optimizer(one, config_of(name, clip={"by": by, "limit": limit} if by else None), loss_scale=scale)
    theirs = Optimizer(other, config_of(name, clip=None))
    for step in range(3):
        give_gradients(one, step)
        give_gradients(other, step)
        for parameter in one.parameters() if scaled else ():
            parameter.grad *= scale.scale
        if by:
            getattr(torch.nn.utils, f"clip_grad_{by}_")(other.parameters(), limit)
        ours.clip_and_step(1.0, norm_of(one))
        theirs.clip_and_step(1.0, norm_of(other))
    assert all(parameter.grad is None for parameter in one.parameters())
    for key, expected in weights(other).items():
        assert (expected - start[key]).abs().max() > 1e-4, key
        torch.testing.assert_close(one.get_parameter(key).detach(), expected, rtol=0, atol=1e-6)


@every_optimizer
def test_a_saved_state_goes_on_bit_for_bit(name):
    whole = model_of()
    optimizer = Optimizer(whole, config_of(name, ema=0.9))
    for step in range(2):
        give_gradients(whole, step)
        optimizer.step(1.0)
    saved = load(save({key: tensor.contiguous() for key, tensor in optimizer.state().items()}))
    resumed = copy.deepcopy(whole)
    after = Optimizer(resumed, config_of(name, ema=0.9))
    after.load(saved)
    assert same(saved, after.state())
    for model, its in ((whole, optimizer), (resumed, after)):
        give_gradients(model, 2)
        its.step(0.5)
    assert same(weights(whole), weights(resumed))
    assert same(optimizer.state(), after.state())


@every_optimizer
def test_an_infinite_step_changes_nothing(name):
    """At the very first step, where nothing is in the state yet, and later; then the run goes on as without it."""
    model, reference = model_of(), model_of()
    optimizer, expected = (Optimizer(each, config_of(name, ema=0.9)) for each in (model, reference))
    yes, no = torch.tensor(1.0), torch.tensor(0.0)
    for step in range(2):
        before = weights(model)
        give_gradients(model, 0, size=float("inf"))
        optimizer.step(1.0, clip_divisor(torch.tensor(float("inf")), 1.0), yes)
        assert same(before, weights(model))
        give_gradients(model, step)
        optimizer.step(1.0, torch.tensor(2.0), no)
        give_gradients(reference, step)
        expected.step(1.0, torch.tensor(2.0))
    assert same(weights(model), weights(reference))
    assert same(optimizer.state(), expected.state())


def test_lion_steps_by_the_sign_of_its_average():
    """Algorithm 2 of Chen et al. 2023."""
    model = model_of()
    train = TrainConfig.model_validate(
        {"optimizer": "lion", "learning_rate": 0.01, "weight_decay": 0.1, "clip": None, "lion": {"betas": [0.8, 0.95]}}
    )
    optimizer = Optimizer(model, train)
    name = "transformer.h.0.mlp.c_fc.weight"
    weight = model.get_parameter(name)
    expected, average = weight.detach().double(), torch.zeros_like(weight, dtype=torch.float64)
    for step in range(3):
        give_gradients(model, step)
        gradient = weight.grad.double()
        expected -= 0.5 * 0.01 * (torch.sign(0.8 * average + 0.2 * gradient) + 0.1 * expected)
        average = 0.95 * average + 0.05 * gradient
        optimizer.step(0.5)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(optimizer.state()[f"{name}|exp_avg"].double(), average, rtol=0, atol=1e-6)


def test_an_average_follows_the_weights_with_a_decay_that_rises():
    model = model_of()
    optimizer = Optimizer(model, TrainConfig(learning_rate=1e-2, ema=0.5))
    expected = weights(model)
    for step in range(8):
        give_gradients(model, step)
        optimizer.step(1.0)
        now = {name: weight.double() for name, weight in weights(model).items()}
        decay = min(0.5, step / (9 + step))
        expected = {name: decay * expected[name] + (1 - decay) * now[name] for name in now}
    raw = weights(model)
    with optimizer.averaged():
        for name, average in weights(model).items():
            torch.testing.assert_close(average.double(), expected[name], rtol=0, atol=1e-6)
    assert same(raw, weights(model))


def test_the_bytes_of_averages_are_counted():
    model = model_of()
    count = sum(parameter.numel() for parameter in model.parameters())
    assert state_bytes(model, TrainConfig(ema=0.5)) - state_bytes(model, TrainConfig()) == 4 * count


def test_adamw8bit_holds_its_averages_in_8_bits():
    model = model_of()
    optimizer = Optimizer(model, config_of("adamw8bit"))
    give_gradients(model, 0)
    optimizer.step(1.0)
    state = optimizer.state()
    assert state["transformer.wte.weight|state1"].dtype == torch.uint8
    assert not [key for key in state if "qmap" in key]


def test_a_missing_package_is_told_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(InputError, match=r"bitsandbytes(.|\n)*artel-lm\[quantize\]"):
        check_optimizer(config_of("adamw8bit"))
    check_optimizer(config_of("adamw"))


def rates(model, **changes) -> dict[str, float]:
    optimizer = Optimizer(model, TrainConfig(learning_rate=1.0, **changes))
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: group["peak"]
        for part in optimizer._optimizers
        for group in part.param_groups
        for parameter in group["params"]
    }


def test_each_layer_takes_its_share_of_the_learning_rate():
    model = model_of(**{**GPT2, "n_layer": 3})
    result = rates(model, layer_decay=0.5)
    assert set(result) == set(dict(model.named_parameters()))
    assert result["transformer.wte.weight"] == result["transformer.wpe.weight"] == 0.125
    assert [result[f"transformer.h.{layer}.ln_1.bias"] for layer in range(3)] == [0.25, 0.5, 1.0]
    assert result["transformer.ln_f.weight"] == 1.0
    assert set(rates(model).values()) == {1.0}
    muon = rates(model, optimizer="muon", muon_learning_rate=0.02, layer_decay=0.5)
    assert muon["transformer.h.0.attn.c_attn.weight"] == 0.02 * 0.25
    assert muon["transformer.h.0.attn.c_attn.bias"] == 0.25


def test_layer_decay_and_weight_decay_together():
    model = model_of()
    optimizer = Optimizer(model, TrainConfig(learning_rate=1.0, layer_decay=0.5, weight_decay=0.3))
    for group in optimizer._optimizers[0].param_groups:
        assert {parameter.ndim >= 2 for parameter in group["params"]} == {group["weight_decay"] == 0.3}
    give_gradients(model, 0, size=0.0)
    before = weights(model)
    optimizer.step(0.1)
    after = weights(model)
    assert torch.allclose(after["transformer.wte.weight"], before["transformer.wte.weight"] * (1 - 0.1 * 0.25 * 0.3))
    assert torch.equal(after["transformer.ln_f.weight"], before["transformer.ln_f.weight"])


SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
OPT = {"model_type": "opt", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32,
       "word_embed_proj_dim": 16, "vocab_size": 50}  # fmt: skip
BART = {"model_type": "bart", "d_model": 16, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 50}  # fmt: skip
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": 50}


@pytest.mark.parametrize(
    ("auto_class", "keys", "expected"),
    [
        (AutoModelForCausalLM, {"model_type": "llama", **SMALL},
         {"model.embed_tokens": 0.25, "model.layers.0": 0.5, "model.layers.1": 1, "model.norm": 1, "lm_head": 1}),
        (AutoModelForMaskedLM, {"model_type": "bert", **SMALL},
         {"bert.embeddings": 0.25, "bert.encoder.layer.0": 0.5, "bert.encoder.layer.1": 1,
          "cls.predictions.transform": 1}),
        (AutoModelForMaskedLM, {"model_type": "modernbert", "pad_token_id": 0, **SMALL},
         {"model.embeddings": 0.25, "model.layers.0": 0.5, "model.layers.1": 1, "model.final_norm": 1, "head": 1}),
        (AutoModelForCausalLM, {"model_type": "gpt_neox", **SMALL},
         {"gpt_neox.embed_in": 0.25, "gpt_neox.layers.0": 0.5, "gpt_neox.final_layer_norm": 1}),
        (AutoModelForCausalLM, OPT,
         {"model.decoder.embed": 0.25, "model.decoder.layers.0": 0.5, "model.decoder.final_layer_norm": 1}),
        (AutoModelForSeq2SeqLM, BART,
         {"model.shared": 0.125, "model.encoder.embed_positions": 0.125, "model.encoder.layers.0": 0.25,
          "model.encoder.layers.2": 1, "model.encoder.layernorm_embedding": 0.125, "model.decoder.layers.0": 0.5,
          "model.decoder.layers.1": 1}),
        (AutoModelForSeq2SeqLM, T5,
         {"shared": 0.25, "encoder.block.0": 0.5, "encoder.block.1": 1, "encoder.final_layer_norm": 1,
          "decoder.block.0": 0.5, "decoder.block.1": 1}),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)  # fmt: skip
def test_layer_shares_of_other_architectures(auto_class, keys, expected):
    model = model_of(auto_class, **keys)
    shares = lr_fractions(model, 0.5)
    for prefix, share in expected.items():
        actual = {shares[parameter] for name, parameter in model.named_parameters() if name.startswith(prefix)}
        assert actual == {share}, prefix
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert shares[head] == (shares[embedding] if head is embedding else 1)


def test_an_output_head_named_after_embeddings_is_a_head(monkeypatch):
    """As GPT-NeoX's was for years: embed_out."""
    model = model_of(model_type="gpt_neox", **SMALL)
    head = model.get_output_embeddings()
    model.embed_out = head
    del model.lm_head
    monkeypatch.setattr(type(model), "get_output_embeddings", lambda _: head)
    assert lr_fractions(model, 0.5)[model.embed_out.weight] == 1


def test_layer_decay_needs_layers():
    model = model_of()
    model._no_split_modules = None
    with pytest.raises(InputError, match=r"train\.layer_decay"):
        Optimizer(model, TrainConfig(layer_decay=0.9))


def test_stochastic_rounding_is_right_in_the_mean():
    """200,000 draws between neighbours 2^-7 apart: the mean's standard error is at most 2^-8 / sqrt(200,000)."""
    for number in (1 + 2**-10, -1 - 3 * 2**-10, 1 + 2**-7 - 2**-12, 3e-30):
        numbers = torch.full((200_000,), number)
        result = round_to_bf16(numbers, torch.Generator().manual_seed(3))
        assert result.dtype == torch.bfloat16
        values = result.double().unique()
        assert len(values) == 2
        step = float(values[1] - values[0])
        assert abs(step / abs(number)) < 2**-6.9
        assert float(values[0]) < numbers[0].double() < float(values[1])
        assert abs(result.double().mean() - numbers[0].double()) < 4 * step / 2 / 200_000**0.5


def test_what_bf16_holds_is_not_rounded():
    held = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    held = torch.cat([held, torch.tensor([0.0, -0.0, float("inf"), float("-inf")]).bfloat16()])
    for seed in range(5):
        assert torch.equal(round_to_bf16(held.float(), torch.Generator().manual_seed(seed)), held)


def bf16_run(steps: int, seed: int = 5, model=None, optimizer=None, first: int = 0):
    train = TrainConfig(learning_rate=1e-4, weights="bf16", weight_decay=0.0)
    if model is None:
        model = model_of()
        hold_in_bf16(model)
    optimizer = optimizer or Optimizer(model, train, seed)
    for step in range(first, first + steps):
        give_gradients(model, step)
        optimizer.step(1.0, clip_divisor(norm_of(model).float(), 1.0))
    return model, optimizer


def test_steps_that_nearest_rounding_loses_add_up():
    """100 steps of 1e-4 from weights of 1, whose neighbour below is 2^-8 = 0.0039 away."""
    model = model_of(**{**GPT2, "vocab_size": 4000})
    hold_in_bf16(model)
    weight = model.get_parameter("transformer.wte.weight")
    plain = torch.nn.Parameter(torch.ones_like(weight))
    torch.nn.init.ones_(weight)
    optimizer = Optimizer(model, TrainConfig(learning_rate=1e-4, weights="bf16", weight_decay=0.0))
    theirs = torch.optim.AdamW([plain], lr=1e-4, weight_decay=0.0, fused=True)
    for _ in range(100):
        for parameter in (*model.parameters(), plain):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(1.0)
        theirs.step()
    assert torch.equal(plain, torch.ones_like(plain))  # it has not moved at all
    # Each of 128,000 weights goes 2.6 ± 1.6 times to a neighbour 2^-8 away: a standard error of 2e-5.
    assert float(weight.detach().double().mean()) == pytest.approx(1 - 100 * 1e-4, abs=1e-4)


def test_bf16_weights_step_as_float32_ones_do():
    """The averages, which are float32, are AdamW's on the same gradients; the weights are within their spacing."""
    model, optimizer = bf16_run(3)
    reference = model_of()
    hold_in_bf16(reference)
    reference.float()
    expected = Optimizer(reference, TrainConfig(learning_rate=1e-4, weight_decay=0.0))
    for step in range(3):
        give_gradients(reference, step)
        for parameter in reference.parameters():
            parameter.grad = parameter.grad.bfloat16().float()
        rounded_norm = torch.nn.utils.get_total_norm([p.grad.bfloat16() for p in reference.parameters()]).float()
        expected.step(1.0, clip_divisor(rounded_norm, 1.0))
    state = optimizer.state()
    for key, tensor in expected.state().items():
        if "exp_avg" in key:
            assert state[key].dtype == torch.float32
            torch.testing.assert_close(state[key], tensor, rtol=1e-5, atol=1e-12)
    for name, parameter in reference.named_parameters():
        actual = model.get_parameter(name)
        assert actual.dtype == torch.bfloat16
        torch.testing.assert_close(actual.float(), parameter, rtol=3 * 2**-7, atol=3e-6)  # three roundings


def test_bf16_weights_resume_bit_for_bit_whatever_else_is_drawn():
    """Dropout's seed differs from process to process; the rounding must not."""
    whole, state = bf16_run(4)
    torch.manual_seed(99)
    broken, optimizer = bf16_run(2)
    saved = load(save(optimizer.state()))
    resumed = copy.deepcopy(broken)
    after = Optimizer(resumed, TrainConfig(learning_rate=1e-4, weights="bf16", weight_decay=0.0), 5)
    after.load(saved)
    torch.rand(7)
    bf16_run(2, model=resumed, optimizer=after, first=2)
    assert same(weights(whole), weights(resumed))
    assert same(state.state(), after.state())
    assert not same(weights(whole), weights(bf16_run(4, seed=6)[0]))


def test_holding_in_bf16_keeps_ties_and_buffers():
    model = model_of(**{"model_type": "llama", **SMALL, "tie_word_embeddings": True})
    buffers = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert buffers
    hold_in_bf16(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == buffers


@pytest.mark.parametrize(
    ("changes", "fix"),
    [({"optimizer": "muon"}, "optimizer: adamw"), ({"precision": "fp32"}, "precision: bf16"),
     ({"precision": "fp16"}, "precision: bf16"), ({"ema": 0.5}, "fp32")],
)  # fmt: skip
def test_what_bf16_weights_do_not_go_with(changes, fix):
    with pytest.raises(InputError, match=f"train\\.weights(.|\n)*{fix}"):
        check_optimizer(TrainConfig(weights="bf16", **changes))
    check_optimizer(TrainConfig(weights="bf16", precision="bf16"))
    check_optimizer(TrainConfig(**changes))
