"""Attention on a CPU in bf16: the forward is PyTorch's, the gradients are as near to the exact ones as PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from artel.models.attention import AttentionOptions, attend
from artel.models.cpu import attention as module
from artel.models.cpu.documents import document_attention

pytestmark = pytest.mark.skipif(
    not module.kernels_available(), reason="needs a C++ compiler and a processor that multiplies bf16"
)


def heads(length, *, key_heads=6, size=64, dtype=torch.bfloat16, seed=0):
    """Query (2, 6, length, size), key and value with `key_heads`, with gradients, and the gradient of the output."""
    draw = torch.Generator().manual_seed(seed)
    made = [torch.randn(2, count, length, size, generator=draw).to(dtype) for count in (6, key_heads, key_heads, 6)]
    return *(each.requires_grad_() for each in made[:3]), made[3]


def gradients(function, query, key, value, grad_output):
    inputs = [each.detach().requires_grad_() for each in (query, key, value)]
    mixed = function(*inputs)
    mixed.backward(grad_output.to(mixed.dtype))
    return mixed.detach(), [each.grad for each in inputs]


def distances(actual, expected):
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("length", "key_heads", "size", "causal", "scale"),
    [
        (100, 6, 64, True, None),
        (128, 2, 64, True, 0.3),
        (65, 6, 24, False, None),
        (1, 3, 8, True, None),
        (577, 1, 80, True, None),
        (2, 6, 2, False, None),
    ],
)
def test_gradients_are_as_near_to_the_exact_ones_as_those_of_pytorch(length, key_heads, size, causal, scale, compiled):
    query, key, value, grad_output = heads(length, key_heads=key_heads, size=size)

    def pytorch(query, key, value):
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)

    def ours(query, key, value):
        with torch.autocast("cpu", dtype=torch.bfloat16):  # which would round the scores, too
            return module.cpu_attention(query, key, value, causal=causal, scale=scale)

    torch._dynamo.reset()
    exact = gradients(pytorch, *(each.double() for each in (query, key, value, grad_output)))[1]
    theirs = gradients(pytorch, query, key, value, grad_output)
    mixed, actual = gradients(torch.compile(ours, dynamic=False) if compiled else ours, query, key, value, grad_output)
    assert torch.allclose(mixed.float(), theirs[0].float(), atol=0.01)
    if length == 1:  # a token alone: its value is copied, so query and key have no gradient
        assert [float(each.abs().max()) for each in actual[:2]] == pytest.approx([0, 0], abs=0.05)
        actual, exact, theirs = actual[2:], exact[2:], (theirs[0], theirs[1][2:])
    for own, other in zip(distances(actual, exact), distances(theirs[1], exact), strict=True):
        assert own <= max(1.2 * other, 0.006)  # bf16's own rounding is 0.004


@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("numbered", [False, True], ids=["rows", "documents"])
def test_heads_whose_numbers_are_not_adjacent(which, numbered):
    """PyTorch's kernel takes them to be, and would read what is between."""
    given = list(heads(32, size=16))
    numbers = torch.ones(2, 32, dtype=torch.int64)

    def ours(query, key, value):
        if numbered:
            return document_attention(query, key, value, numbers, causal=True, window=None, scale=None)
        return module.cpu_attention(query, key, value, causal=True, scale=None)

    expected = ours(*given[:3])
    given[which] = given[which].detach().transpose(-1, -2).contiguous().transpose(-1, -2)
    assert torch.equal(ours(*given[:3]), expected)


def test_what_it_takes():
    query, key, value, _ = heads(256)
    assert module.is_supported(query, key, value, 0.0)
    assert not module.is_supported(query, key, value, 0.1)  # dropout
    assert module.is_supported(*heads(257)[:3], 0.0)
    assert not module.is_supported(*heads(9, size=15)[:3], 0.0)  # numbers are multiplied two at a time
    assert not module.is_supported(*heads(16, dtype=torch.float32)[:3], 0.0)
    assert not module.is_supported(query[:, :, :9], key, value, 0.0)  # a part of the sequence
    with torch.no_grad():
        assert not module.is_supported(query, key, value, 0.0)
    assert not module.is_supported(*(each.detach() for each in (query, key, value)), 0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module.is_supported(*heads(16, dtype=torch.float32)[:3], 0.0)


@pytest.mark.parametrize("causal", [True, False])
def test_training_goes_through_it(causal, monkeypatch):
    called = []
    monkeypatch.setattr("artel.models.attention.cpu_attention", lambda *a, **k: called.append(k) or a[0])
    query, key, value, _ = heads(32)
    attend(query, key, value, AttentionOptions(None, causal, None, 0.0, None))
    assert called == [{"causal": causal, "scale": None}]
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    attend(query, key, value, AttentionOptions(mask, causal, None, 0.0, None))
    attend(query, key, value, AttentionOptions(None, causal, 5, 0.0, None))  # a window
    assert len(called) == 1


def test_heads_may_lie_in_any_way():
    """Beside one another in one tensor, as GPT-2's do, expanded, or turned."""
    together = torch.randn(2, 33, 3 * 4 * 16).bfloat16()
    query, key, value = (each.unflatten(2, (4, 16)).transpose(1, 2) for each in together.chunk(3, dim=2))
    value = value.transpose(2, 3).contiguous().transpose(2, 3)
    grad_output = torch.randn(2, 1, 33, 1).bfloat16().expand(2, 4, 33, 16)
    mixed, log_sums = module._attention(query, key, value, True, 0.25)
    result = module._attention_backward(grad_output, query, key, value, mixed, log_sums, True, 0.25)
    tidy = (each.contiguous() for each in (grad_output, query, key, value, mixed, log_sums))
    assert all(torch.equal(a, b) for a, b in zip(result, module._attention_backward(*tidy, True, 0.25), strict=True))


def test_pytorch_s_own_checks_of_operators():
    query, key, value, grad_output = heads(20, key_heads=2, size=16)
    torch.library.opcheck(module._attention, (query, key, value, True, 0.25))
    with torch.no_grad():
        outputs = module._attention(query, key, value, True, 0.25)
        torch.library.opcheck(module._attention_backward, (grad_output, query, key, value, *outputs, True, 0.25))


def test_what_is_not_finite_stays_so():
    query, key, value, grad_output = heads(70)
    with torch.no_grad():
        value[0, 1, 3] = torch.nan
    _, result = gradients(
        lambda *given: module.cpu_attention(*given, causal=True, scale=None), query, key, value, grad_output
    )
    assert all(each[1].isfinite().all() for each in result)
    assert not result[0][0, 1].isfinite().all()
