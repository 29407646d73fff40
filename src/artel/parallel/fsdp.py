"""Shards weights, gradients and optimizer state over processes with PyTorch's fully_shard (FSDP2).

zero1 and zero2 keep weights gathered from the first micro-batch of a step to the last. zero1 also keeps full gradients
between micro-batches (Rajbhandari et al. 2020, "ZeRO"). Tensor, context and expert parallelism split the model
first. fully_shard then shards those shards again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from artel.models.compile import repeated_layers
from artel.models.quantization import make_shardable
from artel.models.router_aux_loss import get_router_aux_loss
from artel.objectives import Batch, Objective
from artel.parallel.base import Strategy, local_shard, sharded_norm
from artel.parallel.context_parallel import check_context, exchanging, is_causal, split_batch
from artel.parallel.mesh import ParallelDims
from artel.parallel.process_group import World
from artel.parallel.tensor_parallel import shard_dimension


def batch_mesh(mesh: DeviceMesh, dims: ParallelDims) -> DeviceMesh:
    """Return the mesh over which gradients are summed: replicas (if any) x processes that shard weights."""
    name = "dp_shard"
    if dims.context > 1:  # processes that shard a sequence also shard the weights
        name = "dp_shard_context"
        mesh["dp_shard", "context"]._flatten(name)
    return mesh[name] if dims.dp_replicate == 1 and dims.mode != "ddp" else mesh["dp_replicate", name]


@dataclass(frozen=True, slots=True)
class FsdpConfig:
    """Arguments of fully_shard."""

    reshard_after_forward: bool
    """True to free gathered weights after the forward pass."""
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy

    @classmethod
    def from_dims(cls, dims: ParallelDims, dtype: torch.dtype | None, offload: str) -> FsdpConfig:
        """Return the arguments for a mesh. `dtype`: precision of the layers, if it differs from the weights'."""
        policy = OffloadPolicy()
        if offload != "none":
            policy = CPUOffloadPolicy(pin_memory=offload == "pinned" and torch.cuda.is_available())
        # Autocast casts the inputs. Gradients are summed in float32.
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        return cls(dims.reshard_after_forward, precision, policy)

    def apply(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        reshard_after_forward: bool,
        shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    ) -> None:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=shard_placement_fn,
            mp_policy=self.precision,
            offload_policy=self.offload,
        )


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    fsdp_config: FsdpConfig,
    expert_meshes: Mapping[nn.Module, DeviceMesh] | None = None,
) -> None:
    """Shard a model's parameters over `mesh` (from `batch_mesh`): one unit per layer, and one for all other parameters.

    `expert_meshes`: modules within layers that are sharded over other processes. Weights may be on the meta device.
    """
    make_shardable(model)
    for module, expert_mesh in (expert_meshes or {}).items():
        fsdp_config.apply(module, expert_mesh, reshard_after_forward=fsdp_config.reshard_after_forward)
    for layer in repeated_layers(model):
        fsdp_config.apply(layer, mesh, reshard_after_forward=fsdp_config.reshard_after_forward)
    # Gather embeddings, last norm and head once per pass: the loss needs the head after the model's forward.
    shards = mesh.size(-1)
    fsdp_config.apply(
        model, mesh, reshard_after_forward=False, shard_placement_fn=partial(shard_dimension, shards=shards)
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sum instead of averaging: the loss is already divided by the targets of the global batch.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


class ShardedSequences:
    """Shards each sequence over processes. Attention sees the other shards (`context_parallel.py`)."""

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh, exchange: str) -> None:
        self.rank = mesh.get_local_rank()
        self._size = mesh.size()
        self._model = model
        self._group = mesh.get_group()
        self._exchange = exchange
        self._causal = is_causal(model)
        aux_loss = get_router_aux_loss(model)
        if aux_loss is not None:
            aux_loss.context = self._group

    def shard_batch(self, batch: Batch) -> Batch:
        return split_batch(batch, self.rank, self._size, self._causal)

    def exchanging(self) -> AbstractContextManager[None]:
        return exchanging(self._model, self._group, self._exchange)


class FullyShardedDataParallel(Strategy):
    """Each process holds shards of the model. `model` must have been through `shard`."""

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        world: World,
        precision: str,
        dims: ParallelDims,
        sequences: ShardedSequences | None = None,
    ) -> None:
        super().__init__(model, objective, world, precision, dims)
        self._sequences = sequences

    @property
    def holds_full_model(self) -> bool:
        return False

    @property
    def can_probe_memory(self) -> bool:
        # On GPUs memory runs out on all ranks at once, unless experts are sharded: one rank may hold all experts of a
        # sample, and the others would wait for it. Before PyTorch 2.13 sharded layers do not recover from a failed
        # pass. On CPUs memory rarely runs out, and each trial costs communication.
        recovers = hasattr(FSDPModule, "reset_iter_state")
        return self._world.device.type == "cuda" and self.dims.expert == 1 and recovers

    def check_split(self) -> None:
        if self._sequences is not None:
            self.with_full_model(check_context)

    def run(self, batches: list[Batch], targets: float, loss_scale: torch.Tensor | None = None) -> torch.Tensor:
        if self._sequences is not None:  # otherwise all shards of a sequence would get the same dropout masks
            torch.manual_seed(torch.initial_seed() + self._sequences.rank)
        with self._exchanging():
            return super().run(batches, targets, loss_scale)

    def probe_memory(self, batch: Batch) -> None:
        with self._exchanging():
            super().probe_memory(batch)

    def norm_of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return sharded_norm((local_shard(tensor, self._world.size) for tensor in tensors.values()), self._world.device)

    def evaluate(self, batches: Iterable[tuple[Batch, np.ndarray]], count: int) -> tuple[dict[str, float], np.ndarray]:
        with self._gather_weights(), self._exchanging():
            return super().evaluate(batches, count)

    @contextmanager
    def generating(self) -> Iterator[bool]:
        with self._gather_weights():
            yield True  # a forward pass gathers weights from all ranks

    def _local_batch(self, batch: Batch) -> Batch:
        return super()._local_batch(batch if self._sequences is None else self._sequences.shard_batch(batch))

    def _exchanging(self) -> AbstractContextManager[None]:
        """Context for forward and backward passes on shards of sequences."""
        return nullcontext() if self._sequences is None else self._sequences.exchanging()

    def _count_once(self, sums: torch.Tensor) -> torch.Tensor:
        # Ranks of one tensor-parallel group all have the same sums.
        return sums if self._world.rank % self.dims.tensor == 0 else torch.zeros_like(sums)

    def _gradient_sync(self, last: bool) -> AbstractContextManager[object]:
        root = self.model
        assert isinstance(root, FSDPModule)
        if self.dims.reduces_once:
            root.set_requires_gradient_sync(last)
        if self.dims.mode == "hsdp":
            root.set_requires_all_reduce(last)
        if self.dims.mode in ("ddp", "zero1", "zero2"):
            root.set_reshard_after_backward(last)
        root.set_is_last_backward(last)
        return nullcontext()

    @contextmanager
    def _gather_weights(self) -> Iterator[None]:
        """Free gathered weights afterwards: forward passes without a backward leave them gathered."""
        try:
            yield
        finally:
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
