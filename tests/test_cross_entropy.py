"""Cross-entropy of rows of logits: C++, Triton's kernel by its interpreter and PyTorch's operators beside float64."""

import os
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from artel.models import IGNORED
from artel.models.cpu import build
from artel.models.cpu import cross_entropy as cpu
from artel.models.cpu.cross_entropy import add_transposed_matmul, cpu_rows, supports_logits
from artel.models.cross_entropy import cross_entropy_, gpu_rows, row_function
from artel.models.cross_entropy_rows import define_row_operators, torch_rows
from support.cross_entropy import assert_exact, exact, some

try:
    from artel.models.triton_cross_entropy import launch
except ImportError:
    launch = None

needs_triton = pytest.mark.skipif(
    launch is None or "TRITON_INTERPRET" not in os.environ,
    reason="needs triton, and no GPU: there test_gpu.py runs the kernel",
)
small_blocks = define_row_operators(
    "cross_entropy_in_small_blocks", partial(launch, lanes=32) if launch else torch_rows
)
"""Triton's kernel with several blocks in a row."""

HERE = torch.backends.cpu.get_cpu_capability()
KINDS = ["DEFAULT", "AVX2", "AVX512"]  # each processor can do what stands before it, too

needs_compiler = pytest.mark.skipif(build.load_library("cross_entropy") is None, reason="needs a C++ compiler")


def build_for(kind, monkeypatch):
    """Build the C++ for a kind of processor."""
    if HERE in KINDS and KINDS.index(kind) > KINDS.index(HERE):
        pytest.skip(f"this processor has no {kind}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kind)
    build._load_library.cache_clear()


@pytest.fixture(params=KINDS)
def processor(request, monkeypatch):
    """Build the C++ for one kind of processor."""
    build_for(request.param, monkeypatch)
    yield
    build._load_library.cache_clear()


@pytest.fixture(params=[*KINDS, pytest.param("triton", marks=needs_triton), "torch"])
def rows(request, monkeypatch):
    """Each implementation, the one in C++ as built for each kind of processor."""
    if request.param == "torch":
        yield torch_rows
    elif request.param == "triton":
        yield small_blocks
    else:
        build_for(request.param, monkeypatch)
        yield cpu_rows
        build._load_library.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("count", "vocabulary"), [(70, 517), (3, 256), (1, 1), (9, 5), (20, 2305), (0, 7)])
def test_losses_gradients_and_entropies_are_those_of_float64(rows, count, vocabulary, dtype):
    """The gradient replaces the logits. Columns of padding stay 0."""
    logits, targets = some(max(count, 1), vocabulary, dtype)
    logits, targets = F.pad(logits[:count], (0, 3)), targets[:count]
    expected = exact(logits[:, :vocabulary], targets)
    unchanged = logits.clone()
    without_grad = cross_entropy_(unchanged, targets, compute=rows, vocabulary=vocabulary, needs_grad=False)
    assert torch.equal(unchanged, logits)
    actual = cross_entropy_(logits, targets, compute=rows, vocabulary=vocabulary)
    assert all(map(torch.equal, actual, without_grad))
    assert_exact(actual, logits[:, :vocabulary], expected, dtype)
    assert not logits[:, vocabulary:].any()
    assert not logits[targets == IGNORED].any()


def test_a_row_without_a_target_has_no_gradient_whatever_it_holds(rows):
    logits = torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0], [0.0, 1.0]])
    cross_entropy_(logits, torch.full((3,), IGNORED), compute=rows, vocabulary=2)
    assert not logits.any()


@pytest.mark.parametrize("implementation", ["cpu", pytest.param("gpu", marks=needs_triton), "torch"])
@settings(max_examples=25)
@given(count=st.integers(1, 9), vocabulary=st.integers(1, 700), seed=st.integers(0, 2**31), cut=st.floats(0, 1),
       soft_cap=st.sampled_from([0.0, 3.0, 30.0]), ignored=st.sampled_from([0.0, 0.5, 1.0]))  # fmt: skip
def test_factors_bounds_and_shards_are_those_of_float64(
    implementation, count, vocabulary, seed, cut, soft_cap, ignored
):
    """Each of two shards has its own columns, and sees all targets."""
    rows = {"cpu": cpu_rows, "gpu": small_blocks, "torch": torch_rows}[implementation]
    random = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(count, vocabulary, generator=random)
    logits[0] = logits[0].round()  # ties
    targets = torch.randint(vocabulary, (count,), generator=random)
    targets[torch.rand(count, generator=random) < ignored] = IGNORED
    factors = torch.randn(count, generator=random)
    expected = exact(logits, targets, factors, soft_cap)
    copy = logits.clone()
    arguments = {"compute": rows, "factors": factors, "soft_cap": soft_cap}
    assert_exact(cross_entropy_(copy, targets, vocabulary=vocabulary, **arguments), copy, expected, torch.float32)

    class BothShards:
        """The collectives of two processes, in one."""

        seen = None

        def __init__(self, first_id):
            self.first_id, self.vocabulary = first_id, vocabulary

        def combine(self, statistics, columns):
            BothShards.seen = statistics.clone(), columns + self.first_id
            return self.joined if hasattr(self, "joined") else (statistics, columns)

    at = max(1, min(vocabulary - 1, int(cut * vocabulary)))
    if vocabulary == 1:
        return
    shards = [BothShards(0), BothShards(at)]
    parts = [logits[:, :at].contiguous(), logits[:, at:].contiguous()]
    found = []
    for shard, part in zip(shards, parts, strict=True):
        cross_entropy_(part, targets, vocabulary=part.shape[1], shard=shard, needs_grad=False, **arguments)
        found.append(BothShards.seen)
    best = torch.maximum(found[0][0][0], found[1][0][0])
    shifts = [statistics[0] - best for statistics, _ in found]
    sums = [
        torch.stack([statistics[1] * shift.exp(), statistics[2], (statistics[3] + shift * statistics[1]) * shift.exp()])
        for (statistics, _), shift in zip(found, shifts, strict=True)
    ]
    ids = found[0][1].where(found[0][0][0] >= found[1][0][0], found[1][1])
    for shard in shards:
        shard.joined = torch.cat([best[None], sums[0] + sums[1]]), ids
    actual = [
        cross_entropy_(part, targets, vocabulary=part.shape[1], shard=shard, **arguments)
        for shard, part in zip(shards, parts, strict=True)
    ]
    assert_exact(actual[0], torch.cat(parts, dim=1), expected, torch.float32)
    assert all(map(torch.equal, *actual))


