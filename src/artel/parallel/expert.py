"""The experts of each layer shared out over processes that each have tokens of their own.

A process keeps 1/size of each layer's experts, whole. Tokens are sent to the processes that hold the experts chosen for
them, computed there by the model's own code for experts, and sent back (Lepikhin et al. 2021, "GShard"). A holder has
then seen the tokens of the whole expert group, and its gradients are sums over that group.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from artel.errors import Problem
from artel.models.experts import adapted_experts, experts_of
from artel.parallel.context.gather_ulysses import in_autocast

_KEY = "parallel.expert"


def _count(experts: nn.Module) -> int:
    assert isinstance(experts.num_experts, int)
    return experts.num_experts


def expert_problems(model: PreTrainedModel, size: int) -> list[Problem]:
    """Why a model's experts cannot be shared out over `size` processes; it may be on the meta device."""
    kind, layers = model.config.model_type, experts_of(model)
    if not layers:
        what = f"{kind} has no experts that are held in one tensor a layer"
        return [Problem(_KEY, what, f"write {_KEY}: 1, or take a mixture of experts (qwen3_moe, mixtral, …)")]
    if adapted_experts(model):
        what = "model.lora.target names experts, whose adapters cannot be shared out"
        return [Problem(_KEY, what, f"leave them out of the target, or write {_KEY}: 1")]
    problems = []
    for count in sorted({_count(module) for module in layers.values()}):
        if count % size:
            divisors = ", ".join(str(divisor) for divisor in range(1, count + 1) if count % divisor == 0)
            what = f"{kind} has {count} experts a layer, no multiple of {size}"
            problems.append(Problem(_KEY, what, f"write one of: {divisors}"))
    for name, module in layers.items():
        shared = [key for key, tensor in module.named_parameters() if "." in key or tensor.shape[0] != _count(module)]
        if shared:
            what = f"{kind}: {', '.join(shared)} of {name} is not held expert by expert"
            problems.append(Problem(_KEY, what, f"write {_KEY}: 1"))
            break  # the other layers are of the same kind
    return problems


def expert_meshes(mesh: DeviceMesh, size: int) -> tuple[DeviceMesh, DeviceMesh]:
    """(The 1-D mesh `expert` of those that share experts, the mesh of those that hold the same ones), for this process.

    `mesh` has the five dimensions; `size` divides dp_replicate x dp_shard. Ranks that share experts are neighbours in
    these two. Ranks that hold the same experts share their weights in dimension `dp_shard`, which here contains
    context, or replicate them (`dp_replicate`). Every process must call this at the same time.
    """
    pipeline, replicas, shards, context, tensor = mesh.shape
    if shards % size == 0:
        shards //= size
    else:  # a group reaches over several replicas
        replicas, shards = replicas * shards // size, 1
    ranks = mesh.mesh.reshape(pipeline, replicas, shards, size, context, tensor).transpose(3, 4)
    names = ("pipeline", "dp_replicate", "dp_shard", "expert", "tensor")
    whole = DeviceMesh(
        mesh.device_type, ranks.reshape(pipeline, replicas, shards * context, size, tensor), mesh_dim_names=names
    )
    return whole["expert"], whole["dp_shard"] if replicas == 1 else whole["dp_replicate", "dp_shard"]


def split_experts(model: PreTrainedModel, mesh: DeviceMesh) -> str:
    """Keep this process's share of each layer's experts, and send tokens to the others'; what was done, in words.

    `mesh` is the 1-D mesh `expert`. Parameters become DTensors, shared out by expert; they may be on the meta device.
    The model's code sees tokens and results as before. `expert_problems` must have found none.
    """
    layers = experts_of(model)
    for module in layers.values():
        for name, whole in module.named_parameters(recurse=False):
            local_shard = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            sharded = DTensor.from_local(local_shard, mesh, [Shard(0)], run_check=False)
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=whole.requires_grad))
        module.forward = partial(_forward, module, mesh)
    counts = sorted({_count(module) // mesh.size() for module in layers.values()})
    return f"{' or '.join(map(str, counts))} experts of each of {len(layers)} layers a process"


# Not compiled: how many tokens go where is known only when it is computed.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(
    experts: nn.Module,
    mesh: DeviceMesh,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """What the experts of all processes make of this one's tokens, as the module of whole experts would.

    hidden_states (tokens, width), top_k_index int64 and top_k_weights (tokens, choices).
    """
    if hidden_states.is_meta:  # nothing is chosen there
        return torch.empty_like(hidden_states)
    group, choices, chosen = mesh.get_group(), top_k_index.shape[1], top_k_index.flatten()
    # By expert, and so by process. One wait for the device tells the host how much goes where.
    order = chosen.argsort(stable=True)
    counts = chosen.new_zeros(_count(experts)).scatter_add_(0, chosen, torch.ones_like(chosen)).view(mesh.size(), -1)
    counts_here = torch.empty_like(counts)
    dist.all_to_all_single(counts_here, counts, group=group)
    sent, received = _rows_by_process(counts, counts_here, len(chosen))

    (tokens,) = in_autocast(hidden_states)  # they are computed in that precision anyway, and half as much to send
    tokens = _Exchange.apply(tokens[order // choices], sent, received, group)
    local = torch.arange(counts.shape[1], device=chosen.device).repeat(mesh.size())
    local = local.repeat_interleave(counts_here.flatten(), output_size=sum(received))
    results = _Exchange.apply(_compute(experts, mesh.size(), tokens, local), received, sent, group)

    results = results[order.argsort()].view(*top_k_index.shape, hidden_states.shape[1])
    return (results * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


def _rows_by_process(counts: torch.Tensor, counts_here: torch.Tensor, rows: int) -> tuple[list[int], list[int]]:
    """How many of `rows` rows go to each process, and how many come from each, by experts (processes, experts of each).

    In a step that is traced for a plan nothing is chosen: each process gets the same.
    """
    if isinstance(counts, FakeTensor):
        even = [rows // len(counts) + (process < rows % len(counts)) for process in range(len(counts))]
        return even, even
    sent, received = torch.stack([counts.sum(dim=1), counts_here.sum(dim=1)]).tolist()
    return sent, received


def _compute(experts: nn.Module, size: int, tokens: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """What this process's experts make of `tokens` (count, width); `local` int64 (count,): which of them is chosen."""
    count = len(tokens)
    if count == 0:  # the weights must have a gradient all the same: others wait to add theirs to it
        tokens, local = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])]), local.new_zeros(1)
    once = tokens.new_ones(len(tokens), 1)  # the weights of the choices have stayed where the tokens come from
    with _only_local(experts, size):
        return type(experts).forward(experts, tokens, local[:, None], once)[:count]


@contextmanager
def _only_local(experts: nn.Module, size: int) -> Iterator[None]:
    """Meanwhile the module is one of 1/size as many experts, in plain tensors."""
    shared: dict[str, Any] = dict(experts._parameters)
    count = _count(experts)
    # A piece of a layer that FSDP gathers is a DTensor of the experts' mesh again.
    experts._parameters.update({name: each.to_local() for name, each in shared.items()})
    vars(experts)["num_experts"] = count // size
    try:
        yield
    finally:
        experts._parameters.update(shared)
        vars(experts)["num_experts"] = count


class _Exchange(torch.autograd.Function):
    """All-to-all of rows with its backward pass: `sent` and `received` are numbers of rows by process.

    torch.distributed.nn.functional has the same but deprecates it. Its successor returns results that may not have
    arrived yet, and kernels do not wait for them.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(grad_outputs[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchanged(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
