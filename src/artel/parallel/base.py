"""What all strategies share: the loops over micro-batches, and sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from artel.models.device import autocast_dtype
from artel.models.failed_pass import forget_failed_pass
from artel.models.profiler_ranges import profiler_range
from artel.objectives import Batch, Objective
from artel.parallel.grad_norm import norm_here
from artel.parallel.mesh import ParallelDims
from artel.parallel.process_group import World
from artel.parallel.strategy import OptimizerProtocol

T = TypeVar("T")


class InForward(nn.Module):
    """A module around the model, within whose forward pass all work with the model is done.

    What wraps it (DDP, DeepSpeed's engine) hooks into that forward pass: it sees the backward pass of the loss, and
    gathers a weight that is used outside of its own layer, as the output head's is.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[PreTrainedModel], T]) -> T:
        return work(self.model)


class Strategy:
    """A base class for strategies; see `ParallelStrategy` for what its public methods promise.

    As it stands it runs micro-batches one after another on a model that this process holds whole. A strategy overrides
    what differs.
    """

    def __init__(
        self, model: PreTrainedModel, objective: Objective, world: World, precision: str, dims: ParallelDims
    ) -> None:
        self.model = model
        self.dims = dims
        self._objective = objective
        self._world = world
        self._dtype = autocast_dtype(precision)
        self._forward: Callable[[Callable[[PreTrainedModel], Any]], Any] = self._on_model
        """Runs work with the model that a backward pass follows; DistributedDataParallel hooks in here."""

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
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def all_reduce_min(self, number: int) -> int:
        if self._world.size == 1:
            return number
        smallest = torch.tensor(number)
        dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def run(self, batches: list[Batch], targets: float, loss_scale: torch.Tensor | None = None) -> torch.Tensor:
        multiplier = self._loss_multiplier(targets) * (1.0 if loss_scale is None else loss_scale)
        if self._objective.needs_global_statistics:
            self._objective.set_global_statistics(self._global_statistics(batches))
        if self._objective.needs_global_outputs:
            return self._run_by_outputs([self._local_batch(batch) for batch in batches], multiplier)
        total = []
        for number, batch in enumerate(batches):
            with self._gradient_sync(last=number == len(batches) - 1):
                with profiler_range("artel: forward"), self._autocast():
                    sums = self._loss(self._local_batch(batch))
                with profiler_range("artel: backward"):
                    self._backward(sums[0] * multiplier)
            total.append(self._count_once(sums.detach()))
        return torch.stack(total).sum(dim=0)

    def probe_memory(self, batch: Batch) -> None:
        with self._autocast():
            loss = self._objective.loss(self.model, self._local_batch(batch))[0]
        loss.backward()
        self.model.zero_grad(set_to_none=True)

    def shard_batches(self, batches: list[Batch]) -> list[Batch]:
        parts = [self._local_batch(batch) for batch in batches]
        self._local_batch = lambda part: part  # type: ignore[assignment,method-assign]
        return parts

    def skip_collectives(self) -> None:
        pass

    def norm(self) -> torch.Tensor:
        return norm_here([parameter.grad for parameter in self.model.parameters() if parameter.grad is not None])

    def evaluate(self, batches: Iterable[tuple[Batch, np.ndarray]], count: int) -> tuple[dict[str, float], np.ndarray]:
        names = self._objective.sums
        totals = torch.zeros(len(names), dtype=torch.float64)
        outputs = self._room_for_outputs(count)
        self.model.eval()
        with torch.no_grad():
            for batch, indices in batches:
                with self._autocast():
                    sums, rows = self._evaluate_batch(self._local_batch(batch))
                totals += self._count_once(sums).double().cpu()
                self._keep_outputs(outputs, rows, indices)
        self.model.train()
        return self._over_all_ranks(totals, outputs)

    @contextmanager
    def generating(self) -> Iterator[bool]:
        yield self._world.first

    def with_full_model(self, work: Callable[[PreTrainedModel], T]) -> T:
        with self.generating():  # weights that are gathered for it are let go again
            return self._on_model(work)

    def check_split(self) -> None:
        pass

    def own_optimizer(
        self, make: Callable[[], torch.optim.Optimizer], micro_batch: int, steps: int | None
    ) -> OptimizerProtocol | None:
        return None

    # What a strategy overrides

    def _on_model(self, work: Callable[[PreTrainedModel], T]) -> T:
        """What `work` returns for the model, run so that all of its weights are there."""
        return work(self.model)

    def _loss(self, batch: Batch) -> torch.Tensor:
        """The objective's sums, from which the backward pass begins."""
        sums: torch.Tensor = self._forward(lambda model: self._objective.loss(model, batch))
        return sums

    def _backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a micro-batch."""
        loss.backward()

    def _local_batch(self, batch: Batch) -> Batch:
        """This rank's part of a micro-batch, on its device."""
        return batch.to(self._world.device)

    def _count_once(self, sums: torch.Tensor) -> torch.Tensor:
        """What this rank adds to the sums over all ranks: zeros where another rank adds the same."""
        return sums

    def _loss_multiplier(self, targets: float) -> float:
        """What a micro-batch's summed loss is multiplied by, so that gradients are those of the mean."""
        return 1.0 / targets

    def _gradient_sync(self, last: bool) -> AbstractContextManager[object]:
        """The context of a micro-batch's forward and backward; gradients are exchanged with the step's last one."""
        return nullcontext()

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """The context of a forward pass: its precision."""
        with torch.autocast(self._world.device.type, self._dtype, enabled=self._dtype is not None):
            yield

    # A loss of the outputs for the whole global batch

    def _run_by_outputs(self, batches: list[Batch], multiplier: torch.Tensor | float) -> torch.Tensor:
        """`run`, where the loss depends on the outputs for all samples of the global batch.

        The outputs for all of them come first, without gradient; then the gradient of the loss with respect to each;
        then each micro-batch is computed again, and its backward pass begins with the gradients of its own outputs (Gao
        et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", GradCache). The last
        micro-batch is computed once: its backward pass follows at once. A seed for each makes dropout the same in both
        passes.
        """
        seed, last = torch.initial_seed(), len(batches) - 1
        with torch.no_grad():
            outputs = [self._outputs(batch, seed + number) for number, batch in enumerate(batches[:-1])]
        with self._gradient_sync(last=last == 0):
            kept = self._outputs(batches[-1], seed + last, self._forward)
            sums, grads = self._output_gradients([*outputs, kept.detach()], batches, multiplier)
            with profiler_range("artel: backward"):
                self._backward((kept * grads[-1]).sum())
        for number, batch in enumerate(batches[:-1]):
            with self._gradient_sync(last=number == last - 1):
                again = self._outputs(batch, seed + number, self._forward)
                with profiler_range("artel: backward"):
                    self._backward((again * grads[number]).sum())
        return sums

    def _outputs(
        self, batch: Batch, seed: int, forward: Callable[[Callable[[PreTrainedModel], Any]], Any] | None = None
    ) -> torch.Tensor:
        """The objective's outputs for a micro-batch; `forward` runs what a backward pass follows."""
        torch.manual_seed(seed)
        with profiler_range("artel: forward"), self._autocast():
            outputs: torch.Tensor = (forward or self._on_model)(
                lambda model: self._objective.batch_outputs(model, batch)
            )
        return outputs

    def _output_gradients(
        self, outputs: list[torch.Tensor], batches: list[Batch], multiplier: torch.Tensor | float
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """This rank's sums, and the gradient of the global loss with respect to each micro-batch's outputs.

        Each rank finds the loss of its own targets, and how it depends on the outputs of all.
        """
        everything, first = self._concatenated(torch.cat(outputs))
        keys, _ = self._concatenated(torch.cat([self._objective.output_keys(batch) for batch in batches]))
        everything.requires_grad_()
        total, ends = [], np.cumsum([first, *map(len, outputs)]).tolist()
        for start, end in pairwise(ends):
            sums = self._objective.global_loss(everything, keys, slice(start, end))
            (sums[0] * multiplier).backward()
            total.append(self._count_once(sums.detach()))
        assert everything.grad is not None
        grads = self._count_once(everything.grad)
        if self._world.size > 1:
            dist.all_reduce(grads)
        return torch.stack(total).sum(dim=0), list(grads[first : ends[-1]].split([len(each) for each in outputs]))

    def _concatenated(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The rows of all data-parallel ranks, one after another, and where this rank's begin."""
        if self._world.size == 1:
            return rows, 0
        counts = [0.0] * self.dp_degree
        if self.is_reporting_rank:
            counts[self.dp_rank] = float(len(rows))
        counts = self.all_reduce_sum(counts)
        first = int(sum(counts[: self.dp_rank]))
        everything = rows.new_zeros(int(sum(counts)), rows.shape[1])
        everything[first : first + len(rows)] = self._count_once(rows)
        dist.all_reduce(everything)  # each rank adds zeros in the place of the others'
        return everything, first

    # Shared by strategies that run whole batches in their own way

    def _global_statistics(self, batches: list[Batch]) -> list[float]:
        """What the objective wants to know of the global batch before its first loss."""
        statistics = []
        with torch.no_grad(), self._autocast():
            for batch in batches:
                statistics.append(self._count_once(self._batch_statistics(self._local_batch(batch))))
        return self.all_reduce_sum(torch.stack(statistics).sum(dim=0).double().tolist())

    def _batch_statistics(self, batch: Batch) -> torch.Tensor:
        return self._on_model(lambda model: self._objective.batch_statistics(model, batch))

    def _evaluate_batch(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._on_model(lambda model: self._objective.evaluate_batch(model, batch))

    def _room_for_outputs(self, samples: int) -> torch.Tensor:
        """Zeros (samples, outputs) for what the objective says of each sample of all ranks that has outputs."""
        of_first = self._objective.samples_with_outputs
        samples = samples if of_first is None else min(samples, of_first)
        dtype = torch.float32 if self._objective.has_many_outputs else torch.float64
        return torch.zeros(samples, len(self._objective.outputs), dtype=dtype)

    def _keep_outputs(self, outputs: torch.Tensor, rows: torch.Tensor, indices: np.ndarray) -> None:
        """Put a batch's rows into their places; `indices` rise, and those beyond the room have no outputs."""
        kept = indices[indices < len(outputs)]
        outputs[kept] = self._count_once(rows[: len(kept)]).to(outputs)

    def _over_all_ranks(self, totals: torch.Tensor, outputs: torch.Tensor) -> tuple[dict[str, float], np.ndarray]:
        if self._world.size > 1 and outputs.numel():
            dist.all_reduce(outputs)  # each sample is one rank's; the others have zeros in its place
        return dict(zip(self._objective.sums, self.all_reduce_sum(totals.tolist()), strict=True)), outputs.numpy()
