"""Models built without their weights, taken apart over two and four processes: each holds its part, and no more."""

from pathlib import Path

import pytest
import torch

from artel.config import ModelConfig, TokenizerTraining
from artel.models.loading.build import build_model
from artel.models.loading.materialize import local_indices, materialize
from artel.models.loading.request import ModelRequest
from artel.tokens import train_tokenizer
from support.ranks import run_ranks
from support.saved_models import CAUSAL, SCRATCH, memory_status, model_cases, saved_by_the_first, saved_model
from support.tensor_reads import noted_reads

IDS = torch.arange(24).reshape(2, 12) * 7 % 270


def layers_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def share(model, mesh, **more):
    from torch.distributed.fsdp import fully_shard

    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, **more)
    fully_shard(model, mesh=mesh)


def by_tensor(model, mesh):
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {"self_attn.q_proj": columns, "self_attn.k_proj": columns, "self_attn.v_proj": columns,
            "self_attn.o_proj": rows, "mlp.gate_proj": columns, "mlp.up_proj": columns,
            "mlp.down_proj": rows}  # fmt: skip
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    ends = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate())}  # fmt: skip
    parallelize_module(model, mesh, ends)


def compared(model_config, split):
    """The largest difference in a gathered parameter, a buffer and the logits to those of the whole model."""
    from torch.distributed.tensor import DTensor

    words = train_tokenizer(iter(["words and words, again and again. " * 50]), TokenizerTraining(vocab=270))
    request = ModelRequest(model_config, CAUSAL, block=16, seed=3)
    whole, skeleton = build_model(request, words).model, build_model(request, words, on_meta=True)
    model = skeleton.model
    split(model)
    before = list(model.parameters())
    materialize(model, skeleton.weights, device="cpu")
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), before, strict=True))
    expected = dict(whole.named_parameters())
    largest = 0.0
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        largest = max(largest, (full - expected[name]).abs().max().item())
    for (_, ours), (_, theirs) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        largest = max(largest, (ours - theirs).abs().max().item())
    with torch.no_grad():
        logits = model.eval()(IDS, use_cache=False).logits - whole.eval()(IDS, use_cache=False).logits
    return [largest, logits.abs().max().item()]


def on_two(rank, world):
    """One after another on two ranks; what experts a rank has read comes last."""
    from torch.distributed.device_mesh import init_device_mesh

    folder = saved_by_the_first(rank)
    mesh = init_device_mesh("cpu", (world,))
    differences = {
        name: compared(model_config, lambda model: share(model, mesh))
        for name, model_config in model_cases(folder).items()
    }
    differences["llama by tensor"] = compared(model_cases(folder)["llama"], lambda model: by_tensor(model, mesh))
    read = noted_reads()
    words = train_tokenizer(iter(["words and words, again and again. " * 50]), TokenizerTraining(vocab=270))
    skeleton = build_model(ModelRequest(saved_model(folder / "experts"), CAUSAL, block=8, seed=1), words, on_meta=True)
    share(skeleton.model, mesh)
    materialize(skeleton.model, skeleton.weights, device="cpu")
    return {
        "differences": differences,
        "experts": sorted({int(name.split(".")[5]) for name in read if ".experts." in name}),
    }


def on_four(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    known = model_cases(saved_by_the_first(rank))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    line = init_device_mesh("cpu", (world,))
    taken = memory_taken(lambda model: share(model, line))

    def both_ways(model):
        by_tensor(model, mesh["tensor"])
        share(model, mesh["data"])

    def across(parameter):
        return Shard(1 if parameter.ndim > 1 and parameter.shape[1] % 4 == 0 else 0)

    differences = {
        "llama by data and tensor": compared(known["llama"], both_ways),
        "gpt2 in four": compared(known["gpt2"], lambda model: share(model, line)),
        "qwen3_moe in four": compared(known["saved qwen3_moe"], lambda model: share(model, line)),
        "qwen3_moe across": compared(
            known["saved qwen3_moe"], lambda model: share(model, line, shard_placement_fn=across)),
        "copies of shards": compared(known["saved gpt2"], lambda model: share(model, mesh)),
        "parts": cut_alike(mesh),
    }  # fmt: skip
    return {"differences": differences, "memory": taken}


def memory_taken(split):
    """MB that the process grew by at most, those of its parameters, and those of the largest module."""
    words = train_tokenizer(iter(["words and words, again and again. " * 50]), TokenizerTraining(vocab=270))
    large = {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 1024, "vocab_size": 8000}

    def on_meta(config):
        return build_model(ModelRequest(ModelConfig(config=config), CAUSAL, block=8, seed=1), words, on_meta=True)

    first = on_meta(SCRATCH)  # whatever is loaded once
    split(first.model)
    materialize(first.model, first.weights, device="cpu")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is taken now
    before = memory_status("VmHWM")
    skeleton = on_meta({**SCRATCH, **large})
    split(skeleton.model)
    materialize(skeleton.model, skeleton.weights, device="cpu")
    own = sum(parameter.to_local().nbytes for parameter in skeleton.model.parameters())
    return [memory_status("VmHWM") - before, own / 2**20, 8000 * 256 * 4 / 2**20]


def cut_alike(mesh):
    """Places of shards against what PyTorch cuts, for pairs of ways to cut; how many were not the same."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    strided = [_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=2)]
    ways = [Replicate(), Shard(0), Shard(1), *strided]
    full = torch.arange(16.0 * 24).reshape(16, 24)
    cut = [
        distribute_tensor(full, mesh, [first, second], src_data_rank=None)
        for first in ways
        for second in ways
        if first not in strided or second not in strided
    ]
    for way, rows in ((Shard(0), 22), (strided[0], 22), (strided[0], 16)):  # what fully_shard cuts once more
        layer = torch.nn.Linear(4, rows, bias=False)
        values = torch.arange(4.0 * rows).reshape(rows, 4)
        layer.weight = torch.nn.Parameter(distribute_tensor(values, mesh["tensor"], [way], src_data_rank=None))
        cut.append(fully_shard(layer, mesh=mesh["data"]).weight)
    return [sum(not torch.equal(part_of(one), one.to_local()) for one in cut), 0.0]


def part_of(cut):
    """The part that is here of a tensor of 0, 1, 2, …, by its places."""
    rows, columns = local_indices(cut)
    full = torch.arange(float(cut.numel())).reshape(cut.shape)
    return columns.select(rows.select(full[rows.span, columns.span], 0), 1)


@pytest.mark.ci
@pytest.mark.processes
def test_two_processes_hold_what_one_does():
    results = run_ranks(2, __file__, "on_two", 400)
    for rank in results:
        for case, (weights, logits) in rank["differences"].items():
            assert weights == 0.0, case
            assert logits < 2e-6, case
    assert [rank["experts"] for rank in results] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.processes
def test_four_processes_hold_what_one_does_and_no_more():
    for rank in run_ranks(4, __file__, "on_four", 400):
        for case, (weights, logits) in rank["differences"].items():
            assert weights == 0.0, case
            assert logits < 2e-6, case
        peak, own, largest = rank["memory"]
        assert own < 12  # of 46
        # A module, which of its numbers are missing (a quarter of its bytes), and what is loaded on the way.
        assert peak < own + 1.25 * largest + 6
