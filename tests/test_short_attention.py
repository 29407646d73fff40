"""Attention of short sequences on a CPU in bf16: the forward is PyTorch's, the gradients are as near as PyTorch's."""

import shutil

import pytest
import torch
import torch.nn.functional as F

from artel.models import short_attention as short
from artel.models.attention import Mixing, mix


def heads(length, *, key_heads=6, size=64, dtype=torch.bfloat16, seed=0):
    """Query (2, 6, length, size), key and value with `key_heads`, all wanting gradients, and slopes of the output."""
    draw = torch.Generator().manual_seed(seed)
    made = [torch.randn(2, count, length, size, generator=draw).to(dtype) for count in (6, key_heads, key_heads, 6)]
    return *(each.requires_grad_() for each in made[:3]), made[3]


def gradients(function, query, key, value, slopes):
    inputs = [each.detach().requires_grad_() for each in (query, key, value)]
    mixed = function(*inputs)
    mixed.backward(slopes.to(mixed.dtype))
    return mixed.detach(), [each.grad for each in inputs]


def distances(found, wanted):
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.skipif(
    not shutil.which("g++"), reason="needs a C++ compiler"))])  # fmt: skip
@pytest.mark.parametrize(
    ("length", "key_heads", "size", "causal", "scale"),
    [(100, 6, 64, True, None), (128, 2, 64, True, 0.3), (65, 6, 24, False, None), (1, 3, 8, True, None)],
)
def test_gradients_are_as_near_to_the_exact_ones_as_those_of_pytorch(length, key_heads, size, causal, scale, compiled):
    query, key, value, slopes = heads(length, key_heads=key_heads, size=size)

    def pytorch(query, key, value):
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)

    def ours(query, key, value):
        with torch.autocast("cpu", dtype=torch.bfloat16):  # which would round the scores, too
            return short.short_attention(query, key, value, causal=causal, scale=scale)

    torch._dynamo.reset()
    exact = gradients(pytorch, *(each.double() for each in (query, key, value, slopes)))[1]
    theirs = gradients(pytorch, query, key, value, slopes)
    mixed, found = gradients(torch.compile(ours, dynamic=False) if compiled else ours, query, key, value, slopes)
    assert torch.allclose(mixed.float(), theirs[0].float(), atol=0.01)
    if length == 1:  # a token alone: its value is copied, so query and key have no gradient
        assert [float(each.abs().max()) for each in found[:2]] == pytest.approx([0, 0], abs=0.05)
        found, exact, theirs = found[2:], exact[2:], (theirs[0], theirs[1][2:])
    for own, other in zip(distances(found, exact), distances(theirs[1], exact), strict=True):
        assert own <= max(1.2 * other, 0.006)  # bf16's own rounding is 0.004


def test_what_it_takes():
    query, key, value, _ = heads(256)
    assert short.takes(query, key, value, 0.0)
    assert not short.takes(query, key, value, 0.1)  # dropout
    assert not short.takes(*heads(257)[:3], 0.0)
    assert not short.takes(*heads(16, dtype=torch.float32)[:3], 0.0)
    assert not short.takes(query[:, :, :9], key, value, 0.0)  # a part of the sequence
    with torch.no_grad():
        assert not short.takes(query, key, value, 0.0)
    assert not short.takes(*(each.detach() for each in (query, key, value)), 0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert short.takes(*heads(16, dtype=torch.float32)[:3], 0.0)


@pytest.mark.parametrize("causal", [True, False])
def test_training_goes_through_it(causal, monkeypatch):
    called = []
    monkeypatch.setattr("artel.models.attention.short_attention", lambda *a, **k: called.append(k) or a[0])
    query, key, value, _ = heads(32)
    mix(query, key, value, Mixing(None, causal, None, 0.0, None))
    assert called == [{"causal": causal, "scale": None}]
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool)
    mix(query, key, value, Mixing(mask, causal, None, 0.0, None))
    mix(query, key, value, Mixing(None, causal, 5, 0.0, None))  # a window
    assert len(called) == 1
