"""Attention on a CPU within documents that share a row: the numbers of a mask, without computing what it hides."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from artel.models.attention import AttentionOptions, attend
from artel.models.cpu import attention
from artel.models.cpu.documents import document_attention

LENGTHS = ((70, 1, 9, 40), (96, 20))
"""Of the documents of two rows; what is left of 128 tokens is padding."""


def numbers_of(lengths=LENGTHS, length=128):
    numbers = torch.zeros(len(lengths), length, dtype=torch.int64)
    for row, documents in zip(numbers, lengths, strict=True):
        start = 0
        for number, size in enumerate(documents, 1):
            row[start : start + size] = number
            start += size
    return numbers


def heads(dtype, key_heads=2, size=16, length=128):
    """Query (2, 4, length, size), key, value, with gradients, in the layout of a model; the gradient of the output."""
    draw = torch.Generator().manual_seed(0)
    made = [torch.randn(2, length, count, size, generator=draw).to(dtype) for count in (4, key_heads, key_heads, 4)]
    query, key, value, grad = (each.transpose(1, 2) for each in made)
    return [query.requires_grad_(), key.requires_grad_(), value.requires_grad_()], grad


def masked(query, key, value, numbers, *, causal, window=None, scale=None):
    positions = torch.arange(numbers.shape[1])
    distance = positions[:, None] - positions
    visible = (numbers[:, :, None] == numbers[:, None]) & ((distance >= 0) if causal else (distance == distance))
    if window is not None:
        visible &= distance.abs() < window
    grouped = query.shape[1] != key.shape[1]
    mixed = F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible[:, None], scale=scale, enable_gqa=grouped
    )
    return mixed * (numbers > 0)[:, None, :, None]


def with_gradients(function, tensors, grad):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    output.backward(grad.to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("key_heads", "window", "scale"), [(4, None, None), (2, None, 0.3), (2, 30, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradients_are_those_under_a_mask(dtype, key_heads, window, scale, causal):
    tensors, grad = heads(dtype, key_heads)
    numbers, options = numbers_of(), {"causal": causal, "window": window, "scale": scale}
    exact = [tensor.detach().double() for tensor in tensors]
    expected = with_gradients(lambda *each: masked(*each, numbers, **options), exact, grad)
    actual = with_gradients(lambda *each: document_attention(*each, numbers, **options), tensors, grad)
    for own, other in zip(actual, expected, strict=True):
        assert own.dtype == dtype
        assert float((own.double() - other).norm() / other.norm()) < (1e-6 if dtype == torch.float32 else 0.006)
    assert not actual[0][1, :, 116:].any()  # padding is not computed


@pytest.mark.skipif(
    not attention.kernels_available(), reason="needs a C++ compiler and a processor that multiplies bf16"
)
def test_documents_by_our_backward_pass_are_as_each_alone():
    tensors, grad = heads(torch.bfloat16)
    numbers = numbers_of()
    together = with_gradients(
        lambda *each: document_attention(*each, numbers, causal=True, window=None, scale=None), tensors, grad
    )
    start = 0
    for size in LENGTHS[0]:
        part = (slice(0, 1), slice(None), slice(start, start + size))
        alone = with_gradients(
            lambda *each: attention.cpu_attention(*each, causal=True, scale=None),
            [tensor[part] for tensor in tensors],
            grad[part],
        )
        for one, other in zip(together, alone, strict=True):
            torch.testing.assert_close(one[part], other, rtol=0, atol=0)
        start += size


def test_it_goes_through_checkpoints_the_compiler_and_tensors_without_values():
    tensors, grad = heads(torch.float32)
    numbers = numbers_of()

    def plain(query, key, value):
        return document_attention(query * 2, key, value, numbers, causal=True, window=None, scale=None)

    expected = with_gradients(plain, tensors, grad)
    torch._dynamo.reset()
    for function in (
        lambda *each: checkpoint(plain, *each, use_reentrant=False),
        torch.compile(plain, backend="aot_eager"),
    ):
        torch.testing.assert_close(with_gradients(function, tensors, grad), expected)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors]
        output = document_attention(*fakes, mode.from_tensor(numbers), causal=True, window=None, scale=None)
        assert output.shape == fakes[0].shape
        assert output.transpose(1, 2).is_contiguous()


def test_what_documents_do_not_see_is_not_multiplied():
    tensors, _ = heads(torch.float32, key_heads=4)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded, torch.no_grad():
        document_attention(*tensors, numbers_of(), causal=True, window=None, scale=None)
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    lengths = [event.input_shapes[0][2] for event in recorded.events() if event.name == name]
    assert sorted(lengths) == sorted(sum(LENGTHS, ()))


@pytest.mark.parametrize("causal", [False, True])
def test_with_dropout_documents_of_one_length_are_together(causal):
    """A probability so small that nothing is dropped: then it is what each document is without."""
    torch.manual_seed(0)
    states = [torch.randn(2, 2, 12, 8, requires_grad=True) for _ in range(3)]
    numbers = torch.tensor([[1] * 4 + [2] * 4 + [3] * 3 + [0], [1] * 3 + [0] * 9])
    outputs, gradients = [], []
    for dropout in (0.0, 1e-12):
        output = attend(*states, AttentionOptions(numbers[:, None, None], causal, None, dropout, None))
        outputs.append(output)
        gradients.append(torch.autograd.grad((output * torch.arange(8.0)).sum(), states))
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    nothing = AttentionOptions(torch.zeros_like(numbers)[:, None, None], causal, None, 1e-12, None)
    assert not attend(*states, nothing).any()
