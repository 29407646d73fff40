"""Expert parallelism: the experts of each layer sharded over processes with different tokens.

A process keeps 1/size of each layer's experts in full. Tokens are sent to the processes that hold their chosen experts,
computed there by the model's own code for experts, and sent back (Lepikhin et al. 2021, "GShard"). So an expert sees
the tokens of the entire expert group, and its gradients are sums over that group.
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
from artel.models.experts import adapted_experts, find_experts
from artel.parallel.context_exchange import in_autocast
from artel.parallel.mesh import format_divisors

_KEY = "parallel.expert"


def _num_experts(experts: nn.Module) -> int:
    assert isinstance(experts.num_experts, int)
    return experts.num_experts


def expert_problems(model: PreTrainedModel, size: int) -> list[Problem]:
    """Return the reasons why experts cannot be sharded over `size` processes. The model may be on the meta device."""
    model_type = model.config.model_type
    layers = find_experts(model)
    if not layers:
        what = f"{model_type} has no experts that are stored in one tensor per layer"
        return [Problem(_KEY, what, f"set {_KEY}: 1, or use a mixture of experts (qwen3_moe, mixtral, …)")]
    if adapted_experts(model):
        what = "model.lora.target names experts, whose adapters cannot be sharded"
        return [Problem(_KEY, what, f"remove them from the target, or set {_KEY}: 1")]
    problems = []
    for count in sorted({_num_experts(module) for module in layers.values()}):
        if count % size:
            what = f"{model_type} has {count} experts per layer, which {size} does not divide"
            problems.append(Problem(_KEY, what, f"write one of: {format_divisors(count)}"))
    for name, module in layers.items():
        shared_names = [
            key for key, tensor in module.named_parameters() if "." in key or tensor.shape[0] != _num_experts(module)
        ]
        if shared_names:
            what = f"{model_type}: {', '.join(shared_names)} of {name} is not stored per expert"
            problems.append(Problem(_KEY, what, f"write {_KEY}: 1"))
            break  # other layers have the same parameters
    return problems


def expert_meshes(mesh: DeviceMesh, size: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Return this process's meshes: (1-D `expert` mesh over which experts are sharded, mesh with the same experts).

    `mesh` has the five dimensions, and `size` divides dp_replicate x dp_shard. The ranks of an `expert` mesh are
    neighbours in these two dimensions. Ranks with the same experts shard their weights in dimension `dp_shard`, which
    here includes context, or replicate them (`dp_replicate`). Collective: every process must call this.
    """
    pipeline, replicas, shards, context, tensor = mesh.shape
    if shards % size == 0:
        shards //= size
    else:  # an expert group spans several replicas
        replicas, shards = replicas * shards // size, 1
    ranks = mesh.mesh.reshape(pipeline, replicas, shards, size, context, tensor).transpose(3, 4)
    names = ("pipeline", "dp_replicate", "dp_shard", "expert", "tensor")
    split_mesh = DeviceMesh(
        mesh.device_type, ranks.reshape(pipeline, replicas, shards * context, size, tensor), mesh_dim_names=names
    )
    return split_mesh["expert"], split_mesh["dp_shard"] if replicas == 1 else split_mesh["dp_replicate", "dp_shard"]


