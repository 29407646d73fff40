"""Adapters computed in one function with their layers: peft's numbers, and less that is kept for the backward pass."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig, PhimoeConfig

from artel.models.activation_checkpointing import recompute
from artel.models.attention_switch import use_artel_attention
from artel.models.half_base import HalfLinear, hold_in_half
from artel.models.lora.layers import LoraLinear, patch_lora_linear
from support.kept_memory import bytes_kept


class Siblings(nn.Module):
    """Three layers that read the same input, as queries, keys and values do, and one that reads their product."""

    def __init__(self, *, bias):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(24, width, bias=bias) for width in (16, 16, 40))
        self.last = nn.Linear(16, 24, bias=bias)

    def forward(self, x):
        return x + self.last(self.one(x) * self.two(x)) * self.three(x)[..., :24]


def adapted(model, **options):
    """The model with adapters by peft, and a copy in which they are computed in one function."""
    torch.manual_seed(1)
    targets = [name for name, module in model.named_modules() if type(module) in (nn.Linear, HalfLinear)]
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": targets, "init_lora_weights": False} | options)
    theirs = inject_adapter_in_model(config, model).train()
    ours = copy.deepcopy(theirs)
    patch_lora_linear(ours)
    assert any(isinstance(module, LoraLinear) for module in ours.modules())
    return theirs, ours


def adapted_over_half():
    """The same over matrices in bf16. Adapters are in float32, as artel keeps them."""
    torch.manual_seed(0)
    model = Siblings(bias=True)
    for layer in model.children():
        layer.weight.data, layer.__class__ = layer.weight.data.bfloat16(), HalfLinear
    both = adapted(model)
    for each in both:
        for name, parameter in each.named_parameters():
            parameter.data = parameter.data.float() if "lora" in name else parameter.data
    return both


def step(model, x, *, autocast):
    """(outputs, gradients by name) of the model, and of its input."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = model(x * 1.0)  # autocast keeps what it has rounded of leaves
    (outputs.float() ** 2).mean().backward()
    return outputs, {"x": x.grad} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(theirs, ours, x, *, autocast):
    (expected, gradients), (outputs, others) = (step(model, x, autocast=autocast) for model in (theirs, ours))
    assert torch.equal(outputs, expected)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert (others[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


@pytest.fixture
def x():
    return torch.randn(3, 10, 24, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("alpha", [8, 6], ids=["power of two", "not one"])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_those_of_peft(x, alpha, autocast, bias):
    torch.manual_seed(0)
    assert_same(*adapted(Siblings(bias=bias), lora_alpha=alpha), x, autocast=autocast)


@pytest.mark.parametrize("autocast", [True, False])
def test_over_a_base_in_half_precision(x, autocast):
    theirs, ours = adapted_over_half()
    assert_same(theirs, ours, x, autocast=autocast)


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"lora_bias": True}, {"use_rslora": True}, {"lora_dropout": 0.5}]
)
def test_other_adapters_are_computed_as_peft_does(x, options):
    torch.manual_seed(0)
    theirs, ours = adapted(Siblings(bias=True), **options)
    for model in (theirs, ours):
        model.eval()  # dropout draws its numbers in the order of the layers, and these are the same
    assert_same(theirs, ours, x, autocast=False)
    torch.manual_seed(2)
    expected = theirs.train()(x)
    torch.manual_seed(2)
    assert torch.equal(ours.train()(x), expected)


def test_switched_off_merged_or_watched(x):
    torch.manual_seed(0)
    theirs, ours = adapted(Siblings(bias=True))
    for model in (theirs, ours):
        model.one.enable_adapters(False)
        model.two.merge()
    seen = []
    ours.three.lora_B["default"].register_forward_hook(lambda *_: seen.append(1))
    assert_same(theirs, ours, x, autocast=False)
    assert seen


def test_an_input_that_is_written_into_is_rounded_anew(x):
    torch.manual_seed(0)
    theirs, ours = adapted(Siblings(bias=False))
    results = []
    for model in (theirs, ours):
        written = x.clone()
        with torch.autocast("cpu", torch.bfloat16):
            model.one(written)
            written.add_(1.0)
            results.append(model.one(written))
    assert torch.equal(*results)


def checkpoint_bytes(model, run):
    """Bytes of the tensors that the forward pass keeps, without parameters."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        run(model)
    return sum(size for size, _ in kept.values())


def test_layers_with_one_input_keep_one_copy_of_it(x):
    def run(model):
        hidden = x.requires_grad_() * 1.0
        return sum(layer(hidden).sum() for layer in (model.one, model.two, model.three))

    theirs, ours = (checkpoint_bytes(model, run) for model in adapted_over_half())
    copy_of_x = x.numel() * 2
    assert theirs >= 3 * copy_of_x
    assert copy_of_x <= ours < 1.6 * copy_of_x  # beside it, what each A gives: 4 numbers for 24


def test_selective_keeps_no_change_of_an_adapter():
    """Beside the layer's own outputs, those of an adapter are as large."""
    config = LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
                         intermediate_size=128, vocab_size=50)  # fmt: skip
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 32))
    kept = {}
    for rank in (4, 32):
        model = AutoModelForCausalLM.from_config(config)
        _, model = adapted(model, r=rank, target_modules=["gate_proj", "up_proj"])
        recompute(model, "selective")
        loss, kept[rank] = bytes_kept(lambda model=model: model(input_ids=ids, use_cache=False).logits.sum())
        loss.backward()
    changes = 2 * 2 * 32 * 128 * 4
    assert kept[32] - kept[4] > changes


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
         "intermediate_size": 64, "vocab_size": 100}  # fmt: skip


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("config", "is_plain"),
    [(LlamaConfig(**SMALL), True), (PhimoeConfig(**SMALL, num_local_experts=4, sliding_window=8), False)],
    ids=["llama", "phimoe"],
)
def test_a_model_on_meta_keeps_its_own_masks(config, is_plain, base):
    """Models that processes share are built on meta, where autocast is unknown; and tried there, as all are."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        inject_adapter_in_model(LoraConfig(r=4, target_modules=["q_proj"]), model)
    hold_in_half(model, base)
    patch_lora_linear(model)
    assert use_artel_attention(model) is is_plain


@pytest.mark.slow
def test_what_is_recomputed_keeps_no_rounded_input():
    """Layers of BERT read their input itself, which `full` keeps: not twice."""
    config = BertConfig(**SMALL, attn_implementation="sdpa")
    model = BertModel(config).train()
    inject_adapter_in_model(LoraConfig(r=4, target_modules=["query", "value"]), model)
    patch_lora_linear(model)
    recompute(model, "full")
    inputs = []
    for layer in model.encoder.layer:
        layer.register_forward_pre_hook(lambda _, args, kwargs: inputs.extend(args), with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.arange(64)[None]).last_hidden_state
    tensors = [each for each in inputs if isinstance(each, torch.Tensor) and each.ndim == 3]
    assert len(tensors) == config.num_hidden_layers
    assert not any(isinstance(value, tuple) for tensor in tensors for value in vars(tensor).values())
    output.float().sum().backward()
