"""Models built without their weights, taken apart over two and four processes: each holds its part, and no more."""

import tempfile
from pathlib import Path

import torch

from artel.config import ModelConfig, TokenizerTraining
from artel.models import build_model
from artel.models.loading.materialize import local_parts, materialise
from artel.models.loading.meta_model import build_skeleton
from artel.tokens import train_tokenizer
from ranks import run_ranks
from test_materialise import CAUSAL, SCRATCH, as_binary, gpt2, qwen3_moe, stored

IDS = torch.arange(24).reshape(2, 12) * 7 % 270


def saved_by_the_first(rank):
    """A folder with saved models; transformers saves in the first process only."""
    import torch.distributed as dist

    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    qwen3_moe().save_pretrained(folder / "experts")
    gpt2(vocabulary=201).save_pretrained(folder / "rows")
    if rank == 0:
        as_binary(gpt2(), folder / "binary")
    dist.barrier()
    return folder


def cases(folder):
    """What models are taken apart: from scratch and saved, tied, of experts, of sizes that do not divide."""
    odd = {"model_type": "llama", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
           "num_key_value_heads": 2, "intermediate_size": 42, "head_dim": 6}  # fmt: skip
    small = {"model_type": "gpt2", "n_layer": 2, "n_embd": 18, "n_head": 3}
    experts = {"model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2,
               "moe_intermediate_size": 12, "intermediate_size": 48}  # fmt: skip
    return {
        "gpt2": ModelConfig(config=small), "llama": ModelConfig(config=odd), "qwen3_moe": ModelConfig(config=experts),
        "saved qwen3_moe": stored(folder / "experts"), "saved gpt2": stored(folder / "rows"),
        "saved as a pickle": stored(folder / "binary"),
    }  # fmt: skip


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


def compared(wanted, split):
    """The largest difference in a gathered parameter, a buffer and the logits to those of the whole model."""
    from torch.distributed.tensor import DTensor

    words = train_tokenizer(iter(["words and words, again and again. " * 50]), TokenizerTraining(vocab=270))
    asked = {"auto_class": CAUSAL, "block": 16, "seed": 3}
    whole, skeleton = build_model(wanted, words, **asked).model, build_skeleton(wanted, words, **asked)
    model = skeleton.model
    split(model)
    before = list(model.parameters())
    materialise(model, skeleton.weights, device="cpu")
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), before, strict=True))
    expected = dict(whole.named_parameters())
    found = 0.0
    for name, parameter in model.named_parameters():
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found = max(found, (full - expected[name]).abs().max().item())
    for (_, ours), (_, theirs) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        found = max(found, (ours - theirs).abs().max().item())
    with torch.no_grad():
        logits = model.eval()(IDS, use_cache=False).logits - whole.eval()(IDS, use_cache=False).logits
    return [found, logits.abs().max().item()]


def on_two(rank, world):
    """One after another on two ranks; what experts a rank has read comes last."""
    from torch.distributed.device_mesh import init_device_mesh

    from artel.models.loading.safetensors_files import TensorFiles

    folder = saved_by_the_first(rank)
    mesh = init_device_mesh("cpu", (world,))
    found = {name: compared(wanted, lambda model: share(model, mesh)) for name, wanted in cases(folder).items()}
    found["llama by tensor"] = compared(cases(folder)["llama"], lambda model: by_tensor(model, mesh))
    read, reader = set(), TensorFiles.read

    def noting(files, name, index=()):
        read.add(name)
        return reader(files, name, index)

    TensorFiles.read = noting
    words = train_tokenizer(iter(["words and words, again and again. " * 50]), TokenizerTraining(vocab=270))
    skeleton = build_skeleton(stored(folder / "experts"), words, auto_class=CAUSAL, block=8, seed=1)
    share(skeleton.model, mesh)
    materialise(skeleton.model, skeleton.weights, device="cpu")
    return {"differences": found, "experts": sorted({int(name.split(".")[5]) for name in read if ".experts." in name})}


def on_four(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    known = cases(saved_by_the_first(rank))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    line = init_device_mesh("cpu", (world,))
    taken = memory_taken(lambda model: share(model, line))

    def both_ways(model):
        by_tensor(model, mesh["tensor"])
        share(model, mesh["data"])

    def across(parameter):
        return Shard(1 if parameter.ndim > 1 and parameter.shape[1] % 4 == 0 else 0)

    found = {
        "llama by data and tensor": compared(known["llama"], both_ways),
        "gpt2 in four": compared(known["gpt2"], lambda model: share(model, line)),
        "qwen3_moe in four": compared(known["saved qwen3_moe"], lambda model: share(model, line)),
        "qwen3_moe across": compared(
            known["saved qwen3_moe"], lambda model: share(model, line, shard_placement_fn=across)),
        "copies of shards": compared(known["saved gpt2"], lambda model: share(model, mesh)),
        "parts": cut_alike(mesh),
    }  # fmt: skip
    return {"differences": found, "memory": taken}


def memory_taken(split):
    """MB that the process grew by at most, those of its parameters, and those of the largest module."""
    words = train_tokenizer(iter(["words and words, again and again. " * 50]), TokenizerTraining(vocab=270))
    large = {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 1024, "vocab_size": 8000}
    asked = {"auto_class": CAUSAL, "block": 8, "seed": 1}
    first = build_skeleton(ModelConfig(config=SCRATCH), words, **asked)  # whatever is loaded once
    split(first.model)
    materialise(first.model, first.weights, device="cpu")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is taken now
    before = _status("VmHWM")
    skeleton = build_skeleton(ModelConfig(config={**SCRATCH, **large}), words, **asked)
    split(skeleton.model)
    materialise(skeleton.model, skeleton.weights, device="cpu")
    own = sum(parameter.to_local().nbytes for parameter in skeleton.model.parameters())
    return [_status("VmHWM") - before, own / 2**20, 8000 * 256 * 4 / 2**20]


def _status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


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
    rows, columns = local_parts(cut)
    full = torch.arange(float(cut.numel())).reshape(cut.shape)
    return columns.choose(rows.choose(full[rows.span, columns.span], 0), 1)


def test_two_processes_hold_what_one_does():
    found = run_ranks(2, __file__, "on_two", 400)
    for rank in found:
        for case, (weights, logits) in rank["differences"].items():
            assert weights == 0.0, case
            assert logits < 2e-6, case
    assert [rank["experts"] for rank in found] == [[0, 1, 2], [3, 4, 5]]


def test_four_processes_hold_what_one_does_and_no_more():
    for rank in run_ranks(4, __file__, "on_four", 400):
        for case, (weights, logits) in rank["differences"].items():
            assert weights == 0.0, case
            assert logits < 2e-6, case
        peak, own, largest = rank["memory"]
        assert own < 12  # of 46
        # A module, which of its numbers are missing (a quarter of its bytes), and what is loaded on the way.
        assert peak < own + 1.25 * largest + 6
