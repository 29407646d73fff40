"""Mixtures of experts: experts shared out over processes, and the loss that keeps them equally busy."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from artel.models.activation_checkpointing import recompute
from artel.models.compile import repeated_layers
from artel.models.experts import find_experts
from artel.models.router_aux_loss import attach_loss, get_router_aux_loss
from artel.objectives.causal import Causal
from artel.objectives.chat import shift_rows
from artel.objectives.per_token import BALANCED_SUMS, balanced_token_sums
from artel.objectives.types import Batch
from artel.parallel.expert_parallel import expert_meshes, expert_problems, split_experts
from artel.parallel.mesh import NAMES
from artel.tokens import Rows
from support.ranks import run_ranks

_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "router_aux_loss_coef": 0.5,
}  # fmt: skip
_KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 24, "intermediate_size": 48, "head_dim": 8,
                  "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 40},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 40, "head_dim": 8, "pad_token_id": 0,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
}  # fmt: skip


def model_of(kind: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **_SIZES | _KINDS[kind] | more))
    for name, parameter in model.named_parameters():  # so that some experts are chosen more often than others
        if name.endswith(("gate.weight", "router.weight")):
            parameter.data.normal_(0, 0.5)
    return model.train()


def batch_of(rows: range, length: int, *, padded: bool = True) -> Batch:
    """Rows of a text that is the same however it is cut; with `padded` the rows end in padding, one of them at once."""
    chance = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 64, (16, 32), generator=chance)[rows.start : rows.stop]
    ends = torch.randint(6, 12, (16,), generator=chance)[rows.start : rows.stop]
    real = torch.arange(length)[None] < ends[:, None]
    targets = torch.where(real, ids[:, 1 : length + 1], -100)
    targets[:, :2] = -100
    targets[[row for row in range(len(rows)) if rows[row] == 3]] = -100  # a padding row, as it were
    tensors = {"input_ids": ids[:, :length], "targets": targets} | ({"real": real} if padded else {})
    return Batch(tensors, int((targets != -100).sum()), int(real.sum()))


def sums_of(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    return balanced_token_sums(model, {"input_ids": batch.tensors["input_ids"], "use_cache": False}, batch)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    by_name = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in by_name.items()}


def difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of a gradient, relative to its largest element."""
    assert actual.keys() == expected.keys()
    return max(float((actual[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected)


def alone(model: PreTrainedModel, batches: list[Batch]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sums and gradients of one process that runs all batches."""
    model.zero_grad()
    total = torch.zeros(len(BALANCED_SUMS))
    for batch in batches:
        sums = sums_of(model, batch)
        sums[0].backward()
        total += sums.detach()
    return total, gradients(model)


# ---- the loss, on one process


@pytest.mark.parametrize("kind", _KINDS)
def test_balance_does_not_depend_on_the_cut(kind: str) -> None:
    whole, expected = alone(model_of(kind), [batch_of(range(8), 12)])
    assert whole[3] > 0
    for size in (1, 2, 4):
        total, actual = alone(model_of(kind), [batch_of(range(at, at + size), 12) for at in range(0, 8, size)])
        torch.testing.assert_close(total, whole, rtol=1e-6, atol=0)
        assert difference(actual, expected) < 1e-5


def test_balance_is_that_of_transformers_for_one_row_and_one_layer() -> None:
    model = model_of("mixtral", num_hidden_layers=1)
    batch = batch_of(range(1), 12)
    real = batch.tensors["real"]
    sums = sums_of(model, batch)
    logits = model(batch.tensors["input_ids"], output_router_logits=True).router_logits
    expected = 0.5 * batch.targets * load_balancing_loss_func(logits, 4, 2, real.long())
    torch.testing.assert_close(sums[3], expected.detach(), rtol=1e-6, atol=0)
    # The loss stays that of the tokens; its gradient is that of both.
    plain = model_of("mixtral", num_hidden_layers=1, router_aux_loss_coef=0.0)
    assert get_router_aux_loss(plain) is None
    alike = sums_of(plain, batch)
    assert alike[0] == sums[0]
    assert alike[3] == 0
    (alike[0] + expected).backward()
    of_balance = gradients(model)
    wanted_gradients = {name: each + of_balance.get(name, 0.0) for name, each in gradients(plain).items()}
    model.zero_grad()
    sums[0].backward()
    assert difference(gradients(model), wanted_gradients) < 1e-5


@pytest.mark.slow
def test_balance_of_what_is_computed_again_or_compiled_or_judged() -> None:
    batches = [batch_of(range(4), 12), batch_of(range(4, 8), 12)]
    whole, expected = alone(model_of("qwen3_moe", mlp_only_layers=[]), batches)
    for how, compiled in (("full", False), ("selective", False), ("none", True), ("selective", True)):
        model = model_of("qwen3_moe", mlp_only_layers=[])
        recompute(model, how)
        torch._dynamo.reset()
        counters.clear()
        if compiled:
            for layer in repeated_layers(model):
                layer.compile(backend="aot_eager")
        total, actual = alone(model, batches)
        torch.testing.assert_close(total, whole, rtol=1e-6, atol=0, msg=f"{how} {compiled}")
        assert difference(actual, expected) < 1e-5, (how, compiled)
        assert counters["stats"]["unique_graphs"] == compiled, counters  # one, whole, for all layers
    assert sums_of(model.eval(), batches[0])[3] == 0


def test_padding_is_reported() -> None:
    """Of conversations of unequal length, and of blocks that documents do not fill."""
    ids, numbers = np.ones((2, 6), dtype=np.int64), np.empty((2, 0), dtype=np.int64)
    lengths, valid, indices = np.array([6, 3]), np.array([True, True]), np.arange(2)
    rows = Rows(ids, lengths, valid, indices, indices, np.ones((2, 6), dtype=np.uint8), numbers)
    assert shift_rows(rows).tensors["real"].tolist() == [[True] * 5, [True, True, False, False, False]]
    flags = np.array([[2, 3, 4, 5, 5, 5], [2, 3, 3, 0, 0, 0]], dtype=np.uint32)
    causal = Causal.__new__(Causal)
    causal.isolated_documents = False
    packed = causal.batch(dataclasses.replace(rows, flags=flags))
    assert packed.tensors["real"].tolist() == [[True] * 5, [True, True, True, False, False]]
    assert "real" not in causal.batch(dataclasses.replace(rows, flags=flags[:1].repeat(2, axis=0))).tensors


def test_a_stage_carries_its_part() -> None:
    """The gradient of the loss is 1, whatever comes back for the output."""
    one, two = torch.tensor([2.0], requires_grad=True), torch.tensor(3.0, requires_grad=True)
    (7 * attach_loss(one * 5, two.square())).sum().backward()
    assert (one.grad, two.grad) == (35.0, 6.0)


def _part_of_rows(rank: int) -> float:
    """Rows split over two processes: the parts of the loss add up, and have the gradients of the whole."""
    balance = get_router_aux_loss(model_of("mixtral", num_hidden_layers=2))
    assert balance is not None
    batch = batch_of(range(8), 12)
    targets, real = batch.tensors["targets"], batch.tensors["real"]
    whole = [torch.randn(8 * 12, 4, generator=torch.Generator().manual_seed(layer)) for layer in range(2)]
    whole = [each.requires_grad_() for each in whole]
    expected = balance.loss(whole, targets, real)
    grads = torch.stack(torch.autograd.grad(expected, whole)).view(2, 8, 12, 4)
    balance.context = dist.group.WORLD
    mine = slice(rank * 5, rank * 5 + 5 + 2 * rank)  # 5 of the 12 tokens, or 7
    parts = [each.detach().view(8, 12, 4)[:, mine].reshape(-1, 4).requires_grad_() for each in whole]
    actual = balance.loss(parts, targets[:, mine], real[:, mine])
    apart = torch.stack(torch.autograd.grad(actual, parts)).view(2, 8, -1, 4) - grads[:, :, mine]
    total = actual.detach().clone()
    dist.all_reduce(total)
    return float(max(apart.abs().max() / grads.abs().max(), (total / expected.detach() - 1).abs()))


# ---- experts over processes


def test_experts_that_cannot_be_shared_out() -> None:
    with torch.device("meta"):
        mixture, dense = (
            model_of("qwen3_moe"),
            AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1)),
        )
    assert not expert_problems(mixture, 4)
    (problem,) = expert_problems(mixture, 3)
    assert problem.what == "qwen3_moe has 8 experts per layer, which 3 does not divide"
    assert problem.fix == "write one of: 1, 2, 4, 8"
    (problem,) = expert_problems(dense, 2)
    assert problem.what.startswith("gpt2 has no experts")
    next(iter(find_experts(mixture).values())).register_parameter("norm", torch.nn.Parameter(torch.empty(32)))
    (problem,) = expert_problems(mixture, 2)
    assert problem.what == "qwen3_moe: norm of model.layers.0.mlp.experts is not stored per expert"


@pytest.mark.ci
@pytest.mark.processes
def test_experts_over_two_processes() -> None:
    """Loss and gradients are those of one process that runs all batches; weights come after the split."""
    for result in run_ranks(2, __file__, "_over_two", 400):
        assert max(result["sums"]) < 1e-6, result
        assert max(result["gradients"].values()) < 1e-5, result
        assert max(result["busy"]) < 1e-6, result
        assert result["parts of rows"] < 1e-6, result


def _over_two(rank: int, world: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, 1, 2, 1, 1), mesh_dim_names=NAMES)
    batches = [
        [batch_of(range(3), 12), batch_of(range(3, 4), 12)],
        [batch_of(range(4, 9), 7), batch_of(range(9, 10), 7)],
    ]
    sums, apart = [], {}
    for kind, recomputed in (("qwen3_moe", "selective"), ("mixtral", "full"), ("gpt_oss", "none")):
        whole = model_of(kind)
        expected, wanted_gradients = alone(whole, [batch for part in batches for batch in part])
        with torch.device("meta"):
            split = model_of(kind)
        note = split_experts(split, expert_meshes(mesh, 2)[0])
        assert note == f"{_count(whole) // 2} experts of each of {len(find_experts(whole))} layers a process"
        split.to_empty(device="cpu")
        _load(split, whole)
        recompute(split, recomputed)
        total, actual = alone(split, batches[rank])
        dist.all_reduce(total)
        for name, each in actual.items():
            if ".experts." not in name:  # those are sums over both processes already
                dist.all_reduce(each)
        sums.append(float(((total - expected) / expected.clamp(min=1)).abs().max()))
        apart[kind] = difference(actual, wanted_gradients)
    busy = [_busy(mesh, rank, idle) for idle in (0, 1)]
    return {"sums": sums, "gradients": apart, "busy": busy, "parts of rows": _part_of_rows(rank)}


def _busy(mesh: Any, rank: int, idle: int) -> float:
    """All tokens go to the experts of one process, and the other has no tokens of its own either."""
    whole = next(iter(find_experts(model_of("mixtral")).values()))
    split = copy.deepcopy(model_of("mixtral"))
    split_experts(split, expert_meshes(mesh, 2)[0])
    part = next(iter(find_experts(split).values()))
    chance = torch.Generator().manual_seed(3)
    tokens, weights = torch.randn(9, 32, generator=chance), torch.rand(9, 2, generator=chance)
    index = torch.tensor([[0, 1]] * 9) + 2 * (1 - idle)
    expected = whole(tokens, index, weights)
    expected.square().sum().backward()
    count = 0 if rank == idle else 9
    here = tokens[:count].clone().requires_grad_()
    actual = part(here, index[:count], weights[:count])
    actual.square().sum().backward()
    apart = [difference(gradients(part), gradients(whole))]
    if count:
        apart.append(float((actual - expected).detach().abs().max() / expected.detach().abs().max()))
    return max(apart)


def _count(model: torch.nn.Module) -> int:
    return int(next(iter(find_experts(model).values())).num_experts)


def _load(model: torch.nn.Module, whole: torch.nn.Module) -> None:
    values = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    with torch.no_grad():
        for name, each in [*model.named_parameters(), *model.named_buffers()]:
            value = values[name]
            if isinstance(each, DTensor):
                value = DTensor.from_local(value.data, each.device_mesh, run_check=False)
                value = value.redistribute(each.device_mesh, each.placements)
            each.copy_(value)


@pytest.mark.processes
def test_experts_and_shards_over_four_processes() -> None:
    """Experts over two or four neighbours, weights shared out once more over the rest; some processes in copies."""
    for result in run_ranks(4, __file__, "_over_four", 400):
        for case, apart in result.items():
            assert max(apart) < 1e-5, (case, result)


def _over_four(rank: int, world: int) -> dict[str, list[float]]:
    cases = {
        "2 x 2 shards": ("qwen3_moe", (1, 1, 4, 1, 1), 2), "4": ("qwen3_moe", (1, 1, 4, 1, 1), 4),
        "2, copies": ("mixtral", (1, 2, 2, 1, 1), 2), "4 over copies": ("mixtral", (1, 2, 2, 1, 1), 4),
        "2, context": ("mixtral", (1, 1, 2, 2, 1), 2), "2, tensor": ("qwen3_moe", (1, 1, 2, 1, 2), 2),
    }  # fmt: skip
    return {name: _sharded(rank, *case) for name, case in cases.items()}


def _sharded(rank: int, kind: str, shape: tuple[int, ...], size: int) -> list[float]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    data = 4 // shape[-1]
    parts = [batch_of(range(at * 2, at * 2 + 2), 12 - at) for at in range(data)]
    expected, wanted_gradients = alone(model_of(kind), parts)
    model = model_of(kind)
    expert_mesh, rest = expert_meshes(mesh, size)
    split_experts(model, expert_mesh)
    batch_mesh = mesh["dp_shard", "context"]._flatten("shards")
    if shape[1] > 1:
        batch_mesh = mesh["dp_replicate", "shards"]
    for experts in find_experts(model).values():
        fully_shard(experts, mesh=rest)
    for layer in repeated_layers(model):
        fully_shard(layer, mesh=batch_mesh)
    fully_shard(model, mesh=batch_mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    total, actual = alone(model, [parts[rank // shape[-1]]])
    dist.all_reduce(total)
    total /= shape[-1]
    return [float(((total - expected) / expected.clamp(min=1)).abs().max()), difference(actual, wanted_gradients)]
