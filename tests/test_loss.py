"""Head and cross-entropy in one: the loss and gradients of the reference, for every architecture, in any pieces."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    ModernBertConfig,
    OPTConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    RobertaConfig,
)

from artel.models import IGNORED, logits_loss
from artel.models import loss as losses

SMALL = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2}


@pytest.mark.parametrize("size", [1, 2**30])  # 128 positions at a time, the least, or all
@given(count=st.integers(1, 400), vocabulary=st.integers(2, 400), seed=st.integers(0, 2**31), bias=st.booleans(),
       share=st.sampled_from([0.0, 0.5, 1.0]))  # fmt: skip
@settings(max_examples=40)
def test_loss_and_gradients_are_those_of_the_reference(size, count, vocabulary, seed, bias, share):
    """Against float64; 1e-5 relative to the largest gradient."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 7, generator=random, requires_grad=True)
    weight = torch.randn(vocabulary, 7, generator=random, requires_grad=True)
    shift = torch.randn(vocabulary, generator=random, requires_grad=True) if bias else None
    targets = torch.randint(vocabulary, (count,), generator=random)
    targets[torch.rand(count, generator=random) < share] = IGNORED
    inputs = [each for each in (hidden, weight, shift) if each is not None]

    logits = F.linear(hidden.double(), weight.double(), None if shift is None else shift.double())
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    gradients = torch.autograd.grad(expected * 0.3, inputs)
    loss, guesses = losses.linear_cross_entropy(hidden, weight, shift, targets, chunk_bytes=size)
    actual = torch.autograd.grad(loss * 0.3, inputs)
    assert loss.dtype == torch.float32
    assert abs(float(loss.detach()) - float(expected.detach())) <= 1e-5 * max(1.0, float(expected.detach()))
    best = logits.max(dim=1).values
    assert (best - logits.gather(1, guesses[:, None])[:, 0]).abs().max() < 1e-5
    for mine, theirs in zip(actual, gradients, strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("size", [1, 2**30])
@given(count=st.integers(0, 400), vocabulary=st.integers(2, 400), seed=st.integers(0, 2**31), bias=st.booleans())
@settings(max_examples=30)
def test_log_probabilities_and_their_gradients_are_those_of_whole_logits(frozen, size, count, vocabulary, seed, bias):
    """With a factor of its own for each position, as the loss of a preference has for each answer; against float64."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 7, generator=random, requires_grad=True)
    weight = torch.randn(vocabulary, 7, generator=random, requires_grad=not frozen)
    shift = torch.randn(vocabulary, generator=random, requires_grad=not frozen) if bias else None
    targets = torch.randint(vocabulary, (count,), generator=random)
    targets[torch.rand(count, generator=random) < 0.3] = IGNORED
    factors = torch.randn(count, generator=random)
    inputs = [each for each in (hidden, weight, shift) if each is not None and each.requires_grad]

    logits = F.linear(hidden.double(), weight.double(), None if shift is None else shift.double())
    expected = -F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
    gradients = torch.autograd.grad((expected * factors).sum(), inputs)
    actual, entropies = logits_loss.linear_log_probs(hidden, weight, shift, targets, chunk_bytes=size)
    assert (actual.dtype, entropies.dtype, entropies.requires_grad) == (torch.float32, torch.float32, False)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies.double(), entropy(logits), rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(torch.autograd.grad((actual * factors).sum(), inputs), gradients, strict=True):
        assert theirs.numel() == 0 or (mine - theirs).abs().max() <= 1e-5 * max(1.0, float(theirs.abs().max()))


def entropy(logits):
    log_probs = logits.detach().log_softmax(dim=-1)
    return -(log_probs.exp() * log_probs).sum(dim=-1)


class ProductShapes(TorchDispatchMode):
    """Records the shapes of the products within."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "mm" in operator.name():
            shapes = (tuple(each.shape) for each in args if isinstance(each, torch.Tensor))
            self.seen.add((operator.name(), *shapes))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", [losses.linear_cross_entropy, logits_loss.linear_log_probs])
def test_in_bf16_on_a_cpu_products_come_in_few_shapes(function):
    """oneDNN compiles and keeps a kernel for each shape. The numbers are those of as many positions as there are."""

    random = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 16, generator=random).bfloat16().requires_grad_()
    shapes = ProductShapes()
    for count in (129, 131, 140, 160, 290, 300, 310, 320):
        hidden = torch.randn(count, 16, generator=random).bfloat16().requires_grad_()
        targets = torch.randint(40, (count,), generator=random)
        with shapes:
            result = function(hidden, weight, None, targets, chunk_bytes=1)
            result = result[0] if function is losses.linear_cross_entropy else -result[0].sum()
            actual = torch.autograd.grad(result, [hidden, weight])
        expected = F.cross_entropy(hidden.double() @ weight.double().T, targets, reduction="sum")
        assert abs(float(result.detach()) / float(expected.detach()) - 1) < 0.01
        for mine, theirs in zip(actual, torch.autograd.grad(expected, [hidden, weight]), strict=True):
            assert mine.shape == theirs.shape
            assert (mine - theirs).abs().max() <= 0.02 * theirs.abs().max()
    assert len(shapes.seen) <= 3 * 3  # 128, 64 and 32 positions: logits and two gradients


