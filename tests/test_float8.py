"""Float8 layers, emulated on a processor. torchao lies beside the environment (see the Makefile): with it installed
there, transformers would import it in every command of every test."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from artel.errors import InputError
from artel.models.compile import repeated_layers
from artel.models.quantization import use_float8
from support.precision import GPT2, LLAMA, learn, model_of

sys.path.append(str(Path(sys.prefix) / "torchao"))
pytest.importorskip("torchao", reason="torchao lies in no folder torchao of the environment: see the Makefile")


def float8_layers(model) -> list[str]:
    return [name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"]


def test_float8_layers_keep_names_and_weights(tmp_path):
    model, reference = model_of(**LLAMA), model_of(**LLAMA)
    parameters = dict(model.named_parameters())
    assert use_float8(model, emulate=True) == "float8: 14 of 14 linear layers"
    assert len(float8_layers(model)) == 14
    assert all("layers" in name for name in float8_layers(model))
    assert list(model.state_dict()) == list(reference.state_dict())
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == {
        name: id(parameter) for name, parameter in parameters.items()
    }
    model.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert opened.dtype == torch.float32
    assert not float8_layers(opened)
    for name, tensor in opened.state_dict().items():
        assert torch.equal(tensor, reference.state_dict()[name])


def test_float8_learns_nearly_as_float32_does():
    model = model_of(**LLAMA)
    use_float8(model, emulate=True)
    ids = torch.randint(0, 64, (3, 7))  # 21 tokens, which 16 does not divide
    with torch.no_grad():
        exact, actual = model_of(**LLAMA)(ids).logits, model(ids).logits
    assert not torch.equal(exact, actual)  # it does round
    assert (exact - actual).norm() < 0.1 * exact.norm()
    expected = learn(model_of(**LLAMA), 8, "fp32")
    assert learn(model, 8, "fp32") == pytest.approx(expected, rel=0.03)


def test_what_float8_leaves_alone_is_told():
    model = model_of(**GPT2)
    note = use_float8(model, emulate=True)
    assert note == "float8: 0 of 8 linear layers; Conv1D, GPT-2's kind, computes in bf16"
    assert not float8_layers(model)
    odd = model_of(**{**LLAMA, "intermediate_size": 40})
    note = use_float8(odd, emulate=True)
    assert note == "float8: 8 of 14 linear layers; matrices with a side that 16 does not divide compute in bf16"
    assert not [name for name in float8_layers(odd) if "mlp" in name]
    assert len(repeated_layers(odd)) == 2


def test_float8_with_adapters_is_refused():
    from peft import LoraConfig, inject_adapter_in_model

    model = inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model_of(**LLAMA))
    model._hf_peft_config_loaded = True
    with pytest.raises(InputError, match=r"train\.precision"):
        use_float8(model, emulate=True)
