"""Splits a model over the dimensions of a mesh.

It splits in this order: experts, stages, matrices, weights. Then it loads the weights and shards sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from artel.config import RunConfig
from artel.config.schema.run import ParallelConfig
from artel.errors import InputError, Problem
from artel.messages import logger
from artel.models.device import autocast_dtype
from artel.models.experts import find_experts
from artel.models.hybrid_state import state_modules
from artel.models.loading.materialize import WeightLoader
from artel.objectives import Objective
from artel.parallel.context_parallel import context_problems, exchange_choice
from artel.parallel.data_parallel import DataParallel
from artel.parallel.expert_parallel import expert_meshes, expert_problems, split_experts
from artel.parallel.fsdp import FsdpConfig, FullyShardedDataParallel, ShardedSequences, batch_mesh, shard
from artel.parallel.mesh import ParallelDims, read_parallel_dims
from artel.parallel.pipeline_parallel import PipelineParallel
from artel.parallel.pipeline_stages import pipeline_problems, split_into_stages, stage_count
from artel.parallel.process_group import World
from artel.parallel.strategy import ParallelStrategy
from artel.parallel.tensor_parallel import split_by_tensor, tensor_problems
from artel.registry import OBJECTIVES


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """The plan for PyTorch's strategies, with the dimensions of a mesh. See `ParallelPlan`."""

    config: ParallelConfig
    dims: ParallelDims
    precision: None = None
    micro_batch: None = None
    notes: tuple[str, ...] = ()
    reason_not_compiled: None = None

    @classmethod
    def read(cls, config: RunConfig, world_size: int, on_host: int) -> MeshPlan:
        """Return the plan for `world_size` processes, `on_host` per host. Raise InputError if there is none."""
        dims = read_parallel_dims(config.parallel, world_size, on_host)
        if dims.tensor > 1 and config.model.quantize != "none":
            fix = "write model.quantize: none, or parallel.tensor: 1"
            raise InputError.at("parallel.tensor", "quantized matrices cannot be split", fix)
        return cls(config.parallel, dims)

    @property
    def shards_weights(self) -> bool:
        return not self.dims.holds_full_model

    @property
    def full_matrices(self) -> bool:
        return self.dims.holds_full_model

    @property
    def splits_layers(self) -> bool:
        return self.dims.pipeline > 1

    @property
    def splits_sequences(self) -> bool:
        return self.dims.context > 1

    def problems(self, model: PreTrainedModel, *, block: int, objective: str, documents: bool) -> list[Problem]:
        dims, config = self.dims, self.config
        problems = []
        if dims.tensor > 1:
            problems += tensor_problems(model, dims.tensor, sequence=config.sequence)
        if dims.context > 1:
            problems += context_problems(
                model,
                dims.context,
                config.exchange,
                block,
                objective=objective,
                tensor=dims.tensor,
                documents=documents,
            )
        if dims.pipeline > 1:
            problems += pipeline_problems(model, dims.pipeline, config.schedule)
            if OBJECTIVES[objective].needs_global_outputs:
                what = f"the loss of objective {objective} needs the full batch, but stages process it in turns"
                problems.append(Problem("parallel.pipeline", what, "set 1; parallel.data: fsdp shards the weights"))
            problems += _combination_problems(dims, config)
            if documents and state_modules(model):
                what = f"{model.config.model_type} has layers with a state: stages do not keep documents apart"
                problems.append(Problem("parallel.pipeline", what, "set 1, or data.document_mask: false"))
        if dims.expert > 1:
            problems += expert_problems(model, dims.expert)
        return problems

    def parallelize(
        self,
        model: PreTrainedModel,
        objective: Objective,
        world: World,
        precision: str,
        *,
        load_weights: WeightLoader | None,
    ) -> ParallelStrategy:
        dims, config = self.dims, self.config
        device = world.device
        if dims.holds_full_model:
            return DataParallel(model, objective, world, precision)
        mesh = dims.mesh(device.type)
        experts: dict[nn.Module, DeviceMesh] = {}
        if dims.expert > 1:
            expert_mesh, same_experts_mesh = expert_meshes(mesh, dims.expert)
            logger.info(split_experts(model, expert_mesh))
            experts = dict.fromkeys(find_experts(model).values(), same_experts_mesh)
        stages = []
        if dims.pipeline > 1:
            num_stages = stage_count(dims.pipeline, config.schedule)
            indices = range(mesh.get_local_rank("pipeline"), num_stages, dims.pipeline)
            stages = split_into_stages(model, indices, num_stages)
        if dims.tensor > 1:
            logger.info(split_by_tensor(model, mesh["tensor"], sequence=config.sequence))
        fsdp_config = FsdpConfig.from_dims(dims, autocast_dtype(precision), config.offload)
        # Offloaded weights stay in host memory. Buffers must be on the device that computes.
        weights_device = torch.device("cpu") if config.offload != "none" else device
        if stages:
            if dims.dp_degree * dims.context > 1:
                for stage in stages:
                    shard(stage, batch_mesh(mesh, dims), fsdp_config)
            if load_weights is not None:
                load_weights(model, device=weights_device)
                _move_buffers(model, device)
            return PipelineParallel(model, stages, objective, world, precision, dims, mesh["pipeline"], config.schedule)
        shard(model, batch_mesh(mesh, dims), fsdp_config, experts)
        if load_weights is not None:
            load_weights(model, device=weights_device)
        _move_buffers(model, device)
        if dims.context == 1:
            return FullyShardedDataParallel(model, objective, world, precision, dims)
        exchange = exchange_choice(model, dims.context, config.exchange, tensor=dims.tensor)
        logger.info("sequences are shared by %s processes: %s, %s", dims.context, exchange.value, exchange.why)
        sequences = ShardedSequences(model, mesh["context"], exchange.value)
        return FullyShardedDataParallel(model, objective, world, precision, dims, sequences)


def _move_buffers(model: PreTrainedModel, device: torch.device) -> None:
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def _combination_problems(dims: ParallelDims, config: ParallelConfig) -> list[Problem]:
    """Return the settings that cannot be combined with a pipeline."""
    problems = []
    if config.offload != "none" and dims.dp_degree == 1:
        what = "only sharded weights can be offloaded, but here each stage has one process"
        problems.append(Problem("parallel.offload", what, "set none, or start more processes"))
    if dims.context > 1:
        problems.append(Problem("parallel.context", "sequences cannot be split within a pipeline", "write 1"))
    if dims.expert > 1:
        problems.append(Problem("parallel.expert", "experts cannot be sharded within a pipeline", "write 1"))
    if dims.tensor > 1 and config.sequence:
        problems.append(Problem("parallel.sequence", "parts of a sequence do not pass between stages", "write false"))
    if dims.tensor > 1 and stage_count(dims.pipeline, config.schedule) > dims.pipeline:
        what = f"{config.schedule} gives each process two stages, whose matrices cannot be split"
        problems.append(Problem("parallel.schedule", what, "write 1f1b"))
    return problems