def test_without_gradients_their_products_are_not_computed():
    """As in validation: the logits, and nothing multiplied with them."""
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        loss, guesses = losses.linear_cross_entropy(hidden, weight, None, torch.arange(5))
    assert counter.get_total_flops() == 2 * 5 * 4 * 9
    expected, same = losses.linear_cross_entropy(hidden, weight, None, torch.arange(5))
    assert torch.equal(loss, expected.detach())
    assert torch.equal(guesses, same)


def test_frozen_parts_get_no_gradient_and_a_second_backward_is_refused():
    hidden = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(9, 4)
    loss, _ = losses.linear_cross_entropy(hidden, weight, None, torch.arange(5))
    loss.backward(retain_graph=True)
    assert weight.grad is None
    with pytest.raises(RuntimeError, match="can run only once"):
        loss.backward()


OPENED = [
    (GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=101, bos_token_id=0, eos_token_id=0), True),
    (LlamaConfig(**GROUPED), True),
    (Qwen3Config(**GROUPED, head_dim=8), True),
    (Qwen3MoeConfig(**GROUPED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16), True),
    (GPTNeoXConfig(**SMALL), True),
    (OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32), True),
    (BertConfig(**SMALL), True),
    (RobertaConfig(**SMALL), True),
    (ModernBertConfig(**SMALL), True),
    (Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=0.05), True),  # bounds its logits
    (CohereConfig(**GROUPED), True),  # scales them
    (GraniteConfig(**GROUPED, logits_scaling=7.0), True),
]


