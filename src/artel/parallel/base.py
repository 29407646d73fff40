"""Base class of all strategies: loops over micro-batches, sums over ranks, gradient norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from artel.models.device import autocast_dtype
from artel.models.forward_pass import forget_failed_pass, keep_hidden_states_in_bf16, profiler_range
from artel.objectives import Batch, Objective
from artel.parallel.mesh import ParallelDims
from artel.parallel.process_group import World
from artel.parallel.strategy import OptimizerProtocol

T = TypeVar("T")

# Rows for the norm of a CPU tensor: a fixed number, so that the norm does not depend on the number of threads. PyTorch
# computes the norm of a tensor on one thread, and of its rows on all: 17 M numbers in 2.6 ms or 1.6 (two cores).
_ROWS = 64


class InForward(nn.Module):
    """Wraps the model in a module whose forward pass calls a function with the model.

    DDP and DeepSpeed hook into that forward pass. So they see the backward pass of the loss, and gather weights that
    are used outside of their own layer, such as those of the output head.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[PreTrainedModel], T]) -> T:
        return work(self.model)


class Strategy:
    """Base class for strategies. `ParallelStrategy` documents the public methods.

    This class runs micro-batches one after another on a model that this process holds in full. A subclass overrides
    the methods that differ.
    """

    def __init__(
        self, model: PreTrainedModel, objective: Objective, world: World, precision: str, dims: ParallelDims
    ) -> None:
        self.model = model
        self.dims = dims
        self._objective = objective
        self._world = world
        self._dtype = autocast_dtype(precision)
        keep_hidden_states_in_bf16(model)
        self._forward: Callable[[Callable[[PreTrainedModel], Any]], Any] = self._on_model
        """Runs a function that needs a backward pass. DistributedDataParallel hooks into it."""

    @property
    def dp_rank(self) -> int:
        return self.dims.dp_rank(self._world.rank)

    @property
    def dp_degree(self) -> int:
        return self.dims.dp_degree

    @property
    def is_reporting_rank(self) -> bool:
        return self.dims.is_reporting_rank(self._world.rank)

    @property
    def holds_full_model(self) -> bool:
        return True

    @property
    def stages(self) -> int:
        return 1

    @property
    def can_run_full_model(self) -> bool:
        return True

    @property
    def can_generate(self) -> bool:
        return True

    @property
    def can_probe_memory(self) -> bool:
        return True

    def forget_failed_pass(self) -> None:
        forget_failed_pass(self.model)

    def all_reduce_sum(self, numbers: list[float]) -> list[float]:
        if self._world.size == 1:
            return numbers
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums)
        return sums.tolist()

    def all_reduce_min(self, value: int) -> int:
        if self._world.size == 1:
            return value
        smallest = torch.tensor(value)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def run(self, batches: list[Batch], targets: float, loss_scale: torch.Tensor | None = None) -> torch.Tensor:
        multiplier = self._loss_multiplier(targets) * (1.0 if loss_scale is None else loss_scale)
        if self._objective.needs_global_statistics:
            self._objective.set_global_statistics(self._global_statistics(batches))
        if self._objective.needs_global_outputs:
            return self._run_by_outputs([self._local_batch(batch) for batch in batches], multiplier)
        batch_sums = []
        for index, batch in enumerate(batches):
            with self._gradient_sync(last=index == len(batches) - 1):
                with profiler_range("artel: forward"), self._autocast():
                    sums = self._loss(self._local_batch(batch))
                with profiler_range("artel: backward"):
                    self._backward(sums[0] * multiplier)
            batch_sums.append(self._count_once(sums.detach()))
        return torch.stack(batch_sums).sum(dim=0)

    def probe_memory(self, batch: Batch) -> None:
        with self._autocast():
            loss = self._objective.loss(self.model, self._local_batch(batch))[0]
        loss.backward()
        self.model.zero_grad(set_to_none=True)

    def shard_batches(self, batches: list[Batch]) -> list[Batch]:
        shards = [self._local_batch(batch) for batch in batches]
        self._local_batch = lambda shard: shard  # type: ignore[assignment,method-assign]
        return shards

    def disable_autocast(self) -> None:
        """Compute in the precision of the weights themselves."""
        self._dtype = None

    def skip_collectives(self) -> None:
        pass

    def norm_of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return local_norm([*tensors.values()])

    def gradient_norm(self) -> torch.Tensor:
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return self.norm_of({name: gradient for name, gradient in gradients.items() if gradient is not None})

    def evaluate(self, batches: Iterable[tuple[Batch, np.ndarray]], count: int) -> tuple[dict[str, float], np.ndarray]:
        names = self._objective.sums
        totals = torch.zeros(len(names), dtype=torch.float64)
        outputs = self._empty_outputs(count)
        self.model.eval()
        with torch.no_grad():
            for batch, indices in batches:
                with self._autocast():
                    sums, sample_outputs = self._evaluate_batch(self._local_batch(batch))
                totals += self._count_once(sums).double().cpu()
                self._store_outputs(outputs, sample_outputs, indices)
        self.model.train()
        return self._reduce_evaluation(totals, outputs)

    @contextmanager
    def generating(self) -> Iterator[bool]:
        yield self._world.first

    def with_full_model(self, work: Callable[[PreTrainedModel], T]) -> T:
        with self.generating():  # frees the gathered weights afterwards
            return self._on_model(work)

    def infer(self, work: Callable[[PreTrainedModel], T]) -> T:
        self.model.eval()
        with torch.no_grad(), self._autocast():
            result = self.with_full_model(work)
        self.model.train()
        return result

    def check_split(self) -> None:
        pass

    def own_optimizer(
        self, make: Callable[[], torch.optim.Optimizer], micro_batch: int, steps: int | None
    ) -> OptimizerProtocol | None:
        return None

    # Methods for a strategy to override

    def _on_model(self, work: Callable[[PreTrainedModel], T]) -> T:
        """Run `work` on the model with all of its weights present, and return its result."""
        return work(self.model)

    def _loss(self, batch: Batch) -> torch.Tensor:
        """Return the objective's sums. The backward pass starts from the first."""
        sums: torch.Tensor = self._forward(lambda model: self._objective.loss(model, batch))
        return sums

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def _local_batch(self, batch: Batch) -> Batch:
        """Return this rank's shard of a micro-batch, on its device."""
        return batch.to(self._world.device)

    def _count_once(self, sums: torch.Tensor) -> torch.Tensor:
        """Return this rank's contribution to the sums over all ranks: zeros if another rank adds the same values."""
        return sums

    def _loss_multiplier(self, targets: float) -> float:
        """Return the factor of a micro-batch's summed loss that gives the gradients of the mean loss."""
        return 1.0 / (targets or 1.0)  # a step of a round without signal has no targets, and a gradient of 0

    def _gradient_sync(self, last: bool) -> AbstractContextManager[object]:
        """Context of a micro-batch's forward and backward. Ranks exchange gradients after the last one of a step."""
        return nullcontext()

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """Context of a forward pass: its precision."""
        with torch.autocast(self._world.device.type, self._dtype, enabled=self._dtype is not None):
            yield

    # Losses that need the outputs of the whole global batch

    def _run_by_outputs(self, batches: list[Batch], multiplier: torch.Tensor | float) -> torch.Tensor:
        """`run` for a loss that depends on the outputs of all samples in the global batch.

        First compute all outputs without gradients, then the gradient of the loss with respect to each output. Then
        compute each micro-batch again and start its backward pass from the gradients of its outputs (Gao et al. 2021,
        "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", GradCache). The last micro-batch is
        computed only once, with its backward pass right after. One seed per micro-batch makes dropout the same in both
        passes.
        """
        seed = torch.initial_seed()
        last = len(batches) - 1
        with torch.no_grad():
            outputs = [self._compute_outputs(batch, seed + index) for index, batch in enumerate(batches[:-1])]
        with self._gradient_sync(last=last == 0):
            last_outputs = self._compute_outputs(batches[-1], seed + last, self._forward)
            sums, grads = self._compute_output_gradients([*outputs, last_outputs.detach()], batches, multiplier)
            with profiler_range("artel: backward"):
                self._backward((last_outputs * grads[-1]).sum())
        for index, batch in enumerate(batches[:-1]):
            with self._gradient_sync(last=index == last - 1):
                recomputed = self._compute_outputs(batch, seed + index, self._forward)
                with profiler_range("artel: backward"):
                    self._backward((recomputed * grads[index]).sum())
        return sums

    def _compute_outputs(
        self, batch: Batch, seed: int, forward: Callable[[Callable[[PreTrainedModel], Any]], Any] | None = None
    ) -> torch.Tensor:
        """Return the objective's outputs for a micro-batch. `forward`: runs the model if a backward pass follows."""
        torch.manual_seed(seed)
        with profiler_range("artel: forward"), self._autocast():
            outputs: torch.Tensor = (forward or self._on_model)(
                lambda model: self._objective.batch_outputs(model, batch)
            )
        return outputs

    def _compute_output_gradients(
        self, outputs: list[torch.Tensor], batches: list[Batch], multiplier: torch.Tensor | float
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return this rank's sums, and the gradient of the global loss with respect to each micro-batch's outputs.

        Each rank computes the loss of its own targets and its gradient with respect to the outputs of all ranks.
        """
        gathered, first_row = self._gather_rows(torch.cat(outputs))
        keys, _ = self._gather_rows(torch.cat([self._objective.output_keys(batch) for batch in batches]))
        gathered.requires_grad_()
        batch_sums = []
        ends = np.cumsum([first_row, *map(len, outputs)]).tolist()
        for start, end in pairwise(ends):
            sums = self._objective.global_loss(gathered, keys, slice(start, end))
            (sums[0] * multiplier).backward()
            batch_sums.append(self._count_once(sums.detach()))
        assert gathered.grad is not None
        grads = self._count_once(gathered.grad)
        if self._world.size > 1:
            dist.all_reduce(grads)
        return torch.stack(batch_sums).sum(dim=0), list(grads[first_row : ends[-1]].split(list(map(len, outputs))))

    def _gather_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows of all data-parallel ranks, in order of rank, and the index of this rank's first row."""
        if self._world.size == 1:
            return rows, 0
        counts = [0.0] * self.dp_degree
        if self.is_reporting_rank:
            counts[self.dp_rank] = float(len(rows))
        counts = self.all_reduce_sum(counts)
        first_row = int(sum(counts[: self.dp_rank]))
        gathered = rows.new_zeros(int(sum(counts)), rows.shape[1])
        gathered[first_row : first_row + len(rows)] = self._count_once(rows)
        dist.all_reduce(gathered)  # each rank adds zeros to the rows of other ranks
        return gathered, first_row

    # Helpers for strategies that override `run` or `evaluate`

    def _global_statistics(self, batches: list[Batch]) -> list[float]:
        """Return the statistics of the global batch that the objective needs before its first loss."""
        statistics = []
        with torch.no_grad(), self._autocast():
            for batch in batches:
                statistics.append(self._count_once(self._batch_statistics(self._local_batch(batch))))
        return self.all_reduce_sum(torch.stack(statistics).sum(dim=0).double().tolist())

    def _batch_statistics(self, batch: Batch) -> torch.Tensor:
        return self._on_model(lambda model: self._objective.batch_statistics(model, batch))

    def _evaluate_batch(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._on_model(lambda model: self._objective.evaluate_batch(model, batch))

    def _empty_outputs(self, samples: int) -> torch.Tensor:
        """Return zeros of shape (samples that have outputs, outputs), for the samples of all ranks."""
        limit = self._objective.samples_with_outputs
        samples = samples if limit is None else min(samples, limit)
        dtype = torch.float32 if self._objective.has_many_outputs else torch.float64
        return torch.zeros(samples, len(self._objective.outputs), dtype=dtype)

    def _store_outputs(self, outputs: torch.Tensor, sample_outputs: torch.Tensor, indices: np.ndarray) -> None:
        """Write the outputs of a batch into `outputs`. `indices` ascend; those past its end are padding."""
        stored = indices[indices < len(outputs)]
        outputs[stored] = self._count_once(sample_outputs[: len(stored)]).to(outputs)

    def _reduce_evaluation(self, totals: torch.Tensor, outputs: torch.Tensor) -> tuple[dict[str, float], np.ndarray]:
        if self._world.size > 1 and outputs.numel():
            dist.all_reduce(outputs)  # one rank has each sample, the other ranks have zeros for it
        return dict(zip(self._objective.sums, self.all_reduce_sum(totals.tolist()), strict=True)), outputs.numpy()


@torch.no_grad()
def local_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of tensors that this process holds in full: a float32 scalar on their device."""
    # Sum in float32, since gradients of bf16 weights are bf16.
    if tensors[0].device.type == "cpu":
        rows = [tensor.reshape(1 if tensor.numel() % _ROWS else _ROWS, -1) for tensor in tensors]
        norms = torch.cat([torch.linalg.vector_norm(row, dim=1, dtype=torch.float32) for row in rows])
    else:
        norms = torch.stack(torch._foreach_norm(tensors, 2, torch.float32))
    return torch.linalg.vector_norm(norms)


@torch.no_grad()
def sharded_norm(shards: Iterable[tuple[torch.Tensor, int]], device: torch.device) -> torch.Tensor:
    """Return the norm of tensors sharded over all processes: a float32 scalar on `device`.

    `shards`: this process's shards, each with the number n of processes that hold the same one. Each of them counts
    1/n of it. So one sum over all processes is right for any mixture of meshes, which clip_grad_norm_ refuses.
    """
    by_replicas: dict[int, list[torch.Tensor]] = {}
    for shard, replicas in shards:
        if shard.numel():
            by_replicas.setdefault(replicas, []).append(shard)
    square_sum = torch.zeros((), device=device)
    for replicas, group in by_replicas.items():
        square_sum += torch.stack(torch._foreach_norm(group, 2, torch.float32)).square().sum().to(device) / replicas
    dist.all_reduce(square_sum)
    return square_sum.sqrt()


def local_shard(tensor: torch.Tensor, owners: int) -> tuple[torch.Tensor, int]:
    """Return this process's shard of a tensor or DTensor, and the number of processes that hold the same shard.

    `owners`: number of processes that hold the tensor, in full or in shards: all, or all of a pipeline stage.
    """
    if not isinstance(tensor, DTensor):
        return tensor, owners
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return tensor.to_local(), owners // math.prod(size for placement, size in sizes if not placement.is_replicate())
