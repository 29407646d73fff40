"""Precision: what a device has, the scale of an fp16 loss, layers that hold bf16 weights."""

import sys

import pytest
import torch

from artel.errors import InputError
from artel.models.compile import repeated_layers
from artel.models.device import autocast_dtype, bf16_is_native, pick_precision
from artel.models.forward_pass import keep_hidden_states_in_bf16
from artel.training.optim.bf16_adamw import hold_in_bf16
from artel.training.optim.loss_scaler import LossScale
from support.precision import GEMMA, GPT2, LLAMA, learn, model_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_cpu_does_what_is_asked_and_auto_is_what_it_does_well(precision):
    assert pick_precision(precision, CPU) == precision
    assert pick_precision("auto", CPU) == ("bf16" if bf16_is_native(CPU) else "fp32")
    assert pick_precision("auto", CPU, weights="bf16") == "bf16"


def test_fp8_is_refused_where_there_is_none(monkeypatch):
    with pytest.raises(InputError, match="fp8 needs a GPU, but"):
        pick_precision("fp8", CPU)
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(InputError, match=r"8\.9 or higher, but this one has 8\.0"):
        pick_precision("fp8", gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(InputError, match=r"torchao(.|\n)*artel-lm\[fp8\]"):
        pick_precision("fp8", gpu)


def test_what_each_precision_computes_in():
    result = [autocast_dtype(precision) for precision in ("fp32", "bf16", "fp16", "fp8")]
    assert result == [None, torch.bfloat16, torch.float16, torch.bfloat16]


def test_the_loss_scale_follows_its_rules():
    scale, yes, no = LossScale(CPU), torch.tensor(1.0), torch.tensor(0.0)
    assert scale.scale == 65536
    scale.update(yes)
    assert scale.scale == 32768
    for _ in range(1999):
        scale.update(no)
    assert scale.scale == 32768
    scale.update(no)
    assert scale.scale == 65536
    for _ in range(1999):
        scale.update(no)
    scale.update(yes)  # and the count begins anew
    scale.update(no)
    assert scale.scale == 32768
    for _ in range(15):
        scale.update(yes)
    assert scale.scale == 1
    assert not scale.has_collapsed()
    scale.update(yes)
    assert scale.has_collapsed()


def test_the_loss_scale_is_saved_beside_an_optimizer():
    scale = LossScale(CPU)
    scale.update(torch.tensor(1.0))
    scale.update(torch.tensor(0.0))
    other = LossScale(CPU)
    state = {"a|step": torch.tensor(3.0), **{name: tensor.clone() for name, tensor in scale.state().items()}}
    other.load(state)
    assert state.keys() == {"a|step"}
    assert scale.state().keys() == other.state().keys()
    assert all(torch.equal(tensor, other.state()[name]) for name, tensor in scale.state().items())


@pytest.mark.parametrize("number", [float("inf"), float("nan"), float("-inf")])
def test_an_infinite_norm_is_found(number):
    scale = LossScale(CPU)
    assert scale.overflow_flag(torch.tensor(number)) == 1
    assert scale.overflow_flag(torch.tensor(1e30)) == 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_fp16_learns_as_float32_does(optimizer):
    expected = learn(model_of(**GPT2), 8, "fp32", optimizer=optimizer)
    actual = learn(model_of(**GPT2), 8, "fp16", LossScale(CPU), optimizer=optimizer)
    assert expected[-1] < 0.8 * expected[0]
    assert actual == pytest.approx(expected, rel=0.01)


def test_an_overflow_costs_a_step_and_halves_the_scale():
    """A loss 4,096 times as large overflows fp16 until the scale has come down; the steps between are as ever."""
    scale = LossScale(CPU)
    actual = learn(model_of(**GPT2), 20, "fp16", scale, loss_times=4096)
    skipped = 20 - len(actual)
    assert 3 <= skipped <= 15
    assert float(scale.scale) == 65536 / 2**skipped
    expected = learn(model_of(**GPT2), 20 - skipped, "fp32", loss_times=4096)
    assert expected[-1] < 0.9 * expected[0]
    assert actual == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("keys", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_bf16_weights_learn_as_float32_ones_do(keys):
    expected = learn(model_of(**keys), 8, "fp32")
    model = model_of(**keys)
    hold_in_bf16(model)
    actual = learn(model, 8, "bf16", weights="bf16")
    assert expected[-1] < 0.8 * expected[0]
    assert actual == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("keys", [GPT2, LLAMA, GEMMA], ids=["gpt2", "llama", "gemma"])
def test_hidden_states_are_bf16_between_layers_as_with_bf16_weights(keys):
    """fully_shard gathers bf16 weights. Alone a process has float32 ones, and computes the same dtypes."""

    def input_dtypes(model, dtype):
        dtypes = []
        for layer in repeated_layers(model):
            layer.register_forward_pre_hook(lambda layer, inputs: dtypes.append(inputs[0].dtype))
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            model(input_ids=torch.arange(6)[None])
        return set(dtypes)

    model = model_of(**keys)
    assert input_dtypes(model, torch.bfloat16) == {torch.float32}
    keep_hidden_states_in_bf16(model)
    assert input_dtypes(model, torch.bfloat16) == {torch.bfloat16}
    assert input_dtypes(model, torch.float16) == input_dtypes(model, None) == {torch.float32}
    assert input_dtypes(model_of(**keys).to(torch.bfloat16), torch.bfloat16) == {torch.bfloat16}


@pytest.mark.parametrize("keys", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_bf16_hidden_states_learn_as_float32_ones_do(keys):
    expected = learn(model_of(**keys), 8, "bf16")
    model = model_of(**keys)
    keep_hidden_states_in_bf16(model)
    assert expected[-1] < 0.8 * expected[0]
    assert learn(model, 8, "bf16") == pytest.approx(expected, rel=0.02)
