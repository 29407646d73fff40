"""Cross-entropy in C++ computes what PyTorch's operators compute, for each kind of processor it is built for."""

import pytest
import torch
import torch.nn.functional as F

from artel.models import IGNORED
from artel.models.cpu import build
from artel.models.cpu import cross_entropy as module
from artel.models.cpu.cross_entropy import add_transposed_matmul, cpu_cross_entropy_with_grad, supports_logits
from artel.models.cross_entropy_grad import cross_entropy_with_grad

CPU = torch.device("cpu")
HERE = torch.backends.cpu.get_cpu_capability()
KINDS = ["DEFAULT", "AVX2", "AVX512"]  # each processor can do what stands before it, too

pytestmark = pytest.mark.skipif(build.load_library("cross_entropy") is None, reason="needs a C++ compiler")


@pytest.fixture(params=KINDS)
def processor(request, monkeypatch):
    """A kind of processor that the C++ is built for."""
    if HERE in KINDS and KINDS.index(request.param) > KINDS.index(HERE):
        pytest.skip(f"this processor has no {request.param}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    build._load_library.cache_clear()
    yield
    build._load_library.cache_clear()


def some(count, vocabulary, dtype):
    """Logits and targets with ties, positions that do not count and values that are large."""
    random = torch.Generator().manual_seed(count)
    logits = 3 * torch.randn(count, vocabulary, generator=random)
    targets = torch.randint(vocabulary, (count,), generator=random)
    targets[1::3] = IGNORED
    logits[0, vocabulary // 2 :] = 11.0  # ties
    logits[2:3] *= 30  # a target that has next to none of the sum
    return logits.to(dtype), targets


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "vocabulary"), [(70, 517), (3, 256), (1, 1), (9, 5), (40, 2305), (0, 7)])
def test_loss_and_gradient_are_those_of_the_operators(count, vocabulary, dtype):
    logits, targets = some(max(count, 1), vocabulary, dtype)
    logits, targets = logits[:count], targets[:count]
    before = logits.clone()
    losses, guesses, grad = cpu_cross_entropy_with_grad(logits, targets)
    assert grad.data_ptr() == logits.data_ptr()
    expected = cross_entropy_with_grad(before, targets, vocabulary, None, True)
    torch.testing.assert_close(losses, expected[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(guesses, expected[1])
    # bf16: numbers that lie between two of its own may be rounded to either.
    relative = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(grad, expected[2], rtol=relative, atol=1e-7)
    assert not grad[targets == IGNORED].any()


@pytest.mark.usefixtures("processor")
def test_it_is_as_exact_as_float32_allows():
    """Against float64, over all of a GPT-2's ids. The difference of two logits, of 16 to 32, is rounded by 1e-6."""
    logits, targets = some(12, 50_257, torch.float32)
    targets.clamp_(min=0)
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="sum")
    expected.backward()
    losses, _, grad = cpu_cross_entropy_with_grad(logits, targets)
    torch.testing.assert_close(losses.double().sum(), expected.detach(), rtol=2e-7, atol=0)
    torch.testing.assert_close(grad.double(), exact.grad, rtol=2e-6, atol=1e-30)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_that_is_not_finite_stays_so(dtype):
    logits = torch.randn(7, 300).to(dtype)
    logits[1, 3], logits[2, 299], logits[3], logits[4, :5] = torch.nan, torch.inf, -torch.inf, -torch.inf
    for row in range(7):
        loss, guesses, grad = cpu_cross_entropy_with_grad(logits[row : row + 1].clone(), torch.tensor([9]))
        assert bool(loss.isfinite()) == (row not in (1, 2, 3))
        assert bool(grad.isfinite().all()) == (row not in (1, 2, 3))
        assert 0 <= int(guesses) < 300
    assert not grad[0].isnan().any()


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(("count", "vocabulary", "width"), [(70, 517, 33), (64, 512, 96), (1, 1, 1), (9, 5, 300)])
def test_the_sum_with_a_transposed_product_is_that_of_the_operators(count, vocabulary, width):
    random = torch.Generator().manual_seed(count)
    grad_logits, inputs = (torch.randn(count, size, generator=random).bfloat16() for size in (vocabulary, width))
    total = add_transposed_matmul(None, grad_logits, inputs)
    expected = (grad_logits.T @ inputs).float()
    assert total.shape == (vocabulary, width)
    assert total.dtype == torch.float32
    # The product is rounded to bf16 either way; where sums of another order lie between two numbers, to either.
    near = {"rtol": torch.finfo(torch.bfloat16).eps, "atol": 1e-4}
    torch.testing.assert_close(total, expected, **near)
    product = total.clone()
    assert add_transposed_matmul(total, grad_logits, inputs) is total
    assert torch.equal(total, 2 * product)


@pytest.mark.parametrize("wrong", [9, -1, -(2**40)])
def test_targets_that_are_no_ids_are_refused(wrong):
    with pytest.raises(IndexError, match="among 9 ids"):
        cpu_cross_entropy_with_grad(torch.randn(3, 9), torch.tensor([1, wrong, IGNORED]))


def test_the_operators_declare_what_they_write():
    torch.library.opcheck(module._cross_entropy, some(6, 40, torch.float32), test_utils="test_schema")
    product = torch.randn(6, 40).bfloat16()
    torch.library.opcheck(module._add_transposed, (torch.zeros(40, 6), product, False), test_utils="test_schema")


def test_what_it_cannot_take():
    assert supports_logits(CPU, torch.bfloat16)
    assert not supports_logits(CPU, torch.float16)
    assert not supports_logits(torch.device("cuda"), torch.float32)