def split_experts(model: PreTrainedModel, mesh: DeviceMesh) -> str:
    """Keep only this process's experts of each layer, and exchange tokens. Return a summary for the log.

    `mesh` is the 1-D mesh `expert`. Parameters become DTensors sharded by expert; they may be on the meta device. The
    model's code sees the same tokens and results as before. `expert_problems` must have found none.
    """
    layers = find_experts(model)
    for module in layers.values():
        for name, full in module.named_parameters(recurse=False):
            local_shard = full.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            sharded = DTensor.from_local(local_shard, mesh, [Shard(0)], run_check=False)
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=full.requires_grad))
        module.forward = partial(_run_experts, module, mesh)
    counts = sorted({_num_experts(module) // mesh.size() for module in layers.values()})
    return f"{' or '.join(map(str, counts))} experts of each of {len(layers)} layers a process"


# Not compiled: the number of tokens for each process is known only at run time.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _run_experts(
    experts: nn.Module,
    mesh: DeviceMesh,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Forward pass of all processes' experts on this process's tokens, like the module that holds every expert.

    hidden_states (tokens, width), top_k_index int64 and top_k_weights (tokens, choices).
    """
    if hidden_states.is_meta:  # no routing on the meta device
        return torch.empty_like(hidden_states)
    group = mesh.get_group()
    expert_ids = top_k_index.flatten()
    # Sorted by expert, and so by process. The host waits once for the device, to read the counts.
    order = expert_ids.argsort(stable=True)
    counts = (
        expert_ids.new_zeros(_num_experts(experts))
        .scatter_add_(0, expert_ids, torch.ones_like(expert_ids))
        .view(mesh.size(), -1)
    )
    local_counts = torch.empty_like(counts)
    dist.all_to_all_single(local_counts, counts, group=group)
    send_counts, receive_counts = _rows_by_process(counts, local_counts, len(expert_ids))

    (tokens,) = in_autocast(hidden_states)  # the precision that experts compute in: half as much to send
    tokens = _Exchange.apply(tokens[order // top_k_index.shape[1]], send_counts, receive_counts, group)
    local_ids = torch.arange(counts.shape[1], device=expert_ids.device).repeat(mesh.size())
    local_ids = local_ids.repeat_interleave(local_counts.flatten(), output_size=sum(receive_counts))
    results = _Exchange.apply(
        _run_local_experts(experts, mesh.size(), tokens, local_ids), receive_counts, send_counts, group
    )

    results = results[order.argsort()].view(*top_k_index.shape, hidden_states.shape[1])
    return (results * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


def _rows_by_process(counts: torch.Tensor, local_counts: torch.Tensor, num_rows: int) -> tuple[list[int], list[int]]:
    """Return the rows sent to each process, and received from each. `counts`: (processes, experts of each).

    A step traced for a plan has no routing: the `num_rows` rows are divided evenly.
    """
    if isinstance(counts, FakeTensor):
        even_counts = [num_rows // len(counts) + (process < num_rows % len(counts)) for process in range(len(counts))]
        return even_counts, even_counts
    send_counts, receive_counts = torch.stack([counts.sum(dim=1), local_counts.sum(dim=1)]).tolist()
    return send_counts, receive_counts


def _run_local_experts(experts: nn.Module, size: int, tokens: torch.Tensor, local_ids: torch.Tensor) -> torch.Tensor:
    """Run this process's experts on `tokens` (num_tokens, width).

    `local_ids`: int64 (num_tokens,), index of each token's expert.
    """
    num_tokens = len(tokens)
    if num_tokens == 0:  # the weights still need a gradient, because other ranks wait to add theirs
        tokens, local_ids = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])]), local_ids.new_zeros(1)
    weights = tokens.new_ones(len(tokens), 1)  # the router's weights are applied by the process that sent the tokens
    with _hold_local_experts(experts, size):
        return type(experts).forward(experts, tokens, local_ids[:, None], weights)[:num_tokens]


@contextmanager
def _hold_local_experts(experts: nn.Module, size: int) -> Iterator[None]:
    """Inside the block, make the module hold 1/size of its experts, in plain tensors."""
    sharded: dict[str, Any] = dict(experts._parameters)
    num_experts = _num_experts(experts)
    # FSDP gathers its shard of a layer as a DTensor on the experts' mesh.
    experts._parameters.update({name: tensor.to_local() for name, tensor in sharded.items()})
    vars(experts)["num_experts"] = num_experts // size
    try:
        yield
    finally:
        experts._parameters.update(sharded)
        vars(experts)["num_experts"] = num_experts


class _Exchange(torch.autograd.Function):
    """All-to-all of rows with a backward pass. `send_counts` and `receive_counts`: number of rows by process.

    torch.distributed.nn.functional deprecates its own version. The successor may return before the data has arrived,
    and kernels do not wait for it.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, send_counts: list[int], receive_counts: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.send_counts, ctx.receive_counts = send_counts, receive_counts
        ctx.group = group
        return _exchange_rows(rows, send_counts, receive_counts, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange_rows(grad_outputs[0], ctx.receive_counts, ctx.send_counts, ctx.group), None, None, None


def _exchange_rows(
    rows: torch.Tensor, send_counts: list[int], receive_counts: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    output = rows.new_empty(sum(receive_counts), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), receive_counts, send_counts, group=group)
    return output
