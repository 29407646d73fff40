"""From a whole model to what each process holds of it, in the order in which the ways of splitting stand inside one
another: matrices, sequences, experts, then weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from artel.config.schema.run import ParallelConfig
from artel.errors import Problem
from artel.models.device import autocast_dtype
from artel.models.loading.materialize import WeightLoader
from artel.objectives import Objective
from artel.parallel.context.context import context_problems, exchange_choice
from artel.parallel.data_parallel import DataParallel, ParallelStrategy
from artel.parallel.expert import expert_meshes, expert_problems, experts_of, split_experts
from artel.parallel.fsdp import FullyShardedDataParallel, SharedSequences, Sharing, batch_mesh, shard
from artel.parallel.mesh import ParallelDims
from artel.parallel.pipeline.pipeline import PipelineParallel
from artel.parallel.pipeline.stages import cut, stages_in_all, stages_problems
from artel.parallel.process_group import World
from artel.parallel.tensor.apply import split_by_tensor, tensor_problems


def split_problems(
    model: PreTrainedModel, dims: ParallelDims, wanted: ParallelConfig, *, block: int, objective: str, documents: bool
) -> list[Problem]:
    """Why a model cannot be split so, all reasons at once; it may be on the meta device.

    `block` in tokens; `objective` by its name in the run file; `documents`: they are kept apart.
    """
    problems = []
    if dims.tensor > 1:
        problems += tensor_problems(model, dims.tensor, sequence=wanted.sequence)
    if dims.context > 1:
        problems += context_problems(
            model,
            dims.context,
            wanted.exchange,
            block,
            objective=objective,
            tensor=dims.tensor,
            documents=documents,
        )
    if dims.pipeline > 1:
        problems += stages_problems(model, dims.pipeline, wanted.schedule)
        problems += _beside_stages(dims, wanted)
    if dims.expert > 1:
        problems += expert_problems(model, dims.expert)
    return problems


def _beside_stages(dims: ParallelDims, wanted: ParallelConfig) -> list[Problem]:
    """What does not go with a pipeline."""
    problems = []
    if dims.context > 1:
        problems.append(Problem("parallel.context", "sequences are not shared within a pipeline", "write 1"))
    if dims.expert > 1:
        problems.append(Problem("parallel.expert", "experts are not shared within a pipeline", "write 1"))
    if dims.tensor > 1 and wanted.sequence:
        problems.append(Problem("parallel.sequence", "parts of a sequence do not pass between stages", "write false"))
    if dims.tensor > 1 and stages_in_all(dims.pipeline, wanted.schedule) > dims.pipeline:
        what = f"{wanted.schedule} gives each process two stages, whose matrices are not split"
        problems.append(Problem("parallel.schedule", what, "write 1f1b"))
    return problems


def parallelize(
    model: PreTrainedModel,
    objective: Objective,
    world: World,
    precision: str,
    dims: ParallelDims,
    wanted: ParallelConfig,
    *,
    fill: WeightLoader | None,
    tell: Callable[[str], None],
) -> ParallelStrategy:
    """The model, spread over the processes of `grid` as `wanted` says; all of them call it.

    A model on the meta device needs `fill`, which brings the weights of what is left of it.
    """
    device = world.device
    if dims.is_plain:
        return DataParallel(model, objective, world, precision)
    mesh = dims.mesh(device.type)
    experts: dict[nn.Module, DeviceMesh] = {}
    if dims.expert > 1:
        expert_mesh, rest = expert_meshes(mesh, dims.expert)
        tell(split_experts(model, expert_mesh))
        experts = dict.fromkeys(experts_of(model).values(), rest)
    stages = []
    if dims.pipeline > 1:
        count = stages_in_all(dims.pipeline, wanted.schedule)
        stages = cut(model, range(mesh.get_local_rank("pipeline"), count, dims.pipeline), count)
    if dims.tensor > 1:
        tell(split_by_tensor(model, mesh["tensor"], sequence=wanted.sequence))
    how = Sharing.of(dims, autocast_dtype(precision), wanted.offload)
    # Host memory is where offloaded weights stay; buffers are needed where layers are computed.
    place = torch.device("cpu") if wanted.offload != "none" else device
    if stages:
        if dims.dp_degree * dims.context > 1:
            for stage in stages:
                shard(stage, batch_mesh(mesh, dims), how)
        if fill is not None:
            fill(model, device=place)
        return PipelineParallel(model, stages, objective, world, precision, dims, mesh["pipeline"], wanted.schedule)
    shard(model, batch_mesh(mesh, dims), how, experts)
    if fill is not None:
        fill(model, device=place)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    shared = None
    if dims.context > 1:
        exchange = exchange_choice(model, dims.context, wanted.exchange, tensor=dims.tensor)
        tell(f"sequences are shared by {dims.context} processes: {exchange.value}, {exchange.why}")
        shared = SharedSequences(model, mesh["context"], exchange.value)
    return FullyShardedDataParallel(model, objective, world, precision, dims, shared)