@needs_compiler
@pytest.mark.usefixtures("processor")
def test_it_is_as_exact_as_float32_allows():
    """Against float64, over all of a GPT-2's ids. The difference of two logits, of 16 to 32, is rounded by 1e-6."""
    logits, targets = some(12, 50_257, torch.float32)
    targets.clamp_(min=0)
    losses, grad, _, _ = exact(logits, targets)
    actual = cross_entropy_(logits, targets, compute=cpu_rows, vocabulary=50_257)
    torch.testing.assert_close(actual.losses.double().sum(), losses.sum(), rtol=2e-7, atol=0)
    torch.testing.assert_close(logits.double(), grad, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_that_is_not_finite_stays_so(rows, dtype):
    logits = torch.randn(7, 300).to(dtype)
    logits[1, 3], logits[2, 299], logits[3], logits[4, :5] = torch.nan, torch.inf, -torch.inf, -torch.inf
    for row in range(7):
        grad = logits[row : row + 1].clone()
        actual = cross_entropy_(grad, torch.tensor([9]), compute=rows, vocabulary=300)
        assert bool(actual.losses.isfinite()) == (row not in (1, 2, 3))
        assert bool(grad.isfinite().all()) == (row not in (1, 2, 3))
        assert 0 <= int(actual.guesses) < 300
        assert bool(actual.entropies.isfinite()) == (row not in (1, 2, 3))


@needs_compiler
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
def test_targets_that_are_no_ids_are_refused(rows, wrong):
    """On a GPU an error would wait for it, so the loss is NaN."""
    targets = torch.tensor([1, wrong, IGNORED])
    if rows is cpu_rows:
        with pytest.raises(IndexError, match="among 9 ids"):
            cross_entropy_(torch.randn(3, 9), targets, compute=rows, vocabulary=9)
    else:
        losses = cross_entropy_(torch.randn(3, 9), targets, compute=rows, vocabulary=9).losses
        assert losses.isnan().tolist() == [False, True, False]


@needs_compiler
@needs_triton
def test_the_operators_declare_what_they_write():
    logits, targets = some(6, 40, torch.float32)
    statistics, guesses = torch.empty(4, 6), torch.empty_like(targets)
    arguments = logits, targets, None, statistics, guesses, 40, 0, 40, 0.0
    for name, with_statistics, with_grad in (("", True, True), ("_statistics", True, False), ("_grad", False, True)):
        for device in ("cpu", "gpu"):
            operator = getattr(torch.ops.artel, f"{device}_cross_entropy{name}").default
            torch.library.opcheck(operator, (*arguments, with_statistics, with_grad), test_utils="test_schema")
    product = torch.randn(6, 40).bfloat16()
    torch.library.opcheck(cpu._add_transposed, (torch.zeros(40, 6), product, False), test_utils="test_schema")


def test_each_device_has_its_implementation():
    assert supports_logits("cpu", torch.bfloat16)
    assert not supports_logits("cpu", torch.float16)
    assert not supports_logits("cuda", torch.float32)
    assert row_function("cpu", torch.float32) is cpu_rows
    assert row_function("cpu", torch.float16) is torch_rows
    if not torch.cuda.is_available():  # for a plan
        assert row_function("cuda", torch.float16) is gpu_rows
    assert row_function("mps", torch.float32) is torch_rows


def test_a_plan_needs_no_triton():
    """FakeTensors have no values, so the kernel is not imported."""
    with FakeTensorMode(), mock.patch.dict(sys.modules, {"artel.models.triton_cross_entropy": None}):
        losses = cross_entropy_(torch.empty(5, 9), torch.empty(5, dtype=torch.int64), compute=gpu_rows, vocabulary=9)
        assert losses.losses.shape == losses.entropies.shape == losses.guesses.shape == (5,)


COMPILE = """
import itertools
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from artel.models.triton_cross_entropy import _cross_entropy_kernel as kernel

types = {"logits": "*bf16", "stride": "i32", "targets": "*i64", "factors": "*fp32", "statistics": "*fp32",
         "guesses": "*i64", "columns": "i32", "width": "i32", "first_id": "i32", "num_ids": "i32", "cap": "fp32"}
aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ("logits", "stride", "width")}
for statistics, grad, more in itertools.product((True, False), repeat=3):
    if not (statistics or grad):
        continue
    constants = {"HAS_FACTORS": more, "HAS_CAP": more, "STATISTICS": statistics, "GRAD": grad, "LANES": 512}
    types["factors"] = "*fp32" if more else "*i64"
    source = ASTSource(
        kernel, types | dict.fromkeys(constants, "constexpr"),
        {(kernel.arg_names.index(name),): value for name, value in constants.items()}, aligned,
    )
    code = triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": 16}).asm["ptx"]
    assert "ld.global.v4.b32" in code, code  # 16 bytes at a time
"""


@needs_triton
def test_the_kernel_compiles_for_a_gpu(tmp_path):
    """The interpreter runs Python that the compiler refuses."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
