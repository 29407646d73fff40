"""Weights, gradients and optimizer state shared out over processes, by PyTorch's fully_shard (FSDP2).

zero1 and zero2 keep the weights together from the first micro-batch of a step to its last; zero1 keeps the gradients
of its micro-batches whole as well (Rajbhandari et al. 2020, "ZeRO"). Whatever a model's matrices, sequences and experts
are split by (tensor, context, expert) comes before this, and is shared out here once more.
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
from artel.models.router_aux_loss import router_aux_loss_of
from artel.objectives import Batch, Objective
from artel.parallel.base import Strategy
from artel.parallel.context.context import check_context, exchanging, is_causal, split_batch
from artel.parallel.grad_norm import norm_of_shards
from artel.parallel.mesh import ParallelDims
from artel.parallel.process_group import World
from artel.parallel.tensor.apply import shard_dimension


def batch_mesh(mesh: DeviceMesh, dims: ParallelDims) -> DeviceMesh:
    """The processes whose gradients are summed: those that share weights, with a dimension of replicas before them."""
    name = "dp_shard"
    if dims.context > 1:  # those that share a sequence share the weights too
        name = "dp_shard_context"
        mesh["dp_shard", "context"]._flatten(name)
    return mesh[name] if dims.dp_replicate == 1 and dims.mode != "ddp" else mesh["dp_replicate", name]


@dataclass(frozen=True, slots=True)
class Sharing:
    """How weights are shared out: arguments of fully_shard."""

    together: bool
    """Whether gathered weights stay gathered until the backward pass."""
    precision: MixedPrecisionPolicy
    offload: OffloadPolicy

    @classmethod
    def of(cls, dims: ParallelDims, dtype: torch.dtype | None, offload: str) -> Sharing:
        """`dtype` is what layers compute in, where it is not that of the weights."""
        policy = OffloadPolicy()
        if offload != "none":
            policy = CPUOffloadPolicy(pin_memory=offload == "pinned" and torch.cuda.is_available())
        # Inputs are cast by autocast. Gradients are summed in float32.
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        return cls(dims.keeps_gathered, precision, policy)

    def apply(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        together: bool,
        by: Callable[[nn.Parameter], Shard | None] | None = None,
    ) -> None:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=not together,
            shard_placement_fn=by,
            mp_policy=self.precision,
            offload_policy=self.offload,
        )


def shard(
    model: nn.Module, mesh: DeviceMesh, how: Sharing, apart: Mapping[nn.Module, DeviceMesh] | None = None
) -> None:
    """Share out a model's parameters over `mesh` (`batch_mesh`), layer by layer; the rest is one more unit.

    `apart` are modules within layers that are shared out over other processes. Weights may be on the meta device.
    """
    make_shardable(model)
    for module, its_mesh in (apart or {}).items():
        how.apply(module, its_mesh, together=how.together)
    for layer in repeated_layers(model):
        how.apply(layer, mesh, together=how.together)
    # Embeddings, last norm and head: gathered once a pass, since the loss needs the head after the model has ended.
    how.apply(model, mesh, together=True, by=partial(shard_dimension, shards=mesh.size(-1)))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sums, not means: the loss is divided by the targets of the whole batch already.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


class SharedSequences:
    """Sequences of which each process has a part; attention sees the others' (`context.py`)."""

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh, how: str) -> None:
        self.rank, self._size = mesh.get_local_rank(), mesh.size()
        self._model, self._group, self._how = model, mesh.get_group(), how
        self._causal = is_causal(model)
        balance = router_aux_loss_of(model)
        if balance is not None:
            balance.context = self._group

    def part(self, batch: Batch) -> Batch:
        return split_batch(batch, self.rank, self._size, self._causal)

    def exchanging(self) -> AbstractContextManager[None]:
        return exchanging(self._model, self._group, self._how)


class FullyShardedDataParallel(Strategy):
    """No process holds the whole model, or not all of it for itself; `model` has been through `shard`."""

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        world: World,
        precision: str,
        dims: ParallelDims,
        shared: SharedSequences | None = None,
    ) -> None:
        super().__init__(model, objective, world, precision, dims)
        self._shared = shared

    @property
    def holds_full_model(self) -> bool:
        return False

    @property
    def can_probe_memory(self) -> bool:
        # On a GPU memory runs out on all alike, unless experts are shared out: those of one sample may be one rank's,
        # and the others would wait for it. Before PyTorch 2.13 sharded layers do not recover from a failed pass. On a
        # CPU memory hardly runs out, and each trial costs its communication.
        recovers = hasattr(FSDPModule, "reset_iter_state")
        return self._world.device.type == "cuda" and self.dims.expert == 1 and recovers

    def check_split(self) -> None:
        if self._shared is not None:
            self.with_full_model(check_context)

    def run(self, batches: list[Batch], targets: float, loss_scale: torch.Tensor | None = None) -> torch.Tensor:
        if self._shared is not None:  # else the same masks of dropout would be drawn for all parts
            torch.manual_seed(torch.initial_seed() + self._shared.rank)
        with self._exchanging():
            return super().run(batches, targets, loss_scale)

    def probe_memory(self, batch: Batch) -> None:
        with self._exchanging():
            super().probe_memory(batch)

    def norm(self) -> torch.Tensor:
        return norm_of_shards(self.model.parameters(), self._world.size, self._world.device)

    def evaluate(self, batches: Iterable[tuple[Batch, np.ndarray]], count: int) -> tuple[dict[str, float], np.ndarray]:
        with self._gathered(), self._exchanging():
            return super().evaluate(batches, count)

    @contextmanager
    def generating(self) -> Iterator[bool]:
        with self._gathered():
            yield True  # a forward pass gathers weights from all

    def _local_batch(self, batch: Batch) -> Batch:
        return super()._local_batch(batch if self._shared is None else self._shared.part(batch))

    def _exchanging(self) -> AbstractContextManager[None]:
        """Whatever is computed of parts of sequences, forward and backward, is computed in this."""
        return nullcontext() if self._shared is None else self._shared.exchanging()

    def _count_once(self, sums: torch.Tensor) -> torch.Tensor:
        # Ranks that share the matrices of a layer all have the same sums.
        return sums if self._world.rank % self.dims.tensor == 0 else torch.zeros_like(sums)

    def _gradient_sync(self, last: bool) -> AbstractContextManager[object]:
        root, mode = self.model, self.dims.mode
        assert isinstance(root, FSDPModule)
        if mode in ("ddp", "zero1"):
            root.set_requires_gradient_sync(last)
        if mode == "hsdp":
            root.set_requires_all_reduce(last)
        if mode in ("ddp", "zero1", "zero2"):
            root.set_reshard_after_backward(last)
        root.set_is_last_backward(last)
        return nullcontext()

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """Forward passes without a backward leave weights gathered; here they are let go."""
        try:
            yield
        finally:
            for module in self.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
