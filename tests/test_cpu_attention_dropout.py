"""Attention with dropout on a CPU: artel's kernels beside the formula, with the same weights dropped."""

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GPT2Config

from artel.models.activation_checkpointing import recompute
from artel.models.attention import AttentionOptions, attend
from artel.models.attention_switch import use_artel_attention
from artel.models.compile import compile_layers
from artel.models.cpu import attention_dropout as module
from artel.models.cpu.attention import kernels_available
from artel.models.cpu.attention_dropout import dropout_attention, padding_from_mask
from support.waiting import LIMIT

pytestmark = pytest.mark.skipif(
    not kernels_available(), reason="needs a C++ compiler and a processor that multiplies bf16"
)

DROPOUT = 0.25


def hashed(seed: int, document: int, head: int, heads: int, length: int) -> torch.Tensor:
    """Which weights (queries, keys) of a head are kept, as attention.cpp has it: SplitMix64, then MurmurHash3."""
    with np.errstate(over="ignore"):
        mixed = np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(document * heads + head + 1)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        at, key = np.meshgrid(np.arange(length, dtype=np.uint32), np.arange(length, dtype=np.uint32), indexing="ij")
        hash = np.uint32(mixed >> np.uint64(32)) + at * np.uint32(0x9E3779B1) + key * np.uint32(0x85EBCA77)
        hash = (hash ^ (hash >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        hash = (hash ^ (hash >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        hash ^= hash >> np.uint32(16)
    return torch.from_numpy(hash >= round(DROPOUT * 2**32))


def by_formula(query, key, value, documents, causal, seed, every_query=False):
    """Softmax, dropout and sum of each document, in float64. With `every_query` its row's queries all see its keys."""
    output = torch.zeros_like(query)
    heads, whole = query.shape[1:3]
    for number, (row, start, length) in enumerate(documents):
        tokens = slice(start, start + length)
        queries = slice(0, whole) if every_query else tokens
        for head in range(heads):
            own = query[row, head, queries].double()
            keys, values = (each[row, head * each.shape[1] // heads, tokens].double() for each in (key, value))
            scores = own @ keys.T * query.shape[-1] ** -0.5
            if causal:
                scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
            kept = hashed(seed, number, head, heads, whole)[: len(own), :length]
            weights = scores.softmax(-1) * kept / (1 - DROPOUT)
            output[row, head, queries] = (weights @ values).to(output.dtype)
    return output


def tensors(rows, heads, groups, length, size):
    torch.manual_seed(0)
    shapes = [(rows, length, count, size) for count in (heads, heads // groups, heads // groups)]
    made = [torch.randn(shape).to(torch.bfloat16).transpose(1, 2).requires_grad_() for shape in shapes]
    return *made, torch.randn(rows, heads, length, size).to(torch.bfloat16)


WHOLE = ((2, 2, 1, 70, 16), [[1] * 70] * 2, [(0, 0, 70), (1, 0, 70)])
PADDED = ((2, 4, 2, 131, 32), [[1] * 131, [1] * 67 + [0] * 64], [(0, 0, 131), (1, 0, 67)])
LEFT = ((1, 2, 1, 70, 8), [[0] * 5 + [1] * 65], [(0, 5, 65)])
DOCUMENTS = ((1, 1, 1, 40, 8), [[1] * 9 + [2] * 30 + [0]], [(0, 9, 30), (0, 0, 9)])


@pytest.mark.parametrize(
    ("case", "causal", "every_query"),
    [
        *[(case, causal, False) for case in (WHOLE, PADDED, LEFT, DOCUMENTS) for causal in (False, True)],
        *[(case, False, True) for case in (WHOLE, PADDED, LEFT)],
    ],
)
def test_output_and_gradients_are_those_of_the_formula(case, causal, every_query):
    shape, numbers, documents = case
    query, key, value, grad = tensors(*shape)
    torch.manual_seed(7)
    seed = int(torch.randint(2**62, (1,)))
    expected = by_formula(query.float(), key.float(), value.float(), documents, causal, seed, every_query)
    shown = (torch.tensor(numbers)[:, None, :, None] > 0) | every_query
    gradients = torch.autograd.grad(expected, (query, key, value), grad.float() * shown)
    torch.manual_seed(7)
    output = dropout_attention(
        query, key, value, torch.tensor(numbers), causal=causal, dropout=DROPOUT, scale=None, every_query=every_query
    )
    for own, other in zip(
        (output, *torch.autograd.grad(output, (query, key, value), grad)), (expected, *gradients), strict=True
    ):
        assert (own.float() - other.float()).norm() < 0.01 * other.float().norm()


def test_the_share_that_is_dropped():
    kept = torch.stack([hashed(5, 0, head, 4, 200) for head in range(4)]).double()
    assert abs(kept.mean().item() - 0.75) < 0.005
    assert (kept.mean(dim=1) - 0.75).abs().max() < 0.15  # of each key, 200 queries: five standard errors
    assert abs(torch.corrcoef(kept.flatten(1)).triu(1).abs().max().item()) < 0.03  # heads do not resemble one another


def test_padding_of_a_mask():
    """Padding before or behind; a mask of its own for each query and holes are none of this."""
    keys = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0]]).bool()
    found = padding_from_mask(keys[:, None, None].expand(4, 1, 4, 4), causal=True)
    assert found.keys.tolist() == keys.long().tolist()
    assert not found.causal
    before = torch.ones(4, 4, dtype=torch.bool).tril()
    found = padding_from_mask(keys[[0, 2], None, None] & before, causal=True)
    assert found.keys.tolist() == keys[[0, 2]].long().tolist()
    assert found.causal
    assert padding_from_mask(before[None, None], causal=False) is None
    assert padding_from_mask(keys[1:2, None, None] & before, causal=True) is None  # padding before
    assert padding_from_mask(before[None, None].roll(1, -1), causal=True) is None
    assert (
        padding_from_mask(torch.tensor([[1, 0, 1, 1]]).bool()[:, None, None].expand(1, 1, 4, 4), causal=False) is None
    )


@pytest.mark.parametrize(("causal", "groups", "dropout"), [(True, 2, 0.0), (False, 1, 0.0), (True, 1, DROPOUT)])
def test_a_mask_of_padding_is_attended_by_the_kernel(causal, groups, dropout):
    """All queries of a row, padding too, as the mask has it; without dropout the numbers are PyTorch's."""
    query, key, value, grad = tensors(3, 4, groups, 150, 32)
    shown = torch.arange(150) < torch.tensor([150, 67, 1])[:, None]
    mask = shown[:, None, None].expand(3, 1, 150, 150)
    mask = mask & torch.ones(150, 150, dtype=torch.bool).tril() if causal else mask
    output = attend(query, key, value, AttentionOptions(mask, causal, None, dropout, None))
    assert output.grad_fn.name().startswith("GeneratedBackwardFor_artel_cpu_attention_dropout")
    if dropout:
        assert output.isfinite().all()
        return
    exact = F.scaled_dot_product_attention(*(each.double() for each in (query, key, value)), mask, enable_gqa=True)
    expected = (exact, *torch.autograd.grad(exact, (query, key, value), grad.double()))
    for own, other in zip((output, *torch.autograd.grad(output, (query, key, value), grad)), expected, strict=True):
        assert (own.double() - other).norm() < 0.005 * other.norm()


def test_without_dropout_no_random_number_is_drawn():
    query, key, value, _ = tensors(1, 2, 1, 24, 16)
    state = torch.get_rng_state()
    attend(query, key, value, AttentionOptions(torch.ones(1, 1, 24, 24, dtype=torch.bool), False, None, 0.0, None))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_attention_function_takes_it_while_it_trains():
    """The same seed drops the same weights; without gradients, in float32 or under a window PyTorch computes."""
    query, key, value, _ = tensors(2, 2, 1, 24, 16)
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[1, 20:] = False
    mask = mask[:, None, None].expand(2, 1, 24, 24)
    options = AttentionOptions(mask, False, None, DROPOUT, None)

    def attended(*given, options=options):
        torch.manual_seed(3)
        return attend(*given, options)

    first = attended(query, key, value)
    assert first.grad_fn.name().startswith("GeneratedBackwardFor_artel_cpu_attention_dropout")
    assert torch.equal(first, attended(query, key, value))
    for one_for_all in (mask[1:], mask[1:, :, :1]):  # a mask for all rows, or all queries, as PyTorch takes it
        shared = attended(query, key, value, options=options._replace(mask=one_for_all))
        assert shared.isfinite().all()
        assert (shared != 0).any(dim=-1).all()
    floats = [each.detach().float().requires_grad_() for each in (query, key, value)]
    assert not attended(*floats).grad_fn.name().startswith("GeneratedBackwardFor_artel")
    windowed = attended(query, key, value, options=options._replace(window=4))
    assert not windowed.grad_fn.name().startswith("GeneratedBackwardFor_artel")
    with torch.no_grad():
        assert attended(query, key, value).shape == first.shape


def test_computed_again_it_drops_the_same_weights():
    query, key, value, grad = tensors(2, 2, 1, 24, 16)
    options = AttentionOptions(None, True, None, DROPOUT, None)
    results = []
    for again in (False, True):
        torch.manual_seed(3)
        inputs = [each.detach().requires_grad_() for each in (query, key, value)]
        output = checkpoint(attend, *inputs, options, use_reentrant=False) if again else attend(*inputs, options)
        results.append([output, *torch.autograd.grad(output, inputs, grad)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_operators_are_what_pytorch_expects():
    """Their fakes, their gradients, and compiled."""
    query, key, value, _ = tensors(2, 2, 1, 24, 16)
    numbers, seed = torch.ones(2, 24, dtype=torch.int64), torch.tensor([5])
    given = (query, key, value, numbers, seed, False, False, DROPOUT, 0.25)
    torch.library.opcheck(module._attention, given)
    with torch.no_grad():
        outputs = module._attention(*given)
        torch.library.opcheck(module._attention_backward, (query, *given[:5], *outputs, *given[5:]))


@pytest.mark.long
def test_compiled_layers_that_are_computed_again_drop_the_same_weights():
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 24, "vocab_size": 99}
    config = GPT2Config(**sizes, attn_pdrop=DROPOUT, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    begun = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(99, (2, 24))
    gradients = []
    for how in ("none", "selective", "full"):
        torch._dynamo.reset()
        model = copy.deepcopy(begun).train()
        use_artel_attention(model, encoders=False)
        recompute(model, how)
        compile_layers(model, fixed=True)
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() < 1e-6 * gradients[0].norm()


@pytest.mark.parametrize("masked", [False, True])
def test_the_same_weights_are_dropped_without_gradients(masked):
    """A batch that is read twice, first without gradients (GradCache), must be dropped from alike."""
    query, key, value, _ = tensors(2, 2, 2, 24, 16)
    mask = torch.ones(2, 1, 24, 24, dtype=torch.bool) if masked else None
    options = AttentionOptions(mask=mask, causal=False, window=None, scale=None, dropout=DROPOUT)

    def attended():
        torch.manual_seed(3)
        return attend(query, key, value, options)

    assert query.requires_grad
    with torch.no_grad():
        first = attended()
    assert torch.equal(attended(), first)


SCARCE = """
import resource
from pathlib import Path
import torch
from artel.models.cpu.attention_dropout import dropout_attention
torch.set_num_threads(2)
def attend(length):
    heads = (torch.zeros(1, length, 1, 16, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    numbers = torch.ones(1, length, dtype=torch.int64)
    return dropout_attention(*heads, numbers, causal=True, dropout=0.1, scale=None)
attend(64)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (30 << 20), resource.RLIM_INFINITY))
try:
    attend(100_000)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
def test_memory_that_is_out_is_an_error():
    """Not the end of the process: a smaller micro-batch may fit."""
    done = subprocess.run([sys.executable, "-c", SCARCE], capture_output=True, text=True, timeout=LIMIT)
    assert "std::bad_alloc" in done.stdout, done.stderr
