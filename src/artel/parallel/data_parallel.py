"""A layout runs one global batch. The loop hands it micro-batches and never asks which layout it is.

Whatever the layout, the gradient of a step is that of the mean loss over all target tokens of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from artel.models.attention import preferred_kernels
from artel.models.device import autocast_dtype
from artel.models.profiler_ranges import profiler_range
from artel.objectives import Batch, Objective
from artel.parallel.grad_norm import norm_here
from artel.parallel.mesh import ParallelDims
from artel.parallel.process_group import World

T = TypeVar("T")


class ParallelStrategy(Protocol):
    """What the loop asks of a layout."""

    model: PreTrainedModel
    dims: ParallelDims

    @property
    def dp_rank(self) -> int:
        """Which share of a global batch this process takes, of `dims.dp_degree`."""
        ...

    @property
    def is_reporting_rank(self) -> bool:
        """Whether this process's counts of a batch count: of those that take the same share, one's do."""
        ...

    @property
    def can_probe_memory(self) -> bool:
        """Whether `probe_memory` shows what memory a micro-batch takes."""
        ...

    def all_reduce_sum(self, numbers: list[float]) -> list[float]:
        """The sum of each number over all processes, known to the host, without waiting for the device."""
        ...

    def all_reduce_min(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        ...

    def run(self, batches: list[Batch], targets: float, loss_scale: torch.Tensor | None = None) -> torch.Tensor:
        """Forward and backward of this rank's micro-batches; `targets` counts those of the global batch.

        This rank's sums, float32 (len(objective.sums),), on the device. Gradients are then complete on every rank,
        times `loss_scale` where one is given.
        """
        ...

    def probe_memory(self, batch: Batch) -> None:
        """Forward and backward of a micro-batch for nothing; without the others, where each has the whole model."""
        ...

    def norm(self) -> torch.Tensor:
        """The norm of the gradients as they are, a scalar on the device."""
        ...

    def judge(self, batches: Iterable[tuple[Batch, np.ndarray]], count: int) -> tuple[dict[str, float], np.ndarray]:
        """Sums over all ranks' validation batches by name, and the outputs of all `count` samples (count, outputs).

        With each batch come the sample indices of its first rows; rows beyond them are filler. All processes give
        equally many batches.
        """
        ...

    def generating(self) -> AbstractContextManager[bool]:
        """What the model writes in; whether this process must take part."""
        ...

    def with_full_model(self, work: Callable[[PreTrainedModel], T]) -> T:
        """What `work` finds out about the model, on all processes at the same time; not for stages of a pipeline."""
        ...


class _Learner(nn.Module):
    """Model and objective as one module: what is wrapped must contain the loss, so that its hooks see the backward."""

    def __init__(self, model: PreTrainedModel, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.objective.loss(self.model, batch)


class DataParallel:
    """Every process holds the whole model: alone, or as DistributedDataParallel."""

    def __init__(self, model: PreTrainedModel, objective: Objective, world: World, precision: str) -> None:
        self.dims = ParallelDims("ddp", copies=world.size)
        self.model = model.to(world.device)
        self._objective = objective
        self._world = world
        self._dtype = autocast_dtype(precision)
        self._learner: nn.Module = _Learner(model, objective)
        if world.size > 1:
            # Buffers are computed alike on every rank (masks, rotary angles): nothing to send at each forward. Nor are
            # frozen weights, which every rank has read for itself, sent at the start: under LoRA that is all the model.
            alike = [name for name, _ in self._learner.named_buffers()]
            alike += [name for name, parameter in self._learner.named_parameters() if not parameter.requires_grad]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self._learner, alike)
            devices = [world.device] if world.device.type == "cuda" else None
            self._learner = DistributedDataParallel(self._learner, device_ids=devices, gradient_as_bucket_view=True)

    @property
    def dp_rank(self) -> int:
        return self.dims.dp_rank(self._world.rank)

    @property
    def is_reporting_rank(self) -> bool:
        return self.dims.is_reporting_rank(self._world.rank)

    @property
    def can_probe_memory(self) -> bool:
        return True

    def all_reduce_sum(self, numbers: list[float]) -> list[float]:
        if self._world.size == 1:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def all_reduce_min(self, number: int) -> int:
        if self._world.size == 1:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def run(self, batches: list[Batch], targets: float, loss_scale: torch.Tensor | None = None) -> torch.Tensor:
        scale = self._loss_multiplier(targets) * (1.0 if loss_scale is None else loss_scale)
        if self._objective.needs_global_statistics:
            self._survey(batches)
        sums = []
        for number, batch in enumerate(batches):
            with self._gradient_sync(last=number == len(batches) - 1):
                with profiler_range("artel: forward"), self._autocast():
                    found = self._learn(self._local_batch(batch))
                with profiler_range("artel: backward"):
                    self._backward(found[0] * scale)
            sums.append(self._count_once(found.detach()))
        return torch.stack(sums).sum(dim=0)

    def _survey(self, batches: list[Batch]) -> None:
        found = []
        with torch.no_grad(), self._autocast():
            for batch in batches:
                found.append(self._count_once(self._survey_of(self._local_batch(batch))))
        self._objective.set_global_statistics(self.all_reduce_sum(torch.stack(found).sum(dim=0).double().tolist()))

    def probe_memory(self, batch: Batch) -> None:
        with self._autocast():
            loss = self._objective.loss(self.model, self._local_batch(batch))[0]
        loss.backward()
        self.model.zero_grad(set_to_none=True)

    def norm(self) -> torch.Tensor:
        return norm_here([each.grad for each in self.model.parameters() if each.grad is not None])

    def judge(self, batches: Iterable[tuple[Batch, np.ndarray]], count: int) -> tuple[dict[str, float], np.ndarray]:
        names = self._objective.sums
        totals = torch.zeros(len(names), dtype=torch.float64)
        outputs = torch.zeros(count, len(self._objective.outputs), dtype=torch.float64)
        self.model.eval()
        with torch.no_grad():
            for batch, indices in batches:
                with self._autocast():
                    sums, rows = self._judgement(self._local_batch(batch))
                totals += self._count_once(sums).double().cpu()
                outputs[indices] = self._count_once(rows[: len(indices)]).double().cpu()
        self.model.train()
        if self._world.size > 1 and outputs.numel():
            dist.all_reduce(outputs)  # each sample is one rank's; the others have zeros in its place
        return dict(zip(names, self.all_reduce_sum(totals.tolist()), strict=True)), outputs.numpy()

    @contextmanager
    def generating(self) -> Iterator[bool]:
        yield self._world.first

    def with_full_model(self, work: Callable[[PreTrainedModel], T]) -> T:
        with self.generating():  # where the model is in shards they are let go again
            return work(self.model)

    def _learn(self, batch: Batch) -> torch.Tensor:
        """The objective's sums, from which the backward pass begins."""
        found: torch.Tensor = self._learner(batch)
        return found

    def _survey_of(self, batch: Batch) -> torch.Tensor:
        """The objective's survey of a micro-batch."""
        return self._objective.batch_statistics(self.model, batch)

    def _judgement(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The objective's judgement of a micro-batch."""
        return self._objective.evaluate_batch(self.model, batch)

    def _backward(self, loss: torch.Tensor) -> None:
        """The backward pass of a micro-batch."""
        loss.backward()

    def _local_batch(self, batch: Batch) -> Batch:
        """This process's part of a micro-batch, on its device."""
        return batch.to(self._world.device)

    def _count_once(self, found: torch.Tensor) -> torch.Tensor:
        """What this process adds to the sums over all."""
        return found

    def _loss_multiplier(self, targets: float) -> float:
        """What a micro-batch's summed loss is multiplied by: DDP divides gradients by the number of processes."""
        return self._world.size / targets

    def _gradient_sync(self, last: bool) -> AbstractContextManager[object]:
        """Forward and backward of a micro-batch run in this; gradients are exchanged with the step's last one."""
        waits = isinstance(self._learner, DistributedDataParallel) and not last
        return self._learner.no_sync() if waits else nullcontext()  # type: ignore[operator]

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """What a forward pass runs in: the precision, and the order among kernels of attention."""
        device = self._world.device
        with preferred_kernels(device), torch.autocast(device.type, self._dtype, enabled=self._dtype is not None):
            yield
