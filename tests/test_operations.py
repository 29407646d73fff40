"""What a step does, operation by operation: the kinds, sizes and FLOPs that are recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from artel.models.attention import AttentionOptions, attend
from artel.planning.operations import (
    ATTENTION,
    COLLECTIVE,
    DISPATCH,
    FUSED,
    MATMUL,
    MEMORY,
    VIEW,
    Operation,
    OperationRecorder,
)


def recorded(work: Any, model: nn.Module | None = None, **options: Any) -> dict[Operation, int]:
    with FakeTensorMode(), OperationRecorder(model or nn.Module(), **options) as recorder:
        work()
    return recorder.operations


def test_a_product_counts_two_flops_for_each_multiplication_and_knows_its_layout() -> None:
    def work() -> None:
        left, right = torch.empty(8, 16), torch.empty(16, 32)
        left @ right
        left @ right
        torch.empty(16, 8).T @ torch.empty(32, 16).T

    product = Operation(MATMUL, "aten.mm", "fp32", "nn", 2 * 8 * 16 * 32, 4 * (8 * 16 + 16 * 32 + 8 * 32))
    operations = recorded(work)
    assert operations[product] == 2
    assert [operation.layout for operation in operations if operation.kind == MATMUL] == ["nn", "tt"]
    assert operations[Operation(VIEW, VIEW)] == 6  # four empty, two transposed


def test_a_cpu_copies_what_is_added_to_a_product() -> None:
    copy = Operation(MEMORY, "aten.copy_", "fp32", "", 0, 4 * (32 + 8 * 32))
    assert copy in recorded(lambda: torch.addmm(torch.empty(32), torch.empty(8, 16), torch.empty(16, 32)))
    assert copy not in recorded(lambda: torch.empty(8, 16) @ torch.empty(16, 32))
    on_gpu = recorded(lambda: torch.addmm(torch.empty(32), torch.empty(8, 16), torch.empty(16, 32)), on_gpu=True)
    assert copy not in on_gpu


def test_a_product_of_4_bit_weights_writes_them_out_first() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    layer = bitsandbytes.nn.Linear4bit(64, 128, bias=False, quant_type="nf4", compute_dtype=torch.float32).to("cpu")
    with OperationRecorder(nn.Module()) as recorder:
        layer(torch.ones(4, 64))
    kinds = {operation.kind: operation for operation in recorder.operations if "bitsandbytes" in operation.name}
    assert kinds[MEMORY].bytes == 64 * 128 // 2 + 4 * 64 * 128
    assert (kinds[MATMUL].flops, kinds[MATMUL].layout) == (2 * 4 * 64 * 128, "nt")
    with OperationRecorder(nn.Module(), on_gpu=True) as recorder:
        layer(torch.ones(4, 64))
    assert [operation.kind for operation in recorder.operations if "bitsandbytes" in operation.name] == [MATMUL]


def test_a_grouped_product_is_one_for_each_group() -> None:
    """Forward, and the gradients of both sides: the same FLOPs, in as many num_matmuls as there are experts."""
    experts, tokens, width, wide = 4, 64, 16, 32

    def work() -> None:
        rows = torch.empty(tokens, width, dtype=torch.bfloat16)
        matrices = torch.empty(experts, width, wide, dtype=torch.bfloat16)
        ends = torch.empty(experts, dtype=torch.int32)
        out = torch._grouped_mm(rows, matrices, ends)
        torch._grouped_mm(out, matrices.transpose(1, 2), ends)
        torch._grouped_mm(rows.T, out, ends)

    products = [operation for operation in recorded(work) if operation.kind != VIEW]
    expected = (MATMUL, experts, 2 * tokens * width * wide)
    assert [(each.kind, each.num_matmuls, each.flops) for each in products] == 3 * [expected]


def test_operators_on_dtensors_count_beside_those_on_their_parts(four_processes: None) -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole, part = (DTensor.from_local(torch.ones(8, 8), mesh, [where]) for where in (Replicate(), Shard(1)))
    with OperationRecorder(nn.Module()) as recorder:
        whole @ part
    counts = Counter({operation.kind: count for operation, count in recorder.operations.items()})
    assert (counts[DISPATCH], counts[MATMUL]) == (1, 1)


def test_views_and_empty_tensors_are_no_work_and_other_operators_are_what_they_read_and_write() -> None:
    def work() -> None:
        x = torch.empty(4, 6)
        x.view(24).reshape(2, 12).T.expand(3, 12, 2)
        x + x.T.reshape(4, 6)[:1]  # a row that is repeated is read once

    copy, add = (operation for operation in recorded(work) if operation.kind != VIEW)
    assert (copy.kind, copy.bytes) == (MEMORY, 2 * 96)
    assert (add.name, add.bytes) == ("aten.add", 96 + 24 + 96)


def test_a_lookup_reads_the_rows_that_it_gives() -> None:
    operations = recorded(lambda: nn.functional.embedding(torch.zeros(5, dtype=torch.int64), torch.empty(1000, 8)))
    [lookup] = [operation for operation in operations if operation.name == "aten.embedding"]
    assert lookup.bytes == 2 * 5 * 8 * 4 + 5 * 8


def test_attention_is_half_of_the_square_if_causal_and_five_products_backward() -> None:
    def work(causal: bool) -> None:
        query, key, value = (torch.empty(2, 3, 8, 4, requires_grad=True) for _ in range(3))
        attend(query, key, value, AttentionOptions(None, causal, None, 0.0, None)).sum().backward()

    whole = 2 * 2 * 2 * 3 * 8 * 8 * 4
    for causal, flops in ((False, whole), (True, whole // 2)):
        operations = recorded(lambda causal=causal: work(causal))
        found = {operation.is_backward: operation.flops for operation in operations if operation.kind == ATTENTION}
        assert found == {False: flops, True: flops * 5 // 2}


class Layer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * 2 + 1) - x


class Model(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x.clone()).sum()


def test_a_compiled_chain_reads_what_comes_in_once_and_writes_what_goes_out_once() -> None:
    model = Model()
    operations = recorded(lambda: model(torch.empty(100)), model, compiled=True)
    [chain] = [operation for operation in operations if operation.kind == FUSED]
    assert (chain.bytes, chain.exponentials) == (800, 100)
    alone = recorded(lambda: model(torch.empty(100)), model)
    assert not any(operation.kind == FUSED for operation in alone)
    assert sum(operation.bytes for operation in alone) > sum(operation.bytes for operation in operations)


class LayerOfViews(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(10, 10)).view(100)


def test_views_of_a_compiled_layer_start_nothing() -> None:
    model = Model()
    model.layers[0] = LayerOfViews()
    eager, compiled = (recorded(lambda: model(torch.empty(100)), model, compiled=each) for each in (False, True))
    assert eager[Operation(VIEW, VIEW)] == compiled.get(Operation(VIEW, VIEW), 0) + 2


class LayerOfManyTensors(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x * factor for factor in range(100)]).sum(0)


def test_a_tensor_at_the_address_of_a_freed_one_is_another() -> None:
    """Where it was taken for the freed one, a chain seemed to write what only that chain reads."""
    model = Model()
    model.layers[0] = LayerOfManyTensors()

    def work() -> None:
        model(torch.empty(100))
        unseen = [torch.empty(()) for _ in range(1000)]  # some get the addresses of what the layer made
        torch.stack(unseen)

    [chain] = [operation for operation in recorded(work, model, compiled=True) if operation.kind == FUSED]
    assert chain.bytes == 800


@pytest.fixture
def four_processes() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def test_a_collective_has_its_size_and_its_ranks(four_processes: None) -> None:
    with OperationRecorder(nn.Module()) as recorder:
        dist.all_reduce(torch.zeros(1000))
        dist.all_gather_into_tensor(torch.zeros(4000), torch.zeros(1000))
    found = {(o.name, o.bytes, o.ranks) for o in recorder.operations if o.kind == COLLECTIVE}
    assert found == {("c10d.allreduce_", 4000, (0, 1, 2, 3)), ("c10d._allgather_base_", 16000, (0, 1, 2, 3))}