@pytest.mark.parametrize(("config", "opens"), OPENED, ids=lambda value: getattr(value, "model_type", None))
def test_a_model_s_loss_and_gradients_are_those_of_its_logits(config, opens, monkeypatch):
    """And heads behind which something happens to logits are left shut."""
    for module, name in ((losses, "linear_cross_entropy"), (logits_loss, "linear_log_probs")):
        monkeypatch.setattr(module, name, partial(getattr(module, name), chunk_bytes=1))
    torch.manual_seed(0)
    encoder = config.model_type in ("bert", "roberta", "modernbert")
    model = (AutoModelForMaskedLM if encoder else AutoModelForCausalLM).from_config(config).eval()
    ids = torch.randint(3, 101, (3, 70))
    targets = torch.randint(3, 101, (3, 70))
    targets[:, ::3] = IGNORED
    places = (targets.flatten() != IGNORED).nonzero().flatten()
    logits = model(input_ids=ids).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    expected.backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

    assert (losses.output_head(model) is not None) == opens
    for where in (None, places):
        model.zero_grad()
        loss, guesses = losses.model_losses(model, {"input_ids": ids}, targets, where)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        likeliest = logits.argmax(dim=-1)
        assert torch.equal(guesses, likeliest if where is None else likeliest.flatten()[places])
        assert_gradients(model, gradients)
    model.zero_grad()
    of_places = targets.flatten()[places]
    each, entropies = logits_loss.target_log_probs(model, {"input_ids": ids}, of_places, places)
    (-each.sum()).backward()
    torch.testing.assert_close(-each.sum(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(entropies, entropy(logits.flatten(0, 1)[places]), rtol=1e-5, atol=1e-5)
    assert_gradients(model, gradients)
    assert torch.equal(model(input_ids=ids).logits, logits)  # the head is shut again


def assert_gradients(model, expected):
    for name, parameter in model.named_parameters():
        if name in expected:
            limit = 1e-5 * float(expected[name].abs().max()) + 1e-5
            assert (parameter.grad - expected[name]).abs().max() <= limit, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("config", "opens"), OPENED, ids=lambda value: getattr(value, "model_type", None))
def test_a_head_is_known_by_weights_of_half_the_size_too(config, opens, dtype):
    """As DeepSpeed holds them."""
    torch.manual_seed(0)
    encoder = config.model_type in ("bert", "roberta", "modernbert")
    model = (AutoModelForMaskedLM if encoder else AutoModelForCausalLM).from_config(config).to(dtype)
    assert (losses.output_head(model) is not None) == opens


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operator makes."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple) else [result]:
            if isinstance(each, torch.Tensor):
                self.bytes = max(self.bytes, each.numel() * each.element_size())
        return result


def test_a_bias_that_is_scaled_with_the_logits_keeps_the_head_shut():
    model = AutoModelForCausalLM.from_config(GraniteConfig(**GROUPED, logits_scaling=7.0))
    model.lm_head = torch.nn.Linear(32, 101)
    torch.nn.init.zeros_(model.lm_head.bias)  # so that nothing shows yet
    assert losses.output_head(model) is None


def test_what_is_held_is_a_piece_of_the_logits():
    """All logits of 4,000 positions and 20,000 ids would be 320 MB in float32; a piece is 34."""
    hidden = torch.randn(4000, 8, requires_grad=True)
    weight = torch.randn(20_000, 8, requires_grad=True)
    with Largest() as largest:
        losses.linear_cross_entropy(hidden, weight, None, torch.arange(4000), chunk_bytes=2**25)[0].backward()
    assert 2**24 < largest.bytes < 2**26


def test_bounded_logits_can_be_divided_and_read_in_chunks():
    """Gemma 2: the bound comes before the temperature, also for losses of logits, and the config keeps it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=0.05)).eval()
    ids = torch.randint(3, 101, (2, 20))
    inputs, places, targets = {"input_ids": ids}, torch.arange(40), ids.flatten()
    logits = model(**inputs).logits.flatten(0, 1)
    expected = (logits / 0.5).log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]
    actual, _ = logits_loss.target_log_probs(model, inputs, targets, places, temperature=0.5)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    read = logits_loss.PositionLogits(model, inputs, places)
    torch.testing.assert_close(torch.cat([read.read(chunk) for chunk in read.chunks()]), logits, rtol=1e-5, atol=1e-6)

    def squares(chunk_logits, chunk):
        return chunk_logits.square().sum()[None]

    logits.square().sum().backward()
    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    model.zero_grad()
    logits_loss.loss_of_logits(model, inputs, places, squares, 1)[0].backward()
    assert_gradients(model, gradients)
    with pytest.raises(RuntimeError, match="Expected"), losses.hidden_states_as_logits(losses.output_head(model)):
        model(input_ids=torch.ones(2, 3))  # ids that are no integers
    assert model.config.final_logit_softcapping == 0.05
